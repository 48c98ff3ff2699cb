"""Supervised fine-tuning: the mean negative log-likelihood of the tokens that the mask marks.

Pure functions; train.py hands them what Megatron computed. The mean is over all marked tokens of
the global batch: Megatron sums these sums and counts over micro-batches and data ranks, and divides
gradients once (`calculate_per_token_loss`), so that packing and layout do not change the loss.
"""

import math

import torch

from cray_agents.records import Hyperparameters


def loss(
    mask: torch.Tensor, per_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum over marked tokens, their number, report [sum, number]) of a micro-batch.

    `mask`, `per_token` (negative log-likelihoods): [1, tokens].
    """
    total, count = (per_token.float() * mask).sum(), mask.sum()
    return total, count.int(), torch.stack([total.detach(), count]).double()


def learning_rate(hyper: Hyperparameters, step: int) -> float:
    """The rate of a step (counted from 0): linear warm-up, then constant, linear or cosine.

    Decay ends at `min_learning_rate` in the last step.
    """
    top, low, warmup = hyper.learning_rate, hyper.min_learning_rate, hyper.warmup_steps
    if step < warmup:
        return top * (step + 1) / warmup
    if hyper.schedule == "constant":
        return top
    progress = min(1.0, (step - warmup) / max(1, hyper.steps - 1 - warmup))
    left = 1 - progress if hyper.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return low + (top - low) * left
