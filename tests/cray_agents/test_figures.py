"""Figures of an evaluation: against cases done by hand, and their coverage."""

import random

import pytest

from cray_agents.promotion.figures import Scores, compare, estimate, figures_of, sign_flip_p


def test_mean_and_pass_at_k_by_hand() -> None:
    scores: Scores = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, None], "d": [None] * 4}
    found = figures_of(scores, attempts=4)
    assert (found.runs, found.missing) == (11, 5)
    assert found.mean.value == pytest.approx((0.5 + 0 + 1) / 3)
    assert sorted(found.pass_at) == [1, 2, 4]
    assert found.pass_at[1].value == pytest.approx(found.mean.value)
    assert found.pass_at[2].value == pytest.approx((5 / 6 + 0 + 1) / 3)  # 1 - C(2,2) / C(4,2)
    assert (found.pass_at[4].value, found.pass_at[4].tasks) == (0.5, 2)  # c has three only
    assert figures_of({"a": [0.4, 0.9]}, 0.5, 2).pass_at[1].value == 0.5


def test_intervals_by_hand() -> None:
    # Wilson's for 0 of 100 with t = 1.984: t^2 / (100 + t^2)
    zero = estimate([0.0] * 100, 100)
    assert (zero.value, zero.low) == (0, 0) and zero.high == pytest.approx(0.0379, abs=1e-4)
    # Student's: -1, 1, 2, 6 have mean 2, variance 26/3, t(3) = 3.182
    wide = estimate([-1.0, 1, 2, 6], 4)
    assert wide.value == 2 and wide.high == pytest.approx(2 + 3.182 * (26 / 12) ** 0.5, abs=0.05)
    assert estimate([3.0, 3.0]).low is None and estimate([0.5], 8).low is None
    assert estimate([], 0).value is None


def test_versions_are_compared_by_task() -> None:
    before: Scores = {"a": [0, 0], "b": [0, 1], "c": [1, 1], "d": [None, None]}
    after: Scores = {"a": [1, 0], "b": [1, 1], "c": [1, None], "d": [1, 1]}
    found = compare(("m@1", "m@2"), before, after)
    assert (found.tasks, found.wins, found.losses, found.ties) == (3, 2, 0, 1)
    assert (found.left_out, found.missing) == (1, 3)
    assert found.difference.value == pytest.approx(1 / 3)
    assert found.p == 0.5  # of the four choices of signs two are as far: ++ and --
    assert compare(("m@1", "m@2"), {"a": [None]}, {"a": [1]}).difference.value is None


def test_the_p_of_many_is_that_of_few_continued() -> None:
    few = [0.5, -0.25, 1, 1, 0.5, 0.25, -0.5, 1, 0, 0.75, 0.25, 0.5, -0.25, 0.5, 0.25, 0.25]
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == 1
    assert sign_flip_p([*few, 0.0]) == pytest.approx(sign_flip_p([*few, 1e-6, 1e-6]), rel=0.3)


def test_intervals_cover_with_attempts_that_hang_together() -> None:
    """As if attempts were independent, the interval of 100 x 8 would be half as wide."""
    generator, covered = random.Random(0), 0
    for _ in range(200):
        chances = [generator.betavariate(0.3, 0.7) for _ in range(50)]
        rows = {str(n): [float(generator.random() < p) for _ in range(8)]
                for n, p in enumerate(chances)}  # fmt: skip
        found = figures_of(rows, attempts=8).mean
        covered += found.low <= 0.3 <= found.high
    assert 0.92 <= covered / 200 <= 0.98
