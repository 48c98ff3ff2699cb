"""Keeper: a script that runs a program under Landlock and seccomp, and ends its processes.

    python -I -S keeper.py '{"readable": [...], "writable": [...], "filter": "BASE64"}' program ...

Started by backends.py; imports nothing of this package. It confines the child, not itself. It
adopts orphans of the child's processes (PR_SET_CHILD_SUBREAPER). It ends all of them when the
program ends, on SIGTERM, or when its own parent dies; if it is killed itself, the kernel ends the
program. Exit status: the program's, 128 + n for a signal n. Without "filter", nothing is confined.
The numbers are those of linux/landlock.h and linux/prctl.h. Landlock is described at
docs.kernel.org/userspace-api/landlock.html
"""

import base64
import contextlib
import ctypes
import json
import os
import signal
import stat
import struct
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a directory
ALL = (1 << 16) - 1  # all rights of ABI 6: also make, remove, link, truncate, ioctl
DEVICES = 1 << 6 | 1 << 11  # making device nodes, which is never allowed
FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # rights that apply to a regular file
NETWORK = 1 << 0 | 1 << 1  # TCP: bind, connect
SCOPED = 1 << 0 | 1 << 1  # abstract unix sockets, signals: confined to the sandbox

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program of the command line to its end."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    check("prctl", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    check("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))
    if os.getppid() != spec["parent"]:
        return 1  # the parent died before the request for its death signal
    awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        check("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != keeper:
            os._exit(1)  # the keeper died before the request for its death signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        if spec.get("filter"):
            confine(spec)
        os.execvp(sys.argv[2], sys.argv[2:])
    status = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        status = reap(child)
    end_all()
    return 143 if status is None else 128 - status if status < 0 else status


def confine(spec: dict[str, Any]) -> None:
    """Forbid this process, for ever, everything that the spec does not allow."""
    handled = struct.pack("=QQQ", ALL, 0 if spec["network"] else NETWORK, SCOPED)
    rules = check("landlock", libc.syscall(CREATE_RULESET, handled, len(handled), 0))
    for path in spec["readable"]:
        allow(rules, path, READ)
    for path in spec["writable"]:
        allow(rules, path, ALL & ~DEVICES)
    check("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check("landlock", libc.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)
    program = base64.b64decode(spec["filter"])
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(lines))
    check("seccomp", libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def allow(rules: int, path: str, access: int) -> None:
    """Allow access beneath a path, if it exists."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        access &= FILES
    rule = struct.pack("=Qi", access, handle)
    check("landlock", libc.syscall(ADD_RULE, rules, 1, rule, 0))
    os.close(handle)


def reap(child: int) -> int | None:
    """Collect dead processes. Return the child's exit status, negative for a signal, if it died."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = os.waitstatus_to_exitcode(ended)
    return status


def end_all() -> None:
    """Stop and then kill every descendant, until none is left.

    A stopped one cannot fork faster than this search; one that was already forking or ending when
    it was stopped leaves a child that only the next round sees.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            stopped: set[int] = set()
            while fresh := set(descendants(os.getpid())) - stopped:
                send(signal.SIGSTOP, fresh)
                stopped |= fresh
            send(signal.SIGKILL, stopped)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal.sigtimedwait({signal.SIGCHLD}, 0.01)


def send(number: signal.Signals, pids: set[int]) -> None:
    """Send a signal to processes, as far as they exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants."""
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        try:
            for thread in os.listdir(f"/proc/{at}/task"):  # noqa: PTH208 - pathlib is slow to load
                with open(f"/proc/{at}/task/{thread}/children") as file:  # noqa: PTH123
                    waiting += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            pass
        if at != pid:
            pids.append(at)
    return pids


def check(what: str, result: int) -> int:
    """Return the result of a C call. Raises OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    sys.exit(main())
