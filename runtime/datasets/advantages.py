"""Advantages of a group of runs, from their outcomes or from the rewards of their turns.

Both forms are from arXiv 2402.03300 (GRPO): section 4.1.2, outcome supervision, and 4.1.3, process
supervision. Called by methods.py with the rewards of a group.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cray_agents.queries import Deviation
from cray_agents.runtime.store.index import RunFacts

EQUAL = 1e-9  # rewards this close are equal: sums of the same rewards vary with their order


class Steps(NamedTuple):
    """The rewards of a run of `turns` turns, by turn. A turn without a reward is no step."""

    turns: int
    rewards: Mapping[int, float]


def all_equal(values: Sequence[float]) -> bool:
    """Tell whether all rewards are equal."""
    return math.isclose(min(values), max(values), rel_tol=EQUAL, abs_tol=EQUAL)


def outcome_advantages(values: Sequence[float], deviation: Deviation | None) -> list[float]:
    """Return each reward minus the group's mean, divided by the standard deviation if one is named.

    The variance of n values divides by n - 1 for `sample` and by n for `population`. The paper does
    not say which of them it means; TRL 1.16 and verl use `sample`.
    """
    mean = math.fsum(values) / len(values)
    scale = 1.0
    if deviation is not None:
        count = len(values) - (deviation == "sample")
        scale = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    return [(value - mean) / scale for value in values]


def step_advantages(
    group: Sequence[Steps], deviation: Deviation | None, discount: float
) -> list[list[float]]:
    """Return the advantages of each run's turns: [runs][turns].

    All step rewards of the group are normalised together, as outcomes are. The advantage of a turn
    is the sum of the normalised rewards of this turn and all later ones. The reward k turns later
    is multiplied by discount**k (the paper's discount is 1).
    """
    rewards = [reward for run in group for reward in run.rewards.values()]
    normalised = iter(outcome_advantages(rewards, deviation))
    by_run = []
    for run in group:
        step_values = {turn: next(normalised) for turn in run.rewards}
        advantages = [0.0] * run.turns
        total = 0.0
        for turn in reversed(range(run.turns)):
            total = step_values.get(turn, 0.0) + discount * total
            advantages[turn] = total
        by_run.append(advantages)
    return by_run


def rewarded_steps(runs: Sequence[RunFacts], overrides: Mapping[str, float]) -> list[Steps]:
    """Return the step rewards of each run, or an empty list if no single turn was rewarded.

    `overrides` maps run ids to rewards of whole runs, which replace all recorded rewards.
    """
    judged = [facts for facts in runs if facts.run_id not in overrides]
    if not any(turn is not None for facts in judged for *_, turn in facts.rewards):
        return []
    return [
        Steps(facts.turns, {facts.turns - 1: overrides[facts.run_id]})
        if facts.run_id in overrides
        else _steps_of(facts)
        for facts in runs
    ]


def first_missing_turn(facts: RunFacts) -> int | None:
    """Return the first rewarded turn that the run does not have."""
    turns = (turn for *_, turn in facts.rewards if turn is not None)
    return next((turn for turn in turns if not 0 <= turn < facts.turns), None)


def _steps_of(facts: RunFacts) -> Steps:
    """Sum the rewards of a run by turn. Rewards for the whole run count at its last turn."""
    by_turn: dict[int, float] = {}
    for _, _, value, turn in facts.rewards:
        index = facts.turns - 1 if turn is None else turn
        by_turn[index] = by_turn.get(index, 0.0) + value
    return Steps(facts.turns, by_turn)
