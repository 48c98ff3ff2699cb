"""E-processes: evidence for E[x] > margin, x in [-1, 1], as the wealth of bets at fair odds.

The wealth starts at 1. Before each x is seen, a share of it (the stake) is bet on x > margin:

    wealth *= 1 + stake * (x - margin)

If E[x] <= margin, given any past, the bets do not win on average. The probability that the
wealth ever reaches 1 / alpha is then at most alpha (Ville 1939). The wealth is therefore evidence
that may be checked after each x. Any stake that depends on the past alone is valid; a good one
finds the truth sooner. Used by sequential_test.py (`Deadline`), and by runtime/registry/canary.py
and cli/scan.py (`Stream`).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

_NORMAL = NormalDist()
_LEAST, _MOST = 0.2, 0.95  # bounds of the stake, before the division by 1 + margin
_STAKES = 20  # constant stakes in the mixture
_PRIOR = (20.0, 0.15)  # weight and value of the prior of E[x^2]


@dataclass
class Deadline:
    """An e-process with the stakes that most probably reach a wealth of `goal` within `steps` x.

    The stakes are from Browne (1999), "Reaching goals by a deadline: digital options and
    continuous-time active portfolio management". The test has nearly the power of one that looks
    once, at the end. Let z = wealth / goal, V the sum of the (x - margin)^2 to come, estimated from
    the past ones, and q the quantile of the normal distribution. The stake is pdf(q(z)) / (z
    sqrt(V)), bounded to [0.2, 0.95] / (1 + margin), and no more than the goal needs.
    """

    goal: float
    steps: int
    margin: float = 0.0
    wealth: float = 1.0
    _seen: int = 0
    _squares: float = _PRIOR[0] * _PRIOR[1]

    @property
    def reached(self) -> bool:
        """True if the hypothesis E[x] <= margin is refuted, at level 1 / goal."""
        return self.wealth >= self.goal * (1 - 1e-9)

    def add(self, x: float) -> None:
        """Add the next x. Do nothing once the goal is reached."""
        if self.reached:
            return
        gain = x - self.margin
        self.wealth *= 1 + self._stake() * gain
        self._seen += 1
        self._squares += gain * gain

    def _stake(self) -> float:
        z = self.wealth / self.goal
        if z < 1e-12:  # practically no wealth is left
            return 0.0
        mean_square = max(1e-3, self._squares / (self._seen + _PRIOR[0]))
        spread = math.sqrt(mean_square * max(1, self.steps - self._seen))
        share = _NORMAL.pdf(_NORMAL.inv_cdf(z)) / (z * spread)
        least, most = _LEAST / (1 + self.margin), _MOST / (1 + self.margin)
        enough = (1 / z - 1) / (1 - self.margin)  # with this stake one x = 1 reaches the goal
        return min(max(share, least), most, max(enough, least))


class Stream:
    """An e-process without a deadline: a mixture of constant stakes.

    Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting", arXiv
    2010.09686.

    `evidence` is the greatest wealth so far. The hypothesis is refuted at level 1 / evidence.
    """

    def __init__(self, margin: float = 0.0) -> None:
        self.margin = margin
        self.seen = 0
        self.evidence = 1.0
        self._stakes = [(n + 0.5) / _STAKES * _MOST / (1 + margin) for n in range(_STAKES)]
        self._logs = [0.0] * _STAKES

    def add(self, x: float, times: int = 1) -> None:
        """Add the next x, so many times; what the wealth was between these does not count."""
        gain = x - self.margin
        self.seen += times
        for n, stake in enumerate(self._stakes):
            self._logs[n] += times * math.log1p(stake * gain)
        most = max(self._logs)
        mixed = most + math.log(sum(math.exp(log - most) for log in self._logs) / _STAKES)
        self.evidence = max(self.evidence, math.exp(min(mixed, 700.0)))  # e^710 overflows

    def state(self) -> dict[str, Any]:
        """Return the whole state, for `restore`."""
        return {"seen": self.seen, "evidence": self.evidence, "logs": self._logs}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        self.seen, self.evidence, self._logs = state["seen"], state["evidence"], state["logs"]
