"""A small process that keeps others: no child of it outlives it, nor its owner.

Run as `python -I -S supervisor.py OWNER_PID MARKER SCRATCH` by `supervised.py`; it imports the
standard library only. It takes requests as JSON lines on stdin and answers each with one on
stdout. When stdin closes or the owner's pid is gone, also by SIGKILL, it ends whatever it or its
children ever started: as a child subreaper it stays the ancestor of daemons and runaways.

    {"op": "start", "name", "argv", "env", "cwd", "log"}   -> {"pid"}   and of these, optionally:
        "daemon": true       start it again when it ends; its end before `settled` ends everything
        "polite": true       at the end, it gets SIGTERM and a moment to save its state
        "ended": PATH        where to publish {"exit", "reason"} when it ends
        "minutes": N         its time limit, with an early SIGTERM
    {"op": "stop", "name", "grace"}  -> {}   SIGTERM, and SIGKILL after `grace` seconds
    {"op": "settled"}                -> {}   all daemons are up: from now on they are kept up
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLITE_SECONDS = 0.8  # what a polite daemon has to save its state
LAST_SECONDS = 5.0  # after that, what SIGKILL has not ended hangs in the kernel
RESTART_SECONDS = 0.3  # between a daemon's end and its next start
OWNER_CHECK_SECONDS = 0.25

LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """A process that was asked for, its coming deadlines, and why it was ended."""

    request: dict[str, Any]
    pid: int
    deadlines: list[tuple[float, int]] = field(default_factory=list)
    reason: str = ""


def launch(request: dict[str, Any], marker: str) -> int:
    """Fork and exec a request's argv in a session of its own; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(request["cwd"])
        environment = {**request["env"], "CRAY_AGENTS_SUPERVISED": marker}
        os.execvpe(request["argv"][0], request["argv"], environment)
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def descendants(root: int) -> list[int]:
    """All living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(errors="replace")
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def publish(path: Path, value: dict[str, Any]) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def send(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a process, or its group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


class Supervisor:
    """Keeps children until its owner is gone."""

    def __init__(self, owner: int, marker: str, scratch: str) -> None:
        self.owner = owner
        self.marker = marker
        self.scratch = scratch
        self.children: dict[int, Child] = {}
        self.restarts: list[tuple[float, dict[str, Any]]] = []
        self.settled = False
        self.over = False
        self.buffer = b""
        self.wake, wakeup = os.pipe()
        for end in (self.wake, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.stop)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def stop(self, *_: object) -> None:
        """SIGTERM: end as if the owner had gone."""
        self.over = True

    def run(self) -> None:
        """Serve requests until the owner is gone, then end everything."""
        try:
            while not self.over and os.getppid() == self.owner:
                ready, _, _ = select.select([0, self.wake], [], [], self.pause())
                if self.wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                if 0 in ready:
                    self.listen()
                self.reap()
                self.keep_time()
        finally:
            self.end_all()

    def pause(self) -> float:
        """Seconds until something is due."""
        due = [when for when, _ in self.restarts]
        due += [child.deadlines[0][0] for child in self.children.values() if child.deadlines]
        now = time.monotonic()
        return max(0.0, min([OWNER_CHECK_SECONDS, *(when - now for when in due)]))

    def listen(self) -> None:
        """Answer the requests that have come; stdin's end means that the owner is gone."""
        data = os.read(0, 1 << 20)
        self.over = self.over or not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            answer = json.dumps(self.answer(json.loads(line))) + "\n"
            with contextlib.suppress(BrokenPipeError):
                os.write(1, answer.encode())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request."""
        if request["op"] == "start":
            return {"pid": self.start(request)}
        if request["op"] == "stop":
            for child in self.children.values():
                if child.request["name"] == request["name"]:
                    child.reason = "cancelled"
                    end = time.monotonic() + request["grace"]
                    child.deadlines = [(end, signal.SIGKILL)]
                    send(child.pid, signal.SIGTERM, group=True)
        elif request["op"] == "settled":
            self.settled = True
        return {}

    def start(self, request: dict[str, Any]) -> int:
        pid = launch(request, self.marker)
        child = self.children[pid] = Child(request, pid)
        if request.get("minutes"):
            limit = 60.0 * request["minutes"]
            end = time.monotonic() + limit
            early = end - min(60.0, limit / 2)
            child.deadlines = [(early, signal.SIGTERM), (end, signal.SIGKILL)]
        return pid

    def reap(self) -> None:
        """Collect who ended: children asked for, and strays of theirs."""
        while self.children or self.over:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self.children.pop(pid, None)
            if child:
                self.ended(child, os.waitstatus_to_exitcode(status))

    def ended(self, child: Child, code: int) -> None:
        """Publish a command's end, or see to a daemon's."""
        send(child.pid, signal.SIGKILL, group=True)  # what it left in its group
        if child.request.get("ended"):
            reason = child.reason or (f"signal {-code}" if code < 0 else "")
            publish(Path(child.request["ended"]), {"exit": code, "reason": reason})
        if child.request.get("daemon"):
            self.restarts.append((time.monotonic() + RESTART_SECONDS, child.request))
            self.over = self.over or not self.settled

    def keep_time(self) -> None:
        """Start daemons that are due again; signal children whose time has come."""
        now = time.monotonic()
        due = [request for when, request in self.restarts if when <= now]
        self.restarts = [entry for entry in self.restarts if entry[0] > now]
        for request in due:
            self.start(request)
        for child in self.children.values():
            while child.deadlines and child.deadlines[0][0] <= now:
                child.reason = child.reason or "time limit"
                send(child.pid, child.deadlines.pop(0)[1], group=True)

    def end_all(self) -> None:
        """End all descendants by pid; the polite ones are asked first."""
        self.over = True
        polite = [child.pid for child in self.children.values() if child.request.get("polite")]
        for pid in polite:
            send(pid, signal.SIGTERM)
        end = time.monotonic() + POLITE_SECONDS
        while time.monotonic() < end and any(pid in self.children for pid in polite):
            self.reap()
            time.sleep(0.01)
        for child in self.children.values():
            child.reason = child.reason or "its platform ended"
        end = time.monotonic() + LAST_SECONDS
        while (left := descendants(os.getpid())) and time.monotonic() < end:
            for pid in left:
                send(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.01)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


if __name__ == "__main__":
    Supervisor(int(sys.argv[1]), sys.argv[2], sys.argv[3]).run()
