"""What a method is given and what it gives back: the marked tokens of a micro-batch, and a loss.

Losses are sums with a count: train.py adds both up over micro-batches and data ranks and divides
once, so that packing and layout do not change the result. Read next: sft.py, the shortest.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

Measures = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> (sum, count), scalars


@dataclass(frozen=True)
class Marked:
    """The tokens of a micro-batch that are to be predicted: n of them, sequence by sequence.

    With context parallelism a rank has a part of each sequence's tokens: `context` is the process
    group whose ranks have the others, and `counts` is true on one of them.
    """

    logprobs: torch.Tensor  # [n], float32, with gradient: of the labels, at the temperature
    sequence: torch.Tensor  # [n], int64: in which sequence of the micro-batch
    sequences: int  # how many there are, a filler without tokens included
    weight: torch.Tensor  # [n]: of its sample
    advantages: torch.Tensor  # [n]
    sampled: torch.Tensor  # [n]: log-probabilities that the engine sampled with
    before: torch.Tensor  # [n]: the trainer's own, under the parent's weights
    reference: torch.Tensor  # [n]: the trainer's own, under the reference's weights
    chosen: torch.Tensor  # [sequences]: 1 better or desirable, 0 worse or undesirable
    drift: float = 0.0  # kto: estimated divergence from the reference
    entropy: torch.Tensor | None = None  # [n], of the whole distribution; no gradient
    context: Any = None
    counts: bool = True

    def with_entropy(self, entropy: torch.Tensor) -> "Marked":
        """The same, with the entropy of each token's distribution."""
        return replace(self, entropy=entropy)


@dataclass(frozen=True)
class Loss:
    """`total` / `count` is the loss, once both are summed; `measures` are means as sums."""

    total: torch.Tensor  # scalar with gradient
    count: torch.Tensor  # scalar
    measures: Measures = field(default_factory=dict)


def per_sequence(marked: Marked, values: torch.Tensor) -> torch.Tensor:
    """Sums of per-token values, [sequences], over all ranks that hold parts of the sequences.

    The gradient of a token is that of its sum, on whichever rank it is.
    """
    sums = values.new_zeros(marked.sequences).index_add(0, marked.sequence, values)
    return sums if marked.context is None else _SumOverRanks.apply(sums, marked.context)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce forward; backward each rank takes the gradient as it is: all compute it alike."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, group: Any) -> torch.Tensor:
        sums = sums.clone()
        torch.distributed.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
