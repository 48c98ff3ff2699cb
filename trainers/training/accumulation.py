"""Gradient accumulation: forward and backward passes and optimizer steps that a client orders.

Unlike `RankTraining.step`, losses are sums, and gradients of several passes add up until a step
takes them. Used by job/command_run.py.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from cray_agents.trainers.data.context_parallel import ContextShard
from cray_agents.trainers.data.packer import Columns
from cray_agents.trainers.data.samples import Floats, Ints, Samples
from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.trainers.training.train_step import RankTraining

NO_CLIPPING = 1e30  # no norm reaches it; without a bound Megatron would measure none
TokenLoss = Callable[[TrainedTokens], Loss]


class Accumulation:
    """Gradients of a RankTraining that no optimizer step has taken yet. Methods are collective."""

    def __init__(self, training: RankTraining) -> None:
        self._training = training
        self.pending = False  # gradients wait for `update`

    def forward_backward(
        self, samples: Samples, columns: Columns, loss: TokenLoss, *, backward: bool
    ) -> tuple[float, dict[str, float], list[Floats]]:
        """Add the gradient of a loss, summed over samples, to those that wait.

        Returns the loss, its measures, and by sample the log-probabilities of its trained tokens.
        The gradient of a loss that is not finite cannot be taken out of the sum: all that wait are
        dropped. Without `backward` nothing is added, and nothing dropped.
        """
        training = self._training
        if backward and not self.pending:
            training.drop_gradients()
        units = [[i] for i in range(len(samples))]
        batches, members = training.pack_share(samples, units, columns)
        training.set_head(temperature=1.0)
        with self._unreduced(), nullcontext() if backward else torch.no_grad():
            reports = training.run_passes(batches, partial(self._report, loss), learn=backward)
        sums = training.ranks.add_up([sums for _, sums in reports], stop=False)
        marks = samples.marks.tolist()
        rows = [rows for rows, _ in reports]
        logprobs = training.ranks.collect(rows, batches, members, marks)
        total, _ = sums.pop("loss")
        del sums["stop"]
        self.pending |= backward
        if backward and not math.isfinite(total):
            self.drop()
        measures = {name: value / count for name, (value, count) in sums.items() if count}
        return total, measures, logprobs

    def set_adam(self, beta1: float | None, beta2: float | None, eps: float | None) -> None:
        """Set the numbers of Adam for the next step; None: those of the hyperparameters."""
        hyper = self._training.hyper
        betas = (
            hyper.adam_beta1 if beta1 is None else beta1,
            hyper.adam_beta2 if beta2 is None else beta2,
        )
        for group in self._training.optimizer.param_groups:
            group["betas"], group["eps"] = betas, hyper.adam_eps if eps is None else eps

    def update(self, rate: float, weight_decay: float, clip_grad: float) -> float:
        """Take an optimizer step with the gradients that wait; return their norm.

        `clip_grad` bounds the norm; 0: nothing does.
        """
        from megatron.core.distributed import finalize_model_grads

        training = self._training
        for chunk in training.wrapped_chunks:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
        finalize_model_grads(training.wrapped_chunks)
        training.optimizer.config.clip_grad = clip_grad or NO_CLIPPING
        norm = training.update(rate, weight_decay)
        self.drop()
        return norm

    def drop(self) -> None:
        """Forget the gradients that wait."""
        self._training.drop_gradients()
        self.pending = False

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Keep each data rank's gradients to itself within the context; `update` adds them up."""
        from megatron.core.utils import get_model_config

        config = get_model_config(self._training.chunks[0])
        before = config.finalize_model_grads_func, config.no_sync_func
        config.finalize_model_grads_func, config.no_sync_func = None, nullcontext
        try:
            with ExitStack() as stack:
                for chunk in self._training.wrapped_chunks:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = before

    def _report(
        self, loss: TokenLoss, share: ContextShard, rows: Ints, per_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return a micro-batch's loss; report its log-probabilities and sums."""
        logprobs = -per_token[0, : len(rows)].float()
        summed = loss(self._training.ranks.trained_tokens(share, rows, logprobs, 0.0, 1.0))
        sums = {"loss": (summed.total.detach(), summed.count), **summed.measures}
        # a micro-batch of filler teaches nothing, but every rank must send a gradient
        total = summed.total if len(rows) else per_token.sum() * 0.0
        return total, summed.count.int(), ((share.places[rows], logprobs.detach()), sums)
