"""Supervised processes: start a supervisor that keeps them, one at a time per directory.

Called by `private_cluster.py` and `local.py`. Read next: supervisor.py, the supervisor's process.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cray_agents.errors import SchedulerError, SetupError
from cray_agents.processes import Process
from cray_agents.runtime.disk import durable

PROGRAM = Path(__file__).with_name("supervisor.py")
CLOSING_SECONDS = 1.5  # for another living owner, which may be closing
PREDECESSOR_SECONDS = 30.0  # for a supervisor whose owner died, which ends within two if it can


class Supervised:
    """Processes that end with this one. One live instance per directory of a host.

    The constructor ends the processes that a killed predecessor left. Raises SetupError if another
    living process uses the directory.
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
        supervisor, platform = Process.of(self.pid), Process.of()
        pids = {"supervisor": supervisor[:2], "owner": platform[:2]}
        record = {"host": platform.host, "boot": platform.boot, **pids}
        durable.replace_file(owner, json.dumps(record).encode())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, name: str, argv: list[str], **options: Any) -> int:
        """Start a process and return its pid. Options as in supervisor.py."""
        return int(self._request({"op": "start", "name": name, "argv": argv, **options})["pid"])

    def stop(self, name: str, grace: float) -> None:
        """Send SIGTERM to a process and its group, and SIGKILL after `grace` seconds."""
        self._request({"op": "stop", "name": name, "grace": grace})

    def keep_daemons(self) -> None:
        """Restart daemons that end, from now on. Called when all daemons are up."""
        self._request({"op": "keep_daemons"})

    def close(self) -> None:
        """End all processes and wait for them. Safe to call twice."""
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            if stdin and not stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
            self._process.wait()
            if stdout:
                stdout.close()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            line = b""
            if stdin and stdout and not stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(json.dumps(request).encode() + b"\n")
                    stdin.flush()
                    line = stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_SECONDS)  # its pipes close first
            raise SchedulerError(
                f"the supervisor of {self.directory} has ended (pid {self.pid}); "
                f"see {self.directory / 'supervisor.log'}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def await_predecessor(owner: Path) -> None:
    """Wait until the supervisor in `owner.json` has ended.

    Raises SetupError if this process or another living one owns it.
    """
    if not owner.exists():
        return
    record = json.loads(owner.read_text())
    supervisor, platform = (
        Process(pid, start, record["boot"], record["host"])
        for pid, start in (record["supervisor"], record["owner"])
    )
    if not supervisor.visible:
        return
    deadline = time.monotonic() + (CLOSING_SECONDS if platform.alive() else PREDECESSOR_SECONDS)
    while supervisor.alive():
        if platform.alive() and platform.pid == os.getpid():
            raise SetupError(f"this process keeps {owner.parent} open already: close it first")
        if time.monotonic() > deadline:
            raise SetupError(
                f"another platform (pid {platform.pid}) keeps its jobs in {owner.parent}: "
                "stop it, or use another home"
            )
        time.sleep(0.02)


def sweep(marker: str) -> None:
    """End the processes that a killed supervisor left, known by the marker in their environment.

    Usually there are none: a supervisor ends all its processes unless it is SIGKILLed itself.
    """
    mark = f"CRAY_AGENTS_SUPERVISED={marker}".encode()
    spared = {os.getpid(), os.getppid()}
    deadline = time.monotonic() + PREDECESSOR_SECONDS
    while time.monotonic() < deadline:
        any_alive = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in spared:
                continue
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's process
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    any_alive = True
        if not any_alive:
            return
        time.sleep(0.02)


def remove_scratch(link: Path) -> None:
    """Remove the folder that the symlink `link` of a killed supervisor names, and the link."""
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
