"""Runs a program under Landlock and seccomp, and leaves no process of it behind. Stands alone.

    python -I -S keeper.py '{"readable": [...], "writable": [...], "filter": "BASE64"}' program ...

Started by layers.py; imports nothing of this package. It confines the child, not itself: it adopts
what the child's processes leave (PR_SET_CHILD_SUBREAPER), and ends all of it when the program ends,
when it is told to (SIGTERM) or when its own parent dies. Exit status: the program's, 128 + n for a
signal n. Without "filter", nothing is confined. The numbers are those of linux/landlock.h and
linux/prctl.h; what Landlock does: docs.kernel.org/userspace-api/landlock.html
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
ALL = (1 << 16) - 1  # what ABI 6 knows to forbid: also make, remove, link, truncate, ioctl
DEVICES = 1 << 6 | 1 << 11  # making device nodes: never
FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # what applies to a file that is no directory
NETWORK = 1 << 0 | 1 << 1  # TCP: bind, connect
SCOPED = 1 << 0 | 1 << 1  # abstract unix sockets, signals: only within the sandbox

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program of the command line to its end."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    checked("prctl", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    checked("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))
    if os.getppid() != spec["parent"]:
        return 1  # it died before this process could ask to be told
    awaited = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        if spec.get("filter"):
            confine(spec)
        os.execvp(sys.argv[2], sys.argv[2:])
    status = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        status = reaped(child)
    end_all()
    return 143 if status is None else 128 - status if status < 0 else status


def confine(spec: dict[str, Any]) -> None:
    """Forbid this process, for ever, all that the spec does not allow."""
    handled = struct.pack("=QQQ", ALL, 0 if spec["network"] else NETWORK, SCOPED)
    rules = checked("landlock", libc.syscall(CREATE_RULESET, handled, len(handled), 0))
    for path in spec["readable"]:
        allow(rules, path, READ)
    for path in spec["writable"]:
        allow(rules, path, ALL & ~DEVICES)
    checked("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked("landlock", libc.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)
    program = base64.b64decode(spec["filter"])
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(lines))
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def allow(rules: int, path: str, access: int) -> None:
    """Allow access beneath a path; one that does not exist is left out."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        access &= FILES
    rule = struct.pack("=Qi", access, handle)
    checked("landlock", libc.syscall(ADD_RULE, rules, 1, rule, 0))
    os.close(handle)


def reaped(child: int) -> int | None:
    """Collect the dead. The exit status of the child, negative for a signal, once it is one."""
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
    """Kill every descendant. Stopped first, so that none forks faster than it is found."""
    stopped: set[int] = set()
    while fresh := set(family(os.getpid())) - stopped:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def family(pid: int) -> list[int]:
    """The pids of all descendants."""
    found: list[int] = []
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
            found.append(at)
    return found


def checked(what: str, result: int) -> int:
    """The result of a C call, or its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    sys.exit(main())
