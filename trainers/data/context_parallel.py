"""Context parallelism: which tokens of a packed micro-batch each of several ranks has.

A sequence is cut into twice as many chunks as there are ranks, and a rank takes one from the front
and its mirror image from the back, so that causal attention is as much work for all (arXiv
2407.21783, section 3.3.2; Transformer Engine cuts `thd` sequences in the same places). train.py
calls `share` on every micro-batch. No torch. Read next: attention.py, which gathers the keys.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cray_agents.trainers.data.packer import Packed
from cray_agents.trainers.data.samples import Floats, Ints

Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True)
class ContextShard:
    """What a context rank has of a micro-batch, all [its tokens] but what is said otherwise.

    `bounds` and `chosen` are of the whole micro-batch and the same on all ranks. Sequences are
    filled up behind their ends, where causal attention cannot see it: for the model a filler is
    the end of its sequence, and it counts for nothing since its mask is 0.
    """

    tokens: Ints
    labels: Ints
    positions: Ints  # in their sequences
    sequence: Ints  # in which sequence of the micro-batch
    places: Ints  # in the Packed's arrays; -1: a filler
    mask: Floats
    columns: dict[str, Floats]
    bounds: npt.NDArray[np.int32]  # [sequences + 1]: of the filled-up sequences, before the cut
    chosen: Floats  # [sequences]

    @property
    def longest(self) -> int:
        """Tokens of the longest filled-up sequence, before the cut."""
        return int(np.diff(self.bounds).max())


def share(packed: Packed, rank: int, ranks: int, multiple: int = 1) -> ContextShard:
    """The part of a micro-batch that belongs to one of `ranks` context ranks.

    `multiple`: every rank gets a multiple of it in tokens (tensor ranks share those evenly under
    sequence parallelism). With one rank and a multiple of 1 it is the whole micro-batch, as it is.
    """
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = np.diff(packed.bounds).astype(np.int64)
    filled = lengths + -lengths % chunks
    filled[-1] += -filled.sum() % (chunks * multiple)
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
        positions=positions,
        sequence=sequence,
        places=places,
        mask=mine(packed.mask),
        columns={name: mine(values) for name, values in packed.columns.items()},
        bounds=np.concatenate([[0], np.cumsum(filled)]).astype(np.int32),
        chosen=packed.chosen,
    )


def cut(lengths: Ints, rank: int, ranks: int) -> tuple[Ints, Ints]:
    """(position in its sequence, sequence) of each token that a rank has, sequence by sequence.

    `lengths`: [sequences], multiples of 2 * ranks where there are several.
    """
    sequence = np.repeat(np.arange(len(lengths)), lengths // ranks)
    starts = (np.cumsum(lengths) - lengths) // ranks
    nth = np.arange(len(sequence)) - starts[sequence]
    chunk = lengths[sequence] // (2 * ranks)
    skipped = np.where(nth < chunk, rank, 2 * (ranks - 1) - rank)  # chunks of others before it
    return nth + skipped * chunk, sequence
