"""Head: choose the rows, vocabulary and temperature of the output layer's logits.

model.py attaches a Head to the last pipeline stage's chunk. training/train_step.py sets `rows`
before each forward pass and reads `entropy` after it. Megatron's GPTModel computes the labels'
log-probabilities from these logits, unless there are so many that the Head does it in chunks.
"""

import sys
from typing import Any

import torch

_ENTROPY_NUMBERS = 1 << 24  # float32 numbers at a time: a few buffers of 64 MiB


def padded_vocab(vocab: int, tensor: int) -> int:
    """Round the vocabulary up to a multiple of the tensor ranks: the rows of embedding and head."""
    return -(-vocab // tensor) * tensor


class Head:
    """The output layer and the loss of a chunk. `rows` and `want_...` hold until changed.

    - `rows` [n], int64, or None: only these tokens of the micro-batch get logits, which saves
      memory and time. The labels of a forward pass must be of the same rows.
    - `entropy` [n], float32: of each row's distribution, after a forward pass with `want_entropy`.
    - `top` [n], int64: each row's most likely token, after a forward pass with `want_top`.
    - `most_logits`: a forward pass with labels and more logits holds no more than these at once,
      and computes them again in the backward pass. That costs time, so CPUs hold all of them.

    Logits of the vocabulary's padding are -inf, so that the softmax ignores it.
    """

    def __init__(self, chunk: Any, vocab: int, temperature: float = 1.0) -> None:
        self.rows: torch.Tensor | None = None
        self.want_entropy = False
        self.entropy: torch.Tensor | None = None
        self.want_top = False
        self.top: torch.Tensor | None = None
        self.temperature = temperature
        self.most_logits = sys.maxsize
        self.layer = layer = chunk.output_layer
        self.group = layer.tp_group
        self.columns = layer.output_size_per_partition
        self.first = self.columns * self.group.rank()
        self.real = max(0, vocab - self.first)  # this rank's columns before the padding
        self.gather = layer.sequence_parallel
        if self.gather:
            # The rows lie on several ranks. So the Head, not the layer, gathers the hidden states
            # before it chooses rows, and the backward pass sums the gradients.
            layer.sequence_parallel = False
            layer.disable_grad_reduce = True
        self._multiply, layer.forward = layer.forward, self._forward
        self._plain_losses = chunk.compute_language_model_loss
        chunk.compute_language_model_loss = self._losses
        self._weight: torch.Tensor | None = None  # of a pass in chunks, until its loss

    def _forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return logits [n, 1, this rank's columns], or the hidden states if they are too many."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self.gather:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.group)
        if self.rows is not None:
            hidden = hidden.index_select(0, self.rows)
            if len(hidden) * self.columns > self.most_logits:
                self._weight = self.layer.weight if weight is None else weight
                return hidden, None
        logits, bias = self._multiply(hidden, weight, **options)
        logits = self._finish(logits)
        self.entropy = None
        if self.want_entropy:
            self.entropy = self.entropies(logits.detach().flatten(0, 1))
        if self.want_top:
            self.top = self.most_likely(logits.detach().flatten(0, 1))
        return logits, bias

    def _losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return -log p [1, n] of labels [1, n]."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        weight, self._weight = self._weight, None
        if weight is None:
            losses: torch.Tensor = self._plain_losses(labels, logits)
            return losses
        hidden = logits[:, 0]
        if not self.gather:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        losses, entropy = ChunkedLosses.apply(hidden, weight, labels[0], self)  # type: ignore[no-untyped-call]
        self.entropy = entropy if self.want_entropy else None
        return losses[None]

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the temperature, and hide the padding."""
        if self.temperature != 1.0:
            logits = _single(logits) / self.temperature
        if self.real < logits.shape[-1]:  # detached: the padding's gradient is its probability, 0
            logits.detach()[..., self.real :] = -torch.inf
        return logits

    def entropies(
        self, logits: torch.Tensor, normalizers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return entropies [n] of logits [n, this rank's columns], a few rows at a time."""
        size, entropies = max(1, _ENTROPY_NUMBERS // logits.shape[1]), []
        for place in range(0, len(logits), size):
            some = slice(place, place + size)
            rows = logits[some].float()
            normalizer = self.log_normalizer(rows) if normalizers is None else normalizers[some]
            chances = (rows - normalizer[:, None]).exp()
            entropies.append(self.sum_over_ranks(torch.special.entr(chances).sum(-1)))
        return torch.cat(entropies)

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens [n] of logits [n, this rank's columns], on all ranks.

        Of equal ones it is the first.
        """
        mine, tokens = logits.max(-1)
        highest = self._over_ranks(mine.float().clone(), torch.distributed.ReduceOp.MAX)
        beyond = self.columns * self.group.size()
        tokens = torch.where(mine == highest, tokens + self.first, beyond)
        return self._over_ranks(tokens, torch.distributed.ReduceOp.MIN)

    def log_normalizer(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log sum exp [n] of logits [n, this rank's columns] over all ranks' columns."""
        highest = self._over_ranks(logits.amax(-1), torch.distributed.ReduceOp.MAX)
        total = self.sum_over_ranks((logits - highest[:, None]).exp().sum(-1))
        return highest + total.log()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add up values in place over the ranks that share the vocabulary."""
        return self._over_ranks(values, torch.distributed.ReduceOp.SUM)

    def _over_ranks(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        torch.distributed.all_reduce(values, how, group=self.group)
        return values

    # ---- in chunks
    def chunks(self, *tensors: torch.Tensor) -> Any:
        """Yield slices of tensors [n, ...] whose logits are few enough."""
        size = max(1, self.most_logits // self.columns)
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return finished logits of a chunk, [rows, this rank's columns], at least in float32."""
        logits = hidden @ weight.t()
        return self._finish(_single(logits))

    def local(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return labels as columns of this rank [rows, 1], and a mask of those that it has."""
        columns = labels[:, None] - self.first
        mine = (columns >= 0) & (columns < self.columns)
        return columns.clamp(0, self.columns - 1), mine


def _single(logits: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 numbers in float32, others as they are."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


class ChunkedLosses(torch.autograd.Function):
    """-log p of labels, a chunk of rows at a time; the backward pass computes the logits again.

    With loss_i = lse_i - z_i[label] and z = h W^T / temperature, d loss_i / d z_i = p_i - onehot.
    `hidden` [n, hidden], `weight` [this rank's columns, hidden], `labels` [n]. Returns losses and
    entropies [n]; these are empty unless the head wants them. A weight with Megatron's `main_grad`
    gets its gradient there, and zeros from here.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        label_logits, normalizers, entropies, tops = [], [], [], []
        for rows, targets in head.chunks(hidden, labels):
            logits = head.logits(rows, weight)
            columns, mine = head.local(targets)
            normalizers.append(head.log_normalizer(logits))
            targeted = torch.where(mine, logits.gather(1, columns), 0.0)  # padding is -inf
            label_logits.append(head.sum_over_ranks(targeted.sum(1)))
            if head.want_entropy:
                entropies.append(head.entropies(logits, normalizers[-1]))
            if head.want_top:
                tops.append(head.most_likely(logits))
        head.top = torch.cat(tops) if tops else None
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.head, ctx.parameter = head, weight
        entropy = torch.cat(entropies) if entropies else normalizer.new_empty(0)
        ctx.mark_non_differentiable(entropy)
        return normalizer - torch.cat(label_logits), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        head: Head = ctx.head
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # Megatron's sum of all gradients, in float32: not rounded once a chunk, as `d_weight` is
        total = getattr(ctx.parameter, "main_grad", None)
        d_hidden = []
        for rows, targets, lse, gradient in head.chunks(hidden, labels, normalizer, gradients[0]):
            chances = head.logits(rows, weight).sub_(lse[:, None]).exp_()
            columns, mine = head.local(targets)
            chances.scatter_add_(1, columns, -mine.to(chances.dtype))
            d_logits = chances.mul_(gradient[:, None] / head.temperature).to(weight.dtype)
            d_hidden.append(d_logits @ weight)
            if d_weight is not None:
                target: torch.Tensor = d_weight if total is None else total
                if target.dtype == rows.dtype:
                    target.addmm_(d_logits.t(), rows)
                else:
                    target.add_(d_logits.t() @ rows)
        # Megatron's fused layers set this mark and add to `main_grad` themselves: not so here
        if getattr(ctx.parameter, "grad_added_to_main_grad", False):
            ctx.parameter.grad_added_to_main_grad = False
        return torch.cat(d_hidden), d_weight, None, None
