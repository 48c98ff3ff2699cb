"""Own work: the seconds of a step that a rank computes by itself, by which stragglers are found.

They end where gradients are added up over the data ranks, as there all ranks wait for the slowest.
Ranks of one pipeline or tensor group wait for each other before, too: the times name the slow
group. On GPUs they are measured by events on the stream, without waiting for it. No GPU was seen.
Called by train_step.py; job/rank.py compares the ranks.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

STEPS = 50  # between two comparisons; of each rank the median counts
SLOW = 1.5  # times the median rank


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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def find_straggler(seconds: Sequence[float]) -> tuple[int, float] | None:
    """Return the slowest rank and the median, if it is a straggler. `seconds`: [ranks]."""
    median = statistics.median_low(seconds)
    rank = max(range(len(seconds)), key=lambda one: seconds[one])
    return (rank, median) if median > 0 and seconds[rank] > SLOW * median else None
