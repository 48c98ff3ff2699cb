"""Head: choose the rows, vocabulary and temperature of the output layer's logits.

model.py attaches a Head to the last pipeline stage's chunk. training/train_step.py sets `rows`
before each forward pass and reads `entropy` after it. Megatron's GPTModel computes the labels'
log-probabilities from these logits, unless there are so many that the Head does it in chunks. On
GPUs torch.compile then makes one kernel of what is computed of a chunk's logits.
"""

import sys
from functools import cache
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
      and computes them again in the backward pass: one of four products, where keeping them would
      take more memory than many models. CPUs hold all of them.
    - `compiled`: what is computed of a chunk's logits is compiled.

    Logits of the vocabulary's padding are -inf, so that the softmax ignores it.
    """

    def __init__(self, chunk: Any, vocab: int, temperature: float = 1.0) -> None:
        self.rows: torch.Tensor | None = None
        self.want_entropy = False
        self.entropy: torch.Tensor | None = None
        self.want_top = False
        self.top: torch.Tensor | None = None
        self.temperature = temperature
        self.most_logits, self.compiled = sys.maxsize, False
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
            self.entropy = self._entropies(logits.detach().flatten(0, 1))
        if self.want_top:
            self.top = self.most_likely(*logits.detach().flatten(0, 1).max(-1))
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

    def _entropies(self, logits: torch.Tensor) -> torch.Tensor:
        """Return entropies [n] of logits [n, this rank's columns], a few rows at a time."""
        sums = _compiled(logit_sums) if self.compiled else logit_sums
        size = max(1, _ENTROPY_NUMBERS // logits.shape[1])
        unknown = torch.full(logits.shape[:1], -1, device=logits.device)
        pieces = zip(*(torch.split(each, size) for each in (logits, unknown)), strict=True)
        return torch.cat(
            [
                self.over_ranks(*sums(rows[:, : self.real].float(), labels))[2]
                for rows, labels in pieces
            ]
        )

    def most_likely(self, highest: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens [n] on all ranks, of each rank's highest logits [n] and
        their columns [n]. Of equal ones it is the first.
        """
        of_all = self._reduce(highest.float().clone(), torch.distributed.ReduceOp.MAX)
        beyond = self.columns * self.group.size()
        tokens = torch.where(highest == of_all, tokens + self.first, beyond)
        return self._reduce(tokens, torch.distributed.ReduceOp.MIN)

    def over_ranks(
        self, highest: torch.Tensor, tokens: torch.Tensor, sums: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log sum exp, the labels' logits and the entropies, all [n], of what `logit_sums`
        returns of each rank's columns.
        """
        of_all = self._reduce(highest.clone(), torch.distributed.ReduceOp.MAX)
        total, product, labels = sums
        below = highest - of_all
        scale = below.exp()
        mine = torch.stack([total * scale, (product + below * total) * scale, labels])
        total, product, labels = self._reduce(mine, torch.distributed.ReduceOp.SUM)
        return of_all + total.log(), labels, total.log() - product / total

    def _reduce(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        """Reduce values in place over the ranks that share the vocabulary."""
        torch.distributed.all_reduce(values, how, group=self.group)
        return values

    # ---- in chunks
    def chunks(self, *tensors: torch.Tensor) -> Any:
        """Yield slices of tensors [n, ...] whose logits are few enough."""
        size = max(1, self.most_logits // self.columns)
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

    def local(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels as columns of this rank; -1 for those of other ranks."""
        columns = labels - self.first
        return torch.where((columns >= 0) & (columns < self.columns), columns, -1)


def logit_sums(
    logits: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the highest of logits [n, columns], its column, and [3, n]: the sums of e and e d, and
    the labels' logits; d is a logit less the highest, and e = exp(d).

    `columns` [n]: the labels; a logit is 0 for the label -1.
    """
    highest, tokens = logits.max(-1)
    below = logits - highest[:, None]
    chances = below.exp()
    labels = logits.gather(1, columns.clamp(min=0)[:, None])[:, 0].where(columns >= 0, 0.0)
    return highest, tokens, torch.stack([chances.sum(-1), (chances * below).sum(-1), labels])


def chunk_sums(
    hidden: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `logit_sums` of hidden states [n, hidden]."""
    return logit_sums(_single(hidden @ weight.t()) / temperature, columns)


def chunk_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    normalizer: torch.Tensor,
    gradient: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of h W^T, [n, columns], from that of the losses, [n]."""
    logits = _single(hidden @ weight.t()) / temperature
    chances = (logits - normalizer[:, None]).exp()
    here = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    factor = (gradient / temperature)[:, None]
    return ((chances - here.to(chances.dtype)) * factor).to(weight.dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _single(logits: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 numbers in float32, others as they are."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


class ChunkedLosses(torch.autograd.Function):
    """-log p of labels, a chunk of rows at a time; the backward pass computes the logits again.

    With loss_i = lse_i - z_i[label] and z = h W^T / temperature, d loss_i / d z_i = p_i - onehot.
    `hidden` [n, hidden], `weight` [this rank's columns, hidden], `labels` [n]. Returns losses and
    entropies [n]. A weight with Megatron's `main_grad` gets its gradient there, zeros from here.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums, numbers, tops = _compiled(chunk_sums) if head.compiled else chunk_sums, [], []
        for rows, targets in head.chunks(hidden, head.local(labels)):
            found = sums(rows, weight[: head.real], targets, head.temperature)
            numbers.append(torch.stack(head.over_ranks(*found)))
            if head.want_top:
                tops.append(head.most_likely(*found[:2]))
        head.top = torch.cat(tops) if tops else None
        normalizer, label_logits, entropy = torch.cat(numbers, 1)
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.head, ctx.parameter = head, weight
        ctx.mark_non_differentiable(entropy)
        return normalizer - label_logits, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        head: Head = ctx.head
        gradients_of: Any = _compiled(chunk_gradients) if head.compiled else chunk_gradients
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # Megatron's sum of all gradients, in float32: not rounded once a chunk, as `d_weight` is
        total = getattr(ctx.parameter, "main_grad", None)
        real, d_hidden = weight[: head.real], []
        columns = head.local(labels)
        for rows, *given in head.chunks(hidden, columns, normalizer, gradients[0]):
            d_logits = gradients_of(rows, real, *given, head.temperature)
            d_hidden.append(d_logits @ real)
            if d_weight is not None:
                target: torch.Tensor = (d_weight if total is None else total)[: head.real]
                if target.dtype == rows.dtype:
                    target.addmm_(d_logits.t(), rows)
                else:
                    target.add_(d_logits.t() @ rows)
        # Megatron's fused layers set this mark and add to `main_grad` themselves: not so here
        if getattr(ctx.parameter, "grad_added_to_main_grad", False):
            ctx.parameter.grad_added_to_main_grad = False
        return torch.cat(d_hidden), d_weight, None, None
