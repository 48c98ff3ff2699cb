"""Context parallelism: how sequences are cut over ranks. test_numerics.py trains so."""

import numpy as np
import pytest

from cray_agents.trainers.data.context_parallel import share
from cray_agents.trainers.data.packer import Packed, pack
from cray_agents.trainers.data.samples import Samples

LENGTHS = [7, 31, 1, 16, 4]


def packed(lengths: list[int] = LENGTHS) -> Packed:
    """Token 100 * sequence + position; a column of the same numbers; every other label counts."""
    sequences = [[100 * s + i for i in range(n + 1)] for s, n in enumerate(lengths)]
    samples = Samples.of(sequences)
    for row in samples.masks:
        row[1::2] = 0
    column = [np.array(sequence, np.float32) + 0.5 for sequence in sequences]
    return pack(samples, range(len(lengths)), {"before": column})


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_is_on_one_rank_and_as_it_was(ranks: int, multiple: int) -> None:
    whole = packed()
    shares = [share(whole, rank, ranks, multiple) for rank in range(ranks)]
    places = np.concatenate([part.places for part in shares])
    assert sorted(places[places >= 0]) == list(range(len(whole.tokens)))
    for part in shares:
        real, at = part.places >= 0, part.places[part.places >= 0]
        for name in ("tokens", "labels", "positions", "mask"):
            np.testing.assert_array_equal(getattr(part, name)[real], getattr(whole, name)[at])
        np.testing.assert_array_equal(part.sequence[real], whole.tokens[at] // 100)
        np.testing.assert_array_equal(part.columns["before"][real], whole.columns["before"][at])
        assert not part.mask[~real].any() and not part.columns["before"][~real].any()
        assert len(part.tokens) == len(shares[0].tokens)
        assert len(part.tokens) % multiple == 0
        assert part.bounds[-1] == ranks * len(part.tokens)
        np.testing.assert_array_equal(part.bounds, shares[0].bounds)
        np.testing.assert_array_equal(part.chosen, whole.chosen)
        # fillers stand behind their sequence's real tokens, where causal attention cannot see them
        lengths = np.diff(whole.bounds)
        assert (part.positions[~real] >= lengths[part.sequence[~real]]).all()


def test_the_work_of_causal_attention_is_even() -> None:
    whole = packed([64, 16, 128])
    work = [share(whole, rank, 4).positions.sum() for rank in range(4)]
    assert max(work) == min(work)


def test_a_rank_alone_has_the_micro_batch_as_it_is() -> None:
    whole = packed()
    alone = share(whole, 0, 1)
    for name in ("tokens", "labels", "positions", "bounds", "mask", "chosen"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(whole, name))
    np.testing.assert_array_equal(alone.sequence, whole.tokens // 100)
    np.testing.assert_array_equal(alone.places, np.arange(len(whole.tokens)))
    assert len(share(whole, 0, 1, 8).tokens) == -(-len(whole.tokens) // 8) * 8
