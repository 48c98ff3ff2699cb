"""How often which number came, in flat memory: exact for few different ones, then in steps.

The steps are powers of two that double as they must, so the order of the numbers does not matter.
Called by histogram.py.
"""

import math
from collections import Counter

EXACT = 2_000  # different values that are told apart
BARS = 24  # at most
FINEST = 2.0**-20


class ValueCounts:
    """Counts of the values that were added."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._step = 0.0  # 0: values as they are
        self.count = 0
        self.total = 0.0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Count a value; it must be finite."""
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._counts[self._place(value)] += times
        while len(self._counts) > EXACT:
            self._step = self._step * 2 or FINEST
            counts, self._counts = self._counts, Counter()
            for old, n in counts.items():
                self._counts[self._place(old)] += n

    def _place(self, value: float) -> float:
        return math.floor(value / self._step) * self._step if self._step else value

    def rows(self) -> list[tuple[str, int]]:
        """(label, count): each value, where they are few; else even ranges, `2 – 4` up to 4."""
        if len(self._counts) <= BARS // 2 and not self._step:
            return [(shown(value), self._counts[value]) for value in sorted(self._counts)]
        step = _even(max(self.most - self.least, self._step) / BARS, whole=self._whole())
        counts: Counter[int] = Counter()
        for value, n in self._counts.items():
            counts[math.floor(value / step)] += n
        first, last = min(counts), max(counts)
        return [(_range(at, step), counts[at]) for at in range(first, last + 1)]

    def about(self) -> str:
        """A line: how many, from where to where, and the mean."""
        if not self.count:
            return "none"
        mean = shown(self.total / self.count)
        return f"{self.count:,} values, {shown(self.least)} to {shown(self.most)}, mean {mean}"

    def _whole(self) -> bool:
        return all(value == int(value) for value in self._counts)


def shown(value: float) -> str:
    """A number as people read it."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _even(step: float, *, whole: bool) -> float:
    """The next larger of 1, 2, 5, 10, ... times a power of ten; at least 1 for whole numbers."""
    if whole:
        step = max(step, 1.0)
    power = 10.0 ** math.floor(math.log10(step))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= step * (1 - 1e-9))


def _range(at: int, step: float) -> str:
    if step == 1:
        return shown(at)
    return f"{shown(round(at * step, 12))} – {shown(round((at + 1) * step, 12))}"
