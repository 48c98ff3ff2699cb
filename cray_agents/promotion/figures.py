"""Figures of an evaluation: mean@k, pass@k, their intervals, and how two versions compare.

Attempts at one task are not independent, so a task counts as one observation: its mean over the
attempts, or its pass@k. Standard errors are between tasks (clustered as in Miller 2024, "Adding
Error Bars to Evals", arXiv 2411.00640), and versions are compared task by task. A missing attempt
is in no figure. Called by sequential_test.py, loop/rollouts.py and loop/evaluation.py.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import Any

from pydantic import Field

from cray_agents.records import Record

EXACT = 16  # differences, up to which all their signs are tried

#: The rewards of the attempts at each task; None: it is missing.
Scores = Mapping[str, Sequence[float | None]]


class Estimate(Record):
    """A mean over `tasks`, with the bounds of its 95 % interval.

    `value` is None without a task. The bounds are None where the tasks do not tell: with fewer than
    two, or equal ones that have no range.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    tasks: int = 0


class Figures(Record):
    """A version's figures on a set of tasks.

    `mean` is mean@k, the mean reward. `pass_at[k]` is the probability that one of k attempts
    passes, over the tasks with at least k scored attempts. `runs` counts the scored attempts,
    `missing` those without a reward.
    """

    mean: Estimate
    pass_at: dict[int, Estimate]
    runs: int
    missing: int


class Pair(Record):
    """The rewards of both versions for a task, and its guarded tag."""

    task: str
    incumbent: float
    candidate: float
    tag: str | None = None


class PairedDifference(Record):
    """The paired difference of two versions, `candidate` minus `incumbent`, by `pairs` of tasks.

    `p` is that of the test that turns the signs of the differences (Fisher 1935), two-sided.
    `left_out` counts the tasks without a scored attempt of both; `missing` the attempts without a
    reward, of either.
    """

    incumbent: str
    candidate: str
    difference: Estimate
    p: float
    tasks: int
    wins: int
    losses: int
    ties: int
    left_out: int
    missing: int
    pairs: list[Pair] = Field(repr=False)


def figures_of(scores: Scores, min_reward: float = 1.0, attempts: int = 1) -> Figures:
    """Return the figures of scores; a reward of at least `min_reward` passes.

    pass@k is for k = 1, 2, 4, ... and `attempts`: 1 - C(n - c, k) / C(n, k) at a task with c of n
    that pass, the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).
    """
    known = [[each for each in row if each is not None] for row in scores.values()]
    runs = sum(map(len, known))
    pass_at = {}
    for k in sorted({attempts, *(2**n for n in range((attempts - 1).bit_length()))}):
        enough = [row for row in known if len(row) >= k]
        passed = [(len(row), sum(each >= min_reward for each in row)) for row in enough]
        values = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in passed]
        pass_at[k] = estimate(values, sum(map(len, enough)) // k)
    mean = estimate([fmean(row) for row in known if row], runs)
    missing = sum(map(len, scores.values())) - runs
    return Figures(mean=mean, pass_at=pass_at, runs=runs, missing=missing)


def estimate(values: Sequence[float], draws: int | None = None) -> Estimate:
    """Return the mean of one value for each task, with its interval.

    It is that of Student's t. For values from 0 to 1 that came of `draws` attempts it is Wilson's,
    of as many independent draws, at most `draws`, as have this standard error (Korn and Graubard
    1998): it does not shrink to nothing at 0 and 1.
    """
    tasks = len(values)
    if tasks < 2:
        return Estimate(value=values[0] if values else None, tasks=tasks)
    mean, error, t = fmean(values), math.sqrt(variance(values) / tasks), _student(tasks - 1)
    if draws is not None and min(values) >= 0 and max(values) <= 1:
        spread = mean * (1 - mean)
        n = min(draws, spread / error**2) if error else draws if spread else tasks
        middle, half = mean + t * t / (2 * n), t * math.sqrt(spread / n + (t / n) ** 2 / 4)
        low, high = ((middle + sign * half) / (1 + t * t / n) for sign in (-1, 1))
        return Estimate(value=mean, low=max(0.0, low), high=min(1.0, high), tasks=tasks)
    if not error:
        return Estimate(value=mean, tasks=tasks)
    return Estimate(value=mean, low=mean - t * error, high=mean + t * error, tasks=tasks)


def compare(names: tuple[str, str], incumbent: Scores, candidate: Scores) -> PairedDifference:
    """Compare two versions, named in this order, on the tasks that both have scores of."""
    both, missing = list[Pair](), 0
    for task in incumbent:
        sides = [incumbent[task], candidate[task]]
        known = [[each for each in side if each is not None] for side in sides]
        missing += sum(map(len, sides)) - sum(map(len, known))
        if all(known):
            ours, theirs = map(fmean, known)
            both.append(Pair(task=task, incumbent=ours, candidate=theirs))
    differences = [pair.candidate - pair.incumbent for pair in both]
    return PairedDifference(
        incumbent=names[0],
        candidate=names[1],
        difference=estimate(differences),
        p=sign_flip_p(differences),
        **tally(differences),
        left_out=len(incumbent) - len(both),
        missing=missing,
        pairs=both,
    )


def tally(differences: Sequence[float]) -> dict[str, Any]:
    """Count the pairs, and those in which the candidate won, lost, or did the same."""
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    tasks = len(differences)
    return {"tasks": tasks, "wins": wins, "losses": losses, "ties": tasks - wins - losses}


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the share of all choices of signs whose sum is at least as far from 0.

    With more than EXACT differences that are not 0 it is that of the normal distribution with the
    same variance.
    """
    open_ones = [abs(d) for d in differences if d]
    total = abs(math.fsum(differences))
    if not open_ones:
        return 1.0
    if len(open_ones) > EXACT:
        return 2 * NormalDist().cdf(-total / math.sqrt(math.fsum(d * d for d in open_ones)))
    sums = [0.0]
    for d in open_ones:
        sums = [x + sign for x in sums for sign in (d, -d)]
    return sum(abs(x) >= total - 1e-9 for x in sums) / len(sums)


def _student(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z, n = NormalDist().inv_cdf(0.975), freedom
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + second + third
