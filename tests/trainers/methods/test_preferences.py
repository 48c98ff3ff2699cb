"""dpo and kto against their papers' formulas, worked out one sequence after the other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cray_agents.trainers.methods import METHODS
from cray_agents.training_jobs import Preference
from tests.support.trainers.method_batches import (
    DRIFT,
    VARIANTS,
    Answer,
    Numbers,
    answers,
    gradient,
    hyper,
    marked,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_ratio(answer: Answer) -> float:
    return float(answer.now.sum()) - float(answer.reference.sum())


def dpo_by_hand(batch: Sequence[Answer], options: Preference) -> float:
    """The mean over pairs of cDPO's cross-entropy: the better one wins with probability 1 - e."""
    found = []
    for better, worse in zip(batch[::2], batch[1::2], strict=True):
        wins = sigmoid(options.beta * (log_ratio(better) - log_ratio(worse)))
        e = options.label_smoothing
        found.append(-(1 - e) * math.log(wins) - e * math.log(1 - wins))
    return sum(found) / len(found)


def kto_by_hand(batch: Sequence[Answer], options: Preference) -> float:
    """The mean over answers of lambda_y - v(x, y)."""
    found = []
    for answer in batch:
        if answer.chosen:
            value = options.desirable * sigmoid(options.beta * (log_ratio(answer) - DRIFT))
            found.append(options.desirable - value)
        else:
            value = options.undesirable * sigmoid(options.beta * (DRIFT - log_ratio(answer)))
            found.append(options.undesirable - value)
    return sum(found) / len(found)


BY_HAND: dict[str, Callable[..., float]] = {"dpo": dpo_by_hand, "kto": kto_by_hand}
PREFERENCES = [name for name, (method, _) in VARIANTS.items() if method in BY_HAND]


def slopes(batch: Sequence[Answer], value: Callable[[Sequence[Answer]], float]) -> Numbers:
    """Central differences of a function of the answers' log-probabilities, token by token."""
    found, step = [], 1e-5
    for place, answer in enumerate(batch):
        for token in range(len(answer.now)):
            change = step * (np.arange(len(answer.now)) == token)
            moved = [
                [*batch[:place], replace(answer, now=answer.now + s * change), *batch[place + 1 :]]
                for s in (1, -1)
            ]
            found.append((value(moved[0]) - value(moved[1])) / (2 * step))
    return np.array(found)


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("fillers", [0, 1])
def test_value_and_gradient_are_the_papers(name: str, fillers: int) -> None:
    method, options = VARIANTS[name]
    batch = answers(11, [3, 5, 1, 1, 6, 2])
    by_hand = partial(BY_HAND[method], options=options.preference)
    given = marked(batch, fillers)
    loss = METHODS[method](given, options)
    count = {"dpo": 3, "kto": 6}[method]
    assert loss.count.item() == count
    assert loss.total.item() / count == pytest.approx(by_hand(batch), rel=1e-12)
    expected = slopes(batch, by_hand)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient(given, loss) / count, expected, rtol=1e-6, atol=1e-9)


def test_dpo_measures_are_implicit_rewards() -> None:
    batch = answers(8, [3, 5, 2, 2])
    rewards = np.array([0.1 * log_ratio(a) for a in batch])
    measures = METHODS["dpo"](marked(batch), hyper()).measures
    found = {name: value.item() / count.item() for name, (value, count) in measures.items()}
    assert found == pytest.approx(
        {
            "chosen_reward": rewards[::2].mean(),
            "rejected_reward": rewards[1::2].mean(),
            "reward_margin": (rewards[::2] - rewards[1::2]).mean(),
            "accuracy": (rewards[::2] > rewards[1::2]).mean(),
        }
    )


def test_kto_measures_are_of_each_kind() -> None:
    batch = answers(9, [3, 5, 2])
    rewards = [0.1 * log_ratio(a) for a in batch]
    measures = METHODS["kto"](marked(batch, fillers=1), hyper()).measures
    sums = {name: (value.item(), count.item()) for name, (value, count) in measures.items()}
    assert sums["desirable_reward"] == pytest.approx((rewards[0] + rewards[2], 2))
    assert sums["undesirable_reward"] == pytest.approx((rewards[1], 1))
    assert sums["drift"] == pytest.approx((3 * DRIFT, 3))


def test_kto_gradient_fades_far_from_the_drift() -> None:
    """The value function saturates on both sides: an answer that is lost or won teaches little."""
    (answer,) = answers(1, [4])
    found = []
    for offset in (-100.0, 0.0, 100.0):
        reference = answer.now - (DRIFT + offset) / len(answer.now)
        given = marked([replace(answer, reference=reference)])
        found.append(gradient(given, METHODS["kto"](given, hyper()))[0])
    assert found[1] == pytest.approx(-0.1 / 4)
    assert -1e-4 < found[0] < 0 and -1e-4 < found[2] < 0
