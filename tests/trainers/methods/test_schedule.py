"""Learning rates: warm-up, then each schedule's curve to the minimum in the last step."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cray_agents.trainers.methods.learning_rate import learning_rate
from cray_agents.training_jobs import Hyperparameters, explain_learning_rate, usual_learning_rate

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


@pytest.mark.parametrize(
    ("width", "method", "hyper", "rate"),
    [
        (64, "sft", {}, 2e-3),  # toys, from noise
        (128, "sft", {}, 2e-3),
        (256, "sft", {}, 1.8e-4),
        (128, "grpo", {}, 2e-4),
        (128, "sft", {"lora": {}}, 1e-2),
        (576, "sft", {}, 1e-5),  # pretrained: SmolLM2-135M and larger
        (4096, "sft", {}, 1e-5),
        (576, "dpo", {}, 1e-6),
        (2048, "grpo", {}, 1e-6),
        (2048, "kto", {}, 1e-6),
        (2048, "distill", {}, 1e-6),
        (4096, "sft", {"lora": {}}, 1e-4),
        (4096, "grpo", {"lora": {}}, 1e-5),
        (4096, "sft", {"init": "random"}, 1.2e-4),  # from scratch
        (64, "sft", {"init": "random"}, 2e-3),
    ],
)
def test_a_rate_that_is_not_given_follows_from_the_model(
    width: int, method: Any, hyper: dict[str, Any], rate: float
) -> None:
    settings = Hyperparameters.model_validate({"steps": 1, **hyper})
    assert usual_learning_rate(width, method, settings) == rate
    own = settings.model_copy(update={"learning_rate": 0.5})
    assert f"0.5 as given; the rule says {rate:g}" in explain_learning_rate(width, method, own)
