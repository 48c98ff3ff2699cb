"""What each run of a group teaches: its advantage, by its outcome or by the steps on the way.

Both forms are of arXiv 2402.03300 (GRPO): section 4.1.2, outcome supervision, and 4.1.3, process
supervision. Called by methods.py, with what a group's runs were rewarded.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cray_agents.queries import Deviation
from cray_agents.runtime.store.index import RunFacts

EQUAL = 1e-9  # rewards this near to each other are equal: sums of the same parts differ in order


class Steps(NamedTuple):
    """The rewards of a run of `turns` turns, by turn; a turn without any is no step."""

    turns: int
    rewards: Mapping[int, float]


def equal(values: Sequence[float]) -> bool:
    """Whether rewards say nothing, because they are all the same."""
    return math.isclose(min(values), max(values), rel_tol=EQUAL, abs_tol=EQUAL)


def of_outcomes(values: Sequence[float], deviation: Deviation | None) -> list[float]:
    """Each run's reward minus the group's mean; over their standard deviation, if one is named.

    The squares of n values are divided by n - 1 for the deviation of a `sample`, by n for that of
    a `population`. The paper says std and not which; TRL 1.16 and verl take the sample's.
    """
    mean = math.fsum(values) / len(values)
    scale = 1.0
    if deviation is not None:
        count = len(values) - (deviation == "sample")
        scale = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    return [(value - mean) / scale for value in values]


def of_steps(
    group: Sequence[Steps], deviation: Deviation | None, discount: float
) -> list[list[float]]:
    """The advantages of each run's turns: [runs][turns].

    All step rewards of the group are normalised together, as outcomes are; the advantage of a
    turn's tokens is the sum of the normalised rewards of its own turn and those that follow, one
    that is k turns ahead times discount**k (the paper's discount is 1).
    """
    rewards = [reward for run in group for reward in run.rewards.values()]
    flat = iter(of_outcomes(rewards, deviation))
    found = []
    for run in group:
        normal = {turn: next(flat) for turn in run.rewards}
        advantages = [0.0] * run.turns
        ahead = 0.0
        for turn in reversed(range(run.turns)):
            ahead = normal.get(turn, 0.0) + discount * ahead
            advantages[turn] = ahead
        found.append(advantages)
    return found


def steps_among(runs: Sequence[RunFacts], instead: Mapping[str, float]) -> list[Steps]:
    """What turns of these runs were rewarded, run by run; of none if no turn of any was.

    `instead`: rewards of whole runs, by id, that count in the place of all that was recorded.
    """
    judged = [facts for facts in runs if facts.run_id not in instead]
    if not any(turn is not None for facts in judged for *_, turn in facts.rewards):
        return []
    return [
        Steps(facts.turns, {facts.turns - 1: instead[facts.run_id]})
        if facts.run_id in instead
        else _steps_of(facts)
        for facts in runs
    ]


def turn_beyond(facts: RunFacts) -> int | None:
    """The first turn that is rewarded and that the run has not."""
    turns = (turn for *_, turn in facts.rewards if turn is not None)
    return next((turn for turn in turns if not 0 <= turn < facts.turns), None)


def _steps_of(facts: RunFacts) -> Steps:
    """A run's rewards by turn; what was given for the whole run counts at its last turn."""
    found: dict[int, float] = {}
    for _, _, value, turn in facts.rewards:
        place = facts.turns - 1 if turn is None else turn
        found[place] = found.get(place, 0.0) + value
    return Steps(facts.turns, found)
