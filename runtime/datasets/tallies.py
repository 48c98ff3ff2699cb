"""Tallies: count numbers in constant memory, exactly for few different ones, else in steps.

Steps are powers of two and double when necessary, so the order of the numbers does not matter.
Called by histogram.py.
"""

import math
from collections import Counter

EXACT = 2_000  # different values counted exactly
BARS = 24  # bars of a figure, at most
FINEST = 2.0**-20  # the first step


class ValueCounts:
    """Counts of numbers, exact or in steps."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._step = 0.0  # 0: values are exact
        self.count = 0
        self.total = 0.0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite value."""
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._counts[self._round_down(value)] += times
        while len(self._counts) > EXACT:
            self._step = self._step * 2 or FINEST
            counts, self._counts = self._counts, Counter()
            for old, n in counts.items():
                self._counts[self._round_down(old)] += n

    def _round_down(self, value: float) -> float:
        return math.floor(value / self._step) * self._step if self._step else value

    def rows(self) -> list[tuple[str, int]]:
        """Return (label, count) for each of few values, or for ranges (`2 – 4` excludes 4)."""
        if len(self._counts) <= BARS // 2 and not self._step:
            return [(format_number(value), self._counts[value]) for value in sorted(self._counts)]
        step = _round_step(max(self.most - self.least, self._step) / BARS, whole=self._all_whole())
        counts: Counter[int] = Counter()
        for value, n in self._counts.items():
            counts[math.floor(value / step)] += n
        first, last = min(counts), max(counts)
        return [(_range_label(index, step), counts[index]) for index in range(first, last + 1)]

    def about(self) -> str:
        """Return a line with the count, the range and the mean of the values."""
        if not self.count:
            return "none"
        numbers = (self.least, self.most, self.total / self.count)
        least, most, mean = map(format_number, numbers)
        return f"{self.count:,} values, {least} to {most}, mean {mean}"

    def _all_whole(self) -> bool:
        return all(value == int(value) for value in self._counts)


def format_number(value: float) -> str:
    """Format a number for people."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _round_step(step: float, *, whole: bool) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten, and to at least 1 for whole numbers."""
    if whole:
        step = max(step, 1.0)
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _range_label(index: int, step: float) -> str:
    if step == 1:
        return format_number(index)
    return (
        f"{format_number(round(index * step, 12))} – {format_number(round((index + 1) * step, 12))}"
    )
