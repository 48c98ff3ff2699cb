"""Processes: make children die with their parent, also if that is killed with `kill -9`.

Linux only (prctl). Elsewhere nothing happens, and a killed parent's children must be ended by hand.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies. Call this in the child.

    `parent` is the pid that started the child. If it is gone already, the child ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


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


@contextmanager
def importing_much() -> Iterator[None]:
    """Import large packages without garbage collection: a quarter less processor time.

    The collector would look through all that was imported again and again, and it all stays.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_what_is_imported() -> None:
    """Leave all that is in memory now out of garbage collection, here and in forks.

    To look through it takes a fifth of a second each time, and copies the memory that forks share.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules report what they leak
