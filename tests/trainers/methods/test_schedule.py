"""Learning rates: warm-up, then each schedule's curve to the minimum in the last step."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cray_agents.trainers.methods.learning_rate import learning_rate
from cray_agents.training_jobs import Hyperparameters

SCHEDULES = ["constant", "linear", "cosine", "wsd"]


def rates(steps: int, warmup: int, schedule: Any, **options: float) -> list[float]:
    hyper = Hyperparameters(
        steps=steps,
        learning_rate=1.0,
        min_learning_rate=0.1,
        warmup_steps=warmup,
        schedule=schedule,
        **options,
    )
    return [learning_rate(hyper, step) for step in range(steps)]


def test_each_schedule_step_by_step() -> None:
    warm = [1 / 2, 1]  # the first step learns, and the last of the warm-up has the whole rate
    left = [1, 3 / 4, 1 / 2, 1 / 4, 0]
    curves = {
        "constant": [1.0] * 5,
        "linear": [0.1 + 0.9 * x for x in left],
        "cosine": [0.1 + 0.9 * (1 + math.cos(math.pi * (1 - x))) / 2 for x in left],
    }
    for schedule, curve in curves.items():
        assert rates(7, 2, schedule) == pytest.approx(warm + curve), schedule


def test_wsd_is_stable_and_then_decays() -> None:
    found = rates(20, 3, "wsd", decay_fraction=0.2)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert found[3:16] == [1.0] * 13
    assert found[15:] == pytest.approx([1, 0.775, 0.55, 0.325, 0.1])  # 0.2 of 20 steps: 4 down


@given(st.integers(1, 60), st.integers(0, 70), st.sampled_from(SCHEDULES), st.floats(0.01, 1))
@example(4, 0, "wsd", 0.1)  # less than half a step to decay in
@example(10, 6, "wsd", 0.9)  # the decay would begin within the warm-up
def test_up_then_never_up_again(steps: int, warmup: int, schedule: str, fraction: float) -> None:
    found = rates(steps, warmup, schedule, decay_fraction=fraction)
    assert all(0 < rate <= 1 for rate in found)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if len(falling) > 1:
        assert falling[0] == pytest.approx(1)
        assert falling[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
