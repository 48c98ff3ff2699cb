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

    def begin(self) -> None:
        """Begin a step."""
        self._begun = self._now()

    def timed(self, add_up: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that adds up gradients, so that its call ends the own work."""

        def arrive(*args: Any, **options: Any) -> Any:
            if self._begun is not None:
                self._pending.append((self._begun, self._now()))
                self._begun = None
            return add_up(*args, **options)

        return arrive

    def take(self) -> float:
        """Return the median of the steps since the last call; 0 without any."""
        for begun, arrived in self._pending:
            between = arrived - begun if self._on_cpu else begun.elapsed_time(arrived) / 1000
            self._seconds.append(between)
        seconds = statistics.median(self._seconds) if self._seconds else 0.0
        self._pending, self._seconds = [], []
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
