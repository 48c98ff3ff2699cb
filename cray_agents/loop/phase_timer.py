"""Timer of an iteration: progress, seconds by phase, idle share of the engine.

Called by loop.py, evaluator.py and collector.py.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cray_agents.iteration import LoopProgress
from cray_agents.platform.client import Platform

DIRECT = ("early", "transfer")  # phases of Iteration.seconds, measured by the replica


class PhaseTimer:
    """A timer, started when an iteration begins and read at its end.

    `on_progress` is called on every move.
    """

    def __init__(self, on_progress: Callable[[LoopProgress], None]) -> None:
        self.iteration = 0
        self._on_progress = on_progress
        self._begun = 0.0
        self._seconds: dict[str, float] = {}
        self._busy: float | None = None
        self._replicas = 0
        self._turns: dict[str, float] = {}

    async def begin(self, platform: Platform, iteration: int) -> None:
        """Start an iteration."""
        self.iteration = iteration
        self._begun, self._seconds = time.monotonic(), {}
        self._busy, self._replicas = _busy(await platform.pool())
        self._turns = await platform.turns()

    async def end(self, platform: Platform) -> dict[str, Any]:
        """End an iteration; return its fields `seconds`, `wall`, `turns` and `idle_share`."""
        wall = time.monotonic() - self._begun
        busy, replicas = _busy(await platform.pool())
        idle = None
        if busy is not None and self._busy is not None and replicas == self._replicas:
            share = 1 - (busy - self._busy) / (wall * replicas)
            idle = share if -0.01 <= share <= 1 else None  # else a count began anew
        return {
            "seconds": dict(self._seconds),
            "wall": wall,
            "turns": _since(self._turns, await platform.turns()),
            "idle_share": None if idle is None else max(0.0, idle),
        }

    def report(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Report a move."""
        self._on_progress(LoopProgress(self.iteration, phase, done, total, note))

    @contextmanager
    def phase(self, name: str, note: str | None = None) -> Iterator[None]:
        """Count the time inside for a phase; with a note, report its begin."""
        if note is not None:
            self.report(name, note=note)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def note_direct(self, seconds: Mapping[str, float]) -> None:
        """Note the seconds in which a candidate's weights came without files, by its proof."""
        self._seconds |= {name: seconds[name] for name in DIRECT if name in seconds}


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Return how much sums have grown; all of them if they began anew with another platform."""
    anew = any(now.get(name, 0.0) < value for name, value in before.items())
    grown = {name: value - (0.0 if anew else before.get(name, 0.0)) for name, value in now.items()}
    return grown if grown.get("turns") else {}


def _busy(replicas: list[dict[str, Any]]) -> tuple[float | None, int]:
    """Seconds with a request in flight, of all replicas; None if one does not report it."""
    seconds = [replica["busy_seconds"] for replica in replicas if "busy_seconds" in replica]
    whole = seconds and len(seconds) == len(replicas)
    return (float(sum(seconds)) if whole else None), len(replicas)
