"""Supervisor: a small process whose children outlive neither it nor its owner.

Run as `python -I -S supervisor.py OWNER_PID MARKER SCRATCH` by `supervised.py`. It imports the
standard library only. It reads requests as JSON lines on stdin and answers each with one on
stdout. When stdin closes or the owner's pid is gone, also by SIGKILL, it ends all processes that it
or its children ever started. As a child subreaper it stays the ancestor of daemons and strays.

    {"op": "start", "name", "argv", "env", "cwd", "log"}   -> {"pid"}   with these options:
        "daemon": true       restart the process when it ends; before `keep_daemons`, end everything
        "polite": true       at the end, send SIGTERM and allow a moment to save state
        "ended": PATH        publish {"exit", "reason"} to this file when the process ends
        "minutes": N         time limit, with an early SIGTERM
    {"op": "stop", "name", "grace"}  -> {}   SIGTERM, and SIGKILL after `grace` seconds
    {"op": "keep_daemons"}           -> {}   all daemons are up: restart those that end
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
POLITE_SECONDS = 0.8  # for a polite daemon to save its state
LAST_SECONDS = 5.0  # after SIGKILL: a process still alive then hangs in the kernel
RESTART_INTERVAL = 0.3  # between a daemon's end and its next start
OWNER_CHECK_INTERVAL = 0.25

LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """A requested process, its coming deadlines (time, signal), and the reason for its end."""

    request: dict[str, Any]
    pid: int
    deadlines: list[tuple[float, int]] = field(default_factory=list)
    reason: str = ""


def launch(request: dict[str, Any], marker: str) -> int:
    """Fork and exec a request's argv in a session of its own; return the pid."""
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
    """Return all living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(errors="replace")
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    pids: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        pids += below
        todo += below
    return pids


def publish(path: Path, value: dict[str, Any]) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a process, or its group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


class Supervisor:
    """The supervisor's loop: it serves requests until its owner is gone."""

    def __init__(self, owner: int, marker: str, scratch: str) -> None:
        self.owner = owner
        self.marker = marker
        self.scratch = scratch
        self.children: dict[int, Child] = {}
        self.restarts: list[tuple[float, dict[str, Any]]] = []
        self.keeps_daemons = False
        self.ending = False
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
        """Handle SIGTERM: end as if the owner had gone."""
        self.ending = True

    def run(self) -> None:
        """Serve requests until the owner is gone, then end all processes."""
        try:
            while not self.ending and os.getppid() == self.owner:
                ready, _, _ = select.select([0, self.wake], [], [], self.seconds_until_due())
                if self.wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                if 0 in ready:
                    self.answer_requests()
                self.reap()
                self.run_timers()
        finally:
            self.end_all()

    def seconds_until_due(self) -> float:
        """Return the seconds until the next restart, deadline or owner check."""
        due = [when for when, _ in self.restarts]
        due += [child.deadlines[0][0] for child in self.children.values() if child.deadlines]
        now = time.monotonic()
        return max(0.0, min([OWNER_CHECK_INTERVAL, *(when - now for when in due)]))

    def answer_requests(self) -> None:
        """Answer the requests on stdin. Its end means that the owner is gone."""
        data = os.read(0, 1 << 20)
        self.ending = self.ending or not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            answer = json.dumps(self.answer(json.loads(line))) + "\n"
            with contextlib.suppress(BrokenPipeError):
                os.write(1, answer.encode())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return the answer."""
        if request["op"] == "start":
            return {"pid": self.start(request)}
        if request["op"] == "stop":
            for child in self.children.values():
                if child.request["name"] == request["name"]:
                    child.reason = "cancelled"
                    end = time.monotonic() + request["grace"]
                    child.deadlines = [(end, signal.SIGKILL)]
                    send_signal(child.pid, signal.SIGTERM, group=True)
        elif request["op"] == "keep_daemons":
            self.keeps_daemons = True
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
        """Collect ended processes: requested children, and strays of theirs."""
        while self.children or self.ending:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self.children.pop(pid, None)
            if child:
                self.handle_exit(child, os.waitstatus_to_exitcode(status))

    def handle_exit(self, child: Child, code: int) -> None:
        """Publish a command's end; schedule a daemon's restart."""
        send_signal(child.pid, signal.SIGKILL, group=True)  # the rest of its group
        if child.request.get("ended"):
            reason = child.reason or (f"signal {-code}" if code < 0 else "")
            publish(Path(child.request["ended"]), {"exit": code, "reason": reason})
        if child.request.get("daemon"):
            self.restarts.append((time.monotonic() + RESTART_INTERVAL, child.request))
            self.ending = self.ending or not self.keeps_daemons

    def run_timers(self) -> None:
        """Restart daemons that are due; signal children at their deadlines."""
        now = time.monotonic()
        due = [request for when, request in self.restarts if when <= now]
        self.restarts = [entry for entry in self.restarts if entry[0] > now]
        for request in due:
            self.start(request)
        for child in self.children.values():
            while child.deadlines and child.deadlines[0][0] <= now:
                child.reason = child.reason or "time limit"
                send_signal(child.pid, child.deadlines.pop(0)[1], group=True)

    def end_all(self) -> None:
        """End all descendants by pid; polite children get SIGTERM first."""
        self.ending = True
        polite = [child.pid for child in self.children.values() if child.request.get("polite")]
        for pid in polite:
            send_signal(pid, signal.SIGTERM)
        end = time.monotonic() + POLITE_SECONDS
        while time.monotonic() < end and any(pid in self.children for pid in polite):
            self.reap()
            time.sleep(0.01)
        for child in self.children.values():
            child.reason = child.reason or "its platform ended"
        end = time.monotonic() + LAST_SECONDS
        while left := descendants(os.getpid()):
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            self.reap()
            if time.monotonic() > end:  # asked last: also after a pause all were killed and reaped
                break
            time.sleep(0.01)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


if __name__ == "__main__":
    Supervisor(int(sys.argv[1]), sys.argv[2], sys.argv[3]).run()
