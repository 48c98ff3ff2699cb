"""Error rates of the promotion test in simulation: `python -m bench.promotion [TRIES]`.

Simulated evaluations on 204 held-out tasks, looked at after each batch, hidden probes and guards of
four tags included; tests/cray_agents/test_promotion.py holds a small part of this. `kinship`: on
which share of the tasks both versions have the same luck. Beside it, a sign test that looks once.
"""

import math
import sys
from collections.abc import Callable

from cray_agents.promotion.sequential_test import Decision, PromotionTest
from tests.cray_agents.test_promotion import always, trial

RISES = (
    (0.5, 0.5),
    (0.9, 0.9),
    (0.5, 0.55),
    (0.5, 0.62),
    (0.85, 0.92),
    (0.1, 0.3),
    (0.2, 0.9),
    (0.8, 0.7),
)
TEST = PromotionTest(guard="level")


def once(decision: Decision, alpha: float) -> bool:
    """Whether a sign test on all pairs promotes."""
    wins, open_ = decision.wins, decision.wins + decision.losses
    tail = sum(math.comb(open_, k) for k in range(wins, open_ + 1)) / 2**open_
    return tail <= alpha


def line(what: str, tries: int, run: Callable[[int], Decision]) -> None:
    """A row of the table."""
    found = [run(seed) for seed in range(tries)]
    promoted = sum(decision.verdict == "promote" for decision in found) / tries
    tasks = sum(decision.tasks for decision in found) / tries
    print(f"{what:40s} promoted {promoted:6.3f}   tasks {tasks:5.0f}", flush=True)


def main(tries: int) -> None:
    """Print the table."""
    look_once = PromotionTest(batch=1000, beta=1e-9, min_effect=-0.99, hidden=0)
    for kinship in (0.0, 0.5):
        for old, new in RISES:
            what = f"{old:g} -> {new:g}, kinship {kinship:g}"
            run = lambda seed: trial(seed, always(old), always(new), TEST, kinship=kinship)  # noqa: B023, E731
            line(what, tries, run)
            sign = sum(
                once(trial(seed, always(old), always(new), look_once, kinship=kinship), TEST.alpha)
                for seed in range(tries)
            )
            print(f"{'':29s}a sign test once {sign / tries:6.3f}   tasks   204")
    bad = {"a": 0.9, "b": 0.9, "c": 0.1, "d": 0.9}
    line("0.6 -> 0.9, but 0.1 in one tag of four", tries,
         lambda seed: trial(seed, always(0.6), bad.__getitem__, TEST))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
