"""Context parallelism: divide the tokens of a packed micro-batch over several ranks.

A sequence is cut into twice as many chunks as there are ranks. A rank takes one from the front and
its mirror image from the back, so that causal attention is equal work for all ranks (arXiv
2407.21783, section 3.3.2; Transformer Engine cuts `thd` sequences in the same places). No torch.
training/parallel_groups.py calls `share` on every micro-batch. Read next: models/attention.py,
which gathers the keys.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cray_agents.trainers.data.packer import Packed
from cray_agents.trainers.data.samples import Ints

Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True, kw_only=True)
class ContextShard(Packed):
    """A context rank's share of a micro-batch; arrays are [its tokens] unless noted.

    `bounds`, of the filled-up sequences before the cut, and what else is of sequences are of the
    whole micro-batch and equal on all ranks. Several ranks share no prompts. Sequences are filled
    up at their ends, where causal attention hides the filler from the tokens before it. Filler has
    a mask of 0, so that it does not count.
    """

    sequence: Ints  # each token's sequence in the micro-batch
    places: Ints  # in the Packed's arrays; -1: a filler

    @property
    def sizes(self) -> tuple[int, int]:
        """The sum over its tokens of their sequences' lengths, and the number of its tokens."""
        real = self.sequence[self.places >= 0]
        lengths = np.diff(self.bounds) + self.shared_tokens
        return int(lengths[real].sum()), len(real)


def share(packed: Packed, rank: int, ranks: int, multiple: int = 1) -> ContextShard:
    """Return the share of a micro-batch of one of `ranks` context ranks.

    Every rank's number of tokens is a multiple of `multiple`: under sequence parallelism tensor
    ranks divide them evenly. One rank and a multiple of 1 give the whole micro-batch unchanged.
    """
    lengths, filled = np.diff(packed.bounds), fill_up(packed, ranks, multiple)
    positions, sequence = cut(filled, rank, ranks)
    real = positions < lengths[sequence]
    places = np.where(real, packed.bounds[sequence] + positions, -1)

    def mine(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        taken: npt.NDArray[Number] = values[places]
        taken[~real] = 0
        return taken

    return ContextShard(
        tokens=mine(packed.tokens),
        labels=mine(packed.labels),
        positions=positions + packed.shared_tokens[sequence],
        sequence=sequence,
        places=places,
        mask=mine(packed.mask),
        columns={name: mine(values) for name, values in packed.columns.items()},
        bounds=np.concatenate([[0], np.cumsum(filled)]).astype(np.int32),
        chosen=packed.chosen,
        shared_tokens=packed.shared_tokens,
        heads=packed.heads,
        routes=None
        if packed.routes is None
        else np.where(real[:, None], packed.routes[places], -1),
    )


def fill_up(packed: Packed, ranks: int, multiple: int = 1) -> Ints:
    """Return the lengths of a micro-batch's sequences before the cut, [sequences]: see `share`."""
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = np.diff(packed.bounds).astype(np.int64)
    filled = lengths + -lengths % chunks
    filled[-1] += -filled.sum() % (chunks * multiple)
    return filled


def cut(lengths: Ints, rank: int, ranks: int) -> tuple[Ints, Ints]:
    """Return (position in its sequence, sequence) of a rank's tokens, sequence by sequence.

    `lengths`: [sequences], multiples of 2 * ranks if there are several ranks.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths // ranks)
    starts = (np.cumsum(lengths) - lengths) // ranks
    nth = np.arange(len(sequence)) - starts[sequence]
    chunk = lengths[sequence] // (2 * ranks)
    skipped = np.where(nth < chunk, rank, 2 * (ranks - 1) - rank)  # other ranks' chunks before it
    return nth + skipped * chunk, sequence
