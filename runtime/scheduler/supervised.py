"""The owner's side of the supervisor: start it, give it processes, and be alone in a directory.

Called by `private_cluster.py` and `local.py`. Read next: supervisor.py, the process itself.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cray_agents.errors import SchedulerError, SetupError

PROGRAM = Path(__file__).with_name("supervisor.py")
CLOSING_SECONDS = 1.5  # another living owner may be closing
PREDECESSOR_SECONDS = 8.0  # a supervisor whose owner died ends within two


class Supervised:
    """Processes that end with this one. One live instance per directory of a host.

    The constructor ends what a killed predecessor left in the directory. Raises SetupError if
    another living process keeps its processes there.
    """

    def __init__(self, directory: Path, scratch: Path | None = None) -> None:
        self.directory = directory.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        owner = self.directory / "owner.json"
        await_predecessor(owner)
        sweep(str(self.directory))
        command = [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid())]
        with (self.directory / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.directory), str(scratch or "")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,  # a terminal's Ctrl-C is the owner's to handle
            )
        self.pid = self._process.pid
        draft = owner.with_name(f"owner.json.{os.getpid()}")
        draft.write_text(json.dumps({"host": socket.gethostname(), "boot": boot_id()}
            | {"supervisor": [self.pid, start_time(self.pid)]}
            | {"owner": [os.getpid(), start_time(os.getpid())]}))  # fmt: skip
        draft.rename(owner)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, name: str, argv: list[str], **options: Any) -> int:
        """Start a process; returns its pid. Options as in supervisor.py."""
        return int(self._ask({"op": "start", "name": name, "argv": argv, **options})["pid"])

    def stop(self, name: str, grace: float) -> None:
        """SIGTERM a process and its group, and SIGKILL them after `grace` seconds."""
        self._ask({"op": "stop", "name": name, "grace": grace})

    def settled(self) -> None:
        """All daemons are up: from now on the supervisor starts again those that end."""
        self._ask({"op": "settled"})

    def close(self) -> None:
        """End all processes; returns when they are gone. Safe to call twice."""
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            if stdin and not stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
            self._process.wait()
            if stdout:
                stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            line = b""
            if stdin and stdout and not stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(json.dumps(request).encode() + b"\n")
                    stdin.flush()
                    line = stdout.readline()
        if not line:
            raise SchedulerError(
                f"the supervisor of {self.directory} has ended (pid {self.pid}); "
                f"see {self.directory / 'supervisor.log'}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none. Tells reused pids."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(rest[18])


def boot_id() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def await_predecessor(owner: Path) -> None:
    """Wait until the supervisor that `owner.json` names has ended, if its owner is dead."""
    if not owner.exists():
        return
    record = json.loads(owner.read_text())
    if (record["host"], record["boot"]) != (socket.gethostname(), boot_id()):
        return

    def lives(who: str) -> bool:
        pid, started = record[who]
        return started is not None and start_time(pid) == started

    wait = CLOSING_SECONDS if lives("owner") else PREDECESSOR_SECONDS
    deadline = time.monotonic() + wait
    while lives("supervisor"):
        if lives("owner") and record["owner"][0] == os.getpid():
            raise SetupError(f"this process keeps {owner.parent} open already: close it first")
        if time.monotonic() > deadline:
            raise SetupError(
                f"another platform (pid {record['owner'][0]}) keeps its jobs in {owner.parent}: "
                "stop it, or use another home"
            )
        time.sleep(0.02)


def sweep(marker: str) -> None:
    """End what a killed supervisor left: processes whose environment carries its marker.

    The usual case is none: a supervisor takes everything with it unless it is SIGKILLed itself.
    """
    wanted = f"CRAY_AGENTS_SUPERVISED={marker}".encode()
    spared = {os.getpid(), os.getppid()}
    deadline = time.monotonic() + PREDECESSOR_SECONDS
    while time.monotonic() < deadline:
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in spared:
                continue
            with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.02)


def remove_scratch(link: Path) -> None:
    """Remove the folder that a killed supervisor left behind the symlink `link`."""
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
