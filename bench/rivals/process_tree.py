"""A process with all that it started: its memory while it runs, and its end by kill -9."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY = 0.5  # seconds between two looks at the memory


def tree_of(pid: int) -> list[int]:
    """The pids of a process and of its descendants, itself first."""
    pids = [pid]
    for parent in pids:  # which grows
        pids += _children(parent)
    return pids


def _children(pid: int) -> list[int]:
    """None of a process that has ended."""
    pids: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            pids += map(int, (thread / "children").read_text().split())
    return pids


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants at once, with no chance to clean up."""
    for one in tree_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


@dataclass
class Peak:
    """Most MiB that a tree had at a moment: of vLLM with all it started, and of the others."""

    engine: float = 0.0
    own: float = 0.0

    def look(self, pid: int) -> None:
        """Take a sample. A page that several processes share counts once."""
        engine, own = _sizes(pid, in_engine=False)
        self.engine, self.own = max(self.engine, engine), max(self.own, own)


def _sizes(pid: int, in_engine: bool) -> tuple[float, float]:
    in_engine = in_engine or "vllm" in command_of(pid)
    size = _mib(pid)
    engine, own = (size, 0.0) if in_engine else (0.0, size)
    for child in _children(pid):
        more = _sizes(child, in_engine)
        engine, own = engine + more[0], own + more[1]
    return engine, own


@contextmanager
def memory_of(pid: int) -> Iterator[Peak]:
    """The peak of a tree for as long as the block runs."""
    peak, over = Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            peak.look(pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def command_of(pid: int) -> str:
    """The command line of a process, its words divided by zero bytes; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
