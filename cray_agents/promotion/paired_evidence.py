"""Paired evidence: the pairs behind a decision, as a loop notes them in its journal.

A note has the rewards and the runs of each pair in the order of their evaluation. The wealth after
each pair follows from it. Written by loop/evaluator.py, once per decision; read by
runtime/views/iteration_evidence.py. Hidden probes are not noted: they are never reported.
"""

from collections.abc import Sequence

from cray_agents.promotion.e_process import Deadline
from cray_agents.promotion.figures import Pair
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import Record

MOST_PAIRS = 100_000  # noted: a body has its limit


class RunPair(Record):
    """A pair with the runs that it compares."""

    task: str
    tag: str | None
    incumbent: float
    candidate: float
    incumbent_run: str
    candidate_run: str


class PairedEvidence(Record):
    """The pairs behind a decision, the first `MOST_PAIRS` of them.

    `planned` is the greatest number of pairs that the decision could have.
    """

    incumbent: str
    candidate: str
    test: PromotionTest
    planned: int
    pairs: list[RunPair]

    def wealth(self) -> list[float]:
        """Return the wealth of the bets on "better" after each pair; it starts at 1 before them."""
        test, wealth = self.test, list[float]()
        bets = Deadline(1 / test.alpha, self.planned, test.margin)
        for pair in self.pairs:
            bets.add((pair.candidate - pair.incumbent) / (test.high - test.low))
            wealth.append(bets.wealth)
        return wealth


def entry_of(iteration: int) -> str:
    """Return the name of the journal's entry for an iteration's decision."""
    return f"pairs-{iteration}"


def paired(pairs: Sequence[Pair], runs: dict[str, tuple[str, str]]) -> list[RunPair]:
    """Return pairs with their runs: by task, the incumbent's and the candidate's."""
    return [
        RunPair(
            task=pair.task,
            tag=pair.tag,
            incumbent=pair.incumbent,
            candidate=pair.candidate,
            incumbent_run=runs[pair.task][0],
            candidate_run=runs[pair.task][1],
        )
        for pair in pairs[:MOST_PAIRS]
    ]
