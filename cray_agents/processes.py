"""Processes: start children with safe and few imports, that die with their parent and end at once.

Dying with a parent that was killed by `kill -9` is Linux only (prctl). Elsewhere nothing happens,
and its children must be ended by hand.
"""

import atexit
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from asyncio.subprocess import Process as Child

PR_SET_PDEATHSIG = 1
#: With them no Python, and none that it starts, imports from the folder it is started in.
SAFE_IMPORTS = {"PYTHONSAFEPATH": "1"}


def python(*words: str) -> list[str]:
    """Return the command line of a Python that imports nothing from the folder it is started in.

    Python would look there first, and run any file that is named as a module of the library or of a
    package. That folder is the user's, or a model's. A user's own FILE.py has its folder on the
    path all the same, for its loader puts it there (cli/agents.py).
    """
    return [sys.executable, "-P", *words]


def die_with_parent(parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies. Call this in the child.

    `parent` is the pid that started the child. If it is gone already, the child ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


class Process(NamedTuple):
    """A process, also once its pid is another's.

    `start`: ticks from the boot to its start. `boot`: the id of its host's boot. `space`: the set
    of processes that it sees, as in a container. None: unknown.
    """

    pid: int
    start: int | None
    boot: str | None
    host: str
    space: str | None = None

    @classmethod
    def of(cls, pid: int | None = None) -> "Process":
        """Return a process of this host, without a `start` if it has ended; None: this process."""
        pid = os.getpid() if pid is None else pid
        return cls(pid, start_time(pid), boot_id(), socket.gethostname(), pid_namespace())

    @property
    def visible(self) -> bool:
        """True if it would be seen here while it lives."""
        return self.host == socket.gethostname() and self.space in (None, pid_namespace())

    def alive(self) -> bool:
        """Return True if it runs still. Only for one that is `visible`."""
        start = start_time(self.pid)
        return start is not None and self.start in (None, start) and self.boot in (None, boot_id())


def start_time(pid: int) -> int | None:
    """Return the start of a process in ticks since boot, or None. It differs for a reused pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def boot_id() -> str:
    """Return the id of this machine's present boot; "" where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> str:
    """Return the name of the set of processes that this one can see."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def end_child(process: "Child", seconds: float) -> None:
    """Send SIGTERM to a child, and SIGKILL after `seconds`; return when it has ended."""
    import asyncio  # not above: processes with few imports use this module

    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
            return
    with suppress(ProcessLookupError):  # both at once: it ended, and the time was up
        process.kill()
    await process.wait()


async def end_group(process: "Child") -> None:
    """Send SIGKILL to a child's process group, and wait until it is gone."""
    import asyncio

    for _ in range(100):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        await asyncio.sleep(0.05)
    await process.wait()


@contextmanager
def importing_much() -> Iterator[None]:
    """Import large packages without garbage collection, and keep them out of it afterwards.

    All that was imported stays, and the collector would look through it again and again: a quarter
    of the import's own time.
    """
    gc.disable()
    try:
        yield
    finally:
        keep_what_is_imported()
        gc.enable()


def exit_at_once(code: int) -> NoReturn:
    """End this program after its exit handlers, without Python's own teardown.

    The teardown looks through all that was imported: 1 s after Megatron, 2 s after vLLM. Threads
    are not waited for, so call this when the work of all of them is done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def leave_out(*packages: str) -> None:
    """Make packages look as if they were not installed, if this process runs our command alone.

    transformers imports torch wherever it is installed, which takes seconds. A process that also
    runs other people's code keeps it.
    """
    main = getattr(sys.modules["__main__"], "main", None)
    package = getattr(main, "__globals__", {}).get("__package__")
    if package in ("cray_agents", "cray_agents.cli"):
        hide(*packages)


def hide(*packages: str) -> None:
    """Make packages that are not imported yet look as if they were not installed."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would advise to install torch
    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # as Python documents it


def keep_what_is_imported() -> None:
    """Leave all that is in memory now out of garbage collection, here and in forks.

    To look through it takes a fifth of a second each time, 0.8 s where vLLM is imported, and copies
    the memory that forks share.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules report what they leak
