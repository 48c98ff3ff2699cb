"""Head: choose the rows, vocabulary and temperature of the output layer's logits.

model.py attaches a Head to the last pipeline stage's output layer. training/train_step.py sets
`rows` before each forward pass and reads `entropy` after it. Megatron's GPTModel computes the
labels' log-probabilities from these logits.
"""

from typing import Any

import torch

_ENTROPY_NUMBERS = 1 << 24  # float32 numbers at a time: a few buffers of 64 MiB


def padded_vocab(vocab: int, tensor: int) -> int:
    """Round the vocabulary up to a multiple of the tensor ranks: the rows of embedding and head."""
    return -(-vocab // tensor) * tensor


class Head:
    """Hooks around an output layer. `rows` and `want_entropy` hold until they are changed.

    - `rows` [n], int64, or None: only these tokens of the micro-batch get logits, which saves
      memory and time. The labels of a forward pass must be of the same rows.
    - `entropy` [n], float32: of each row's distribution, after a forward pass with `want_entropy`.

    Logits of the vocabulary's padding are -inf, so that the softmax ignores it.
    """

    def __init__(self, output_layer: Any, vocab: int, temperature: float = 1.0) -> None:
        self.rows: torch.Tensor | None = None
        self.want_entropy = False
        self.entropy: torch.Tensor | None = None
        self.temperature = temperature
        self.group = output_layer.tp_group
        first = output_layer.output_size_per_partition * self.group.rank()
        self.real = max(0, vocab - first)  # this rank's columns before the padding
        self.gather = output_layer.sequence_parallel
        if self.gather:
            # The rows lie on several ranks. So this hook, not the layer, gathers the hidden states
            # before it chooses rows, and the backward pass sums the gradients.
            output_layer.sequence_parallel = False
            output_layer.disable_grad_reduce = True
        output_layer.register_forward_pre_hook(self._choose_rows)
        output_layer.register_forward_hook(self._finish)

    def _choose_rows(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden, *rest = arguments
        if self.gather:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.group)
        if self.rows is not None:
            hidden = hidden.index_select(0, self.rows)
        return hidden, *rest

    def _finish(self, layer: Any, arguments: tuple[Any, ...], output: Any) -> tuple[Any, Any]:
        logits, bias = output
        if self.temperature != 1.0:
            logits = logits.float() / self.temperature
        if self.real < logits.shape[-1]:  # detached: the padding's gradient is its probability, 0
            logits.detach()[..., self.real :] = -torch.inf
        self.entropy = self._entropy(logits.detach()) if self.want_entropy else None
        return logits, bias

    def _entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return entropies [n] of logits [n, 1, this rank's columns]."""
        flat = logits.flatten(0, 1)
        size = max(1, _ENTROPY_NUMBERS // flat.shape[1])
        return torch.cat([self._entropy_of(rows.float()) for rows in torch.split(flat, size)])

    def _entropy_of(self, logits: torch.Tensor) -> torch.Tensor:
        from torch.distributed import ReduceOp

        highest = self._over_ranks(logits.amax(-1), ReduceOp.MAX)
        total = self._over_ranks((logits - highest[:, None]).exp().sum(-1), ReduceOp.SUM)
        chances = (logits - (highest + total.log())[:, None]).exp()
        return self._over_ranks(torch.special.entr(chances).sum(-1), ReduceOp.SUM)

    def _over_ranks(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        torch.distributed.all_reduce(values, how, group=self.group)
        return values
