"""Progress: whether a rank gets on, and the seconds of a step that it computes by itself.

The clock distinguishes a hang from work. The rank's loops tick it: a micro-batch begins, a tensor
of a checkpoint is read (which maps files, without a system call), or the rank asks whether it
should stop. What else reads or writes files, and on CPUs what computes, moves without ticks.
job/failures/rank_monitor.py reports to the launcher whether it moved.

By a rank's own work stragglers are found. It ends where gradients are added up over the data ranks,
as there all ranks wait for the slowest. Ranks of one pipeline or tensor group wait for each other
before, too: the times name the slow group. On GPUs they are measured by events on the stream,
without waiting for it. No GPU was seen. job/rank.py compares the ranks.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BYTES = 4096  # of reading and writing that are more than logs and this clock's own
BUSY = 0.3  # share of a core that counts as computing; ranks that wait for each other use none
STEPS = 50  # between two comparisons; of each rank the median counts
SLOW = 1.5  # times the median rank


class ProgressClock:
    """The clock of this process. `ready` from the first step on: before it much may take long."""

    def __init__(self) -> None:
        self.ticks = 0
        self.ready = False
        self._ticks, self._bytes, self._busy, self._time = 0, 0, 0.0, time.monotonic()

    def tick(self) -> None:
        """Count that the rank has got on."""
        self.ticks += 1

    def moved(self) -> bool:
        """Return True if the process has got on since the last call.

        A GPU's host thread turns while it waits, so computing counts on CPUs alone.
        """
        before = self._ticks, self._bytes, self._busy, self._time
        self._ticks, self._bytes = self.ticks, _bytes_of_files()
        self._busy, self._time = time.process_time(), time.monotonic()
        busy = self._busy - before[2] > BUSY * (self._time - before[3])
        files = self._bytes - before[1] > BYTES
        return self._ticks != before[0] or files or (busy and not _has_cuda())


#: The clock of the rank that is this process.
CLOCK = ProgressClock()


def _bytes_of_files() -> int:
    """Return the bytes that this process has read and written so far, by system calls."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # a kernel without this file: ticks alone
        return 0
    rows = dict(line.split(": ") for line in lines)
    return int(rows["rchar"]) + int(rows["wchar"])


def _has_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # None: it is being imported just now
    return is_initialized is not None and bool(is_initialized())


class OwnWork:
    """This rank's own seconds of the last steps."""

    def __init__(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._begun: Any = None
        self._pending: list[tuple[Any, Any]] = []  # events that a GPU may not have reached
        self._seconds: list[float] = []
        self._sum: Any = None  # begin and end of the last sum of gradients

    def begin(self) -> None:
        """Begin a step."""
        self._begun = self._now()

    def timed(self, add_up: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that adds up gradients, so that its call ends the own work."""

        def arrive(*args: Any, **options: Any) -> Any:
            if self._begun is None:
                return add_up(*args, **options)
            arrived = self._now()
            self._pending.append((self._begun, arrived))
            self._begun = None
            result = add_up(*args, **options)
            self._sum = (arrived, self._now())
            return result

        return arrive

    def take(self) -> float:
        """Return the median of the steps since the last call; 0 without any."""
        self._seconds += [self._between(*times) for times in self._pending]
        seconds = statistics.median(self._seconds) if self._seconds else 0.0
        self._pending, self._seconds = [], []
        return seconds

    def summing(self) -> float | None:
        """Return the seconds in which the last step's gradients were added up; None without.

        They hold the wait for slower ranks, and not what overlapped with this rank's own work. Call
        it after the step, when a GPU has reached its end.
        """
        return None if self._sum is None else self._between(*self._sum)

    def _between(self, begun: Any, ended: Any) -> float:
        seconds: float = ended - begun if self._on_cpu else begun.elapsed_time(ended) / 1000
        return seconds

    def _now(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        import torch  # the launcher, which has none yet, imports this module

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def find_straggler(seconds: Sequence[float]) -> tuple[int, float] | None:
    """Return the slowest rank and the median, if it is a straggler. `seconds`: [ranks]."""
    median = statistics.median_low(seconds)
    rank = max(range(len(seconds)), key=lambda one: seconds[one])
    return (rank, median) if median > 0 and seconds[rank] > SLOW * median else None
