"""Training steps beside TRL's: both sides read the same tokens, and their losses are equal."""

from pathlib import Path

import numpy as np
import pytest

from bench.rivals.step_batches import (
    ATTEMPTS,
    BATCH,
    GROUPS,
    STEPS,
    advantages_of,
    places_of,
    round_of,
    write_model,
)
from bench.rivals.steps import CLOSE, OF_METHOD, difference, side

VOCABULARY, LONGEST = 64, 128


def test_a_round_takes_each_completion_once() -> None:
    for number in range(3):
        steps = range(number * STEPS, (number + 1) * STEPS)
        places = [place for step in steps for place in places_of(step)]
        assert sorted(places) == list(range(GROUPS * ATTEMPTS))
        assert all(len(places_of(step)) == BATCH for step in steps)


def test_each_group_has_a_signal_that_adds_up_to_nothing() -> None:
    advantages = np.reshape(advantages_of(round_of(5, VOCABULARY, LONGEST)), (GROUPS, ATTEMPTS))
    assert np.abs(advantages).min(initial=9.0) > 0
    assert advantages.sum(1) == pytest.approx(np.zeros(GROUPS))


@pytest.mark.megatron
@pytest.mark.parametrize("method", OF_METHOD)
def test_losses_are_equal_before_and_after_updates(tmp_path: Path, method: str) -> None:
    """Beside the loss, a second round's depends on gradients and optimizer."""
    model = tmp_path / "model"
    write_model(model, 48, 2, VOCABULARY, LONGEST)
    rounds = {}
    for name in OF_METHOD[method]:
        with side(name, method, model, VOCABULARY, LONGEST) as process:
            rounds[name] = [process.go(), process.go()]
    for number in range(2):
        assert difference({name: taken[number] for name, taken in rounds.items()}) < CLOSE
    losses = [loss for taken in rounds["ours"] for loss in taken.losses]
    assert len(set(losses)) == 2 * STEPS  # no batch comes twice
