"""Loss: the input and output of a method, trained tokens of a micro-batch and their loss.

Losses are sums with a count. training/train_step.py adds both up over micro-batches and data ranks
and divides once, so that packing and layout do not change the result. Read next: sft.py, the
shortest method.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

Measures = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> (sum, count), scalars


@dataclass(frozen=True)
class TrainedTokens:
    """The n tokens of a micro-batch that are trained on, sequence by sequence.

    With context parallelism a rank has only some tokens of each sequence. `context` is the process
    group of the ranks that share the sequences, and `counts` is true on one of them.
    """

    logprobs: torch.Tensor  # [n], float32, with gradient: of the labels, at the temperature
    sequence: torch.Tensor  # [n], int64: the token's sequence in the micro-batch
    sequences: int  # their number, including filler without tokens
    weight: torch.Tensor  # [n]: the sample's weight
    advantages: torch.Tensor  # [n]
    sampled: torch.Tensor  # [n]: log-probabilities that the engine sampled with
    before: torch.Tensor  # [n]: the trainer's own, under the parent's weights
    reference: torch.Tensor  # [n]: the trainer's own, under the reference's weights
    teacher: torch.Tensor  # [n]: the trainer's own, under the teacher's weights
    chosen: torch.Tensor  # [sequences]: 1 better or desirable, 0 worse or undesirable
    drift: float = 0.0  # kto: estimated divergence from the reference
    entropy: torch.Tensor | None = None  # [n], of the token's distribution; no gradient
    context: Any = None
    counts: bool = True

    def with_entropy(self, entropy: torch.Tensor) -> "TrainedTokens":
        """Return a copy with the entropy of each token's distribution."""
        return replace(self, entropy=entropy)


@dataclass(frozen=True)
class Loss:
    """A loss: `total` / `count`, once both are summed over ranks. `measures` are means as sums."""

    total: torch.Tensor  # scalar with gradient
    count: torch.Tensor  # scalar
    measures: Measures = field(default_factory=dict)


def per_sequence(tokens: TrainedTokens, values: torch.Tensor) -> torch.Tensor:
    """Sum per-token values by sequence, [sequences], over all ranks that share the sequences.

    A token's gradient is its sum's gradient, on every rank.
    """
    sums = values.new_zeros(tokens.sequences).index_add(0, tokens.sequence, values)
    return sums if tokens.context is None else _SumOverRanks.apply(sums, tokens.context)  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce forward; backward passes the gradient on, which is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, group: Any) -> torch.Tensor:
        sums = sums.clone()
        torch.distributed.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
