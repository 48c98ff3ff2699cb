"""Tests as games of chance: a gambler bets on E[x] > margin, x in [-1, 1], at fair odds.

He starts with 1. Before each x is seen he stakes a share of what he has, then

    wealth *= 1 + stake * (x - margin)

If E[x] <= margin, whatever came before, he cannot expect to win, and the probability that he ever
has 1 / alpha is at most alpha (Ville 1939): his wealth is evidence that may be looked at after each
x. How much to stake is free so long as it depends on the past alone; it decides how soon the truth
comes out. Used by promotion.py (`Deadline`) and runtime/canary.py (`Stream`).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

_NORMAL = NormalDist()
_LEAST, _MOST = 0.2, 0.95  # of his wealth that a gambler stakes, at a difference of one
_STAKES = 20  # constant stakes that are mixed
_PRIOR = (20.0, 0.15)  # weight, and what E[x^2] is taken for before any is seen


@dataclass
class Deadline:
    """Wants `goal` times what he began with, within `steps` x.

    How to stake for the greatest probability of that is known: Browne (1999), "Reaching goals by a
    deadline: digital options and continuous-time active portfolio management". So this has nearly
    the power of a test that looks once, at the end. With z = wealth / goal and V the sum of the
    (x - margin)^2 to come, estimated from those that came, it is a share pdf(q(z)) / (z sqrt(V)) of
    the wealth, where q is the quantile of the normal distribution; within [0.2, 0.95] by
    1 + margin, and no more than the goal needs.
    """

    goal: float
    steps: int
    margin: float = 0.0
    wealth: float = 1.0
    _seen: int = 0
    _squares: float = _PRIOR[0] * _PRIOR[1]

    @property
    def reached(self) -> bool:
        """Whether the hypothesis E[x] <= margin is refuted, at level 1 / goal."""
        return self.wealth >= self.goal * (1 - 1e-9)

    def add(self, x: float) -> None:
        """See the next x. Who has reached his goal stops."""
        if self.reached:
            return
        gain = x - self.margin
        self.wealth *= 1 + self._stake() * gain
        self._seen += 1
        self._squares += gain * gain

    def _stake(self) -> float:
        z = self.wealth / self.goal
        if z < 1e-12:  # as good as ruined
            return 0.0
        mean_square = max(1e-3, self._squares / (self._seen + _PRIOR[0]))
        spread = math.sqrt(mean_square * max(1, self.steps - self._seen))
        share = _NORMAL.pdf(_NORMAL.inv_cdf(z)) / (z * spread)
        least, most = _LEAST / (1 + self.margin), _MOST / (1 + self.margin)
        enough = (1 / z - 1) / (1 - self.margin)  # one x = 1 reaches the goal with it; smaller ones
        return min(max(share, least), most, max(enough, least))  # would only halve what is missing


class Stream:
    """Has no deadline: a mixture of constant stakes.

    Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting", arXiv
    2010.09686.

    `evidence`: the most he ever had; the hypothesis is refuted at level 1 / evidence.
    """

    def __init__(self, margin: float = 0.0) -> None:
        self.margin = margin
        self.seen = 0
        self.evidence = 1.0
        self._stakes = [(n + 0.5) / _STAKES * _MOST / (1 + margin) for n in range(_STAKES)]
        self._logs = [0.0] * _STAKES

    def add(self, x: float) -> None:
        """See the next x."""
        gain = x - self.margin
        self.seen += 1
        for n, stake in enumerate(self._stakes):
            self._logs[n] += math.log1p(stake * gain)
        most = max(self._logs)
        mixed = most + math.log(sum(math.exp(log - most) for log in self._logs) / _STAKES)
        self.evidence = max(self.evidence, math.exp(min(mixed, 700.0)))  # e^710 is no float

    def kept(self) -> dict[str, Any]:
        """All of it, for `restore`."""
        return {"seen": self.seen, "evidence": self.evidence, "logs": self._logs}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.seen, self.evidence, self._logs = kept["seen"], kept["evidence"], kept["logs"]
