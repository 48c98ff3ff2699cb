"""Sequence losses: helpers of dpo.py and kto.py, whose losses are of whole sequences.

With context parallelism every rank computes the same values of a sequence from sums over all
ranks. One rank reports them. The other ranks add zero, but with the gradient of their own tokens.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, TrainedTokens, per_sequence


def log_ratios(tokens: TrainedTokens) -> torch.Tensor:
    """Return log p(sequence) - log p_reference(sequence) over the trained tokens, [sequences]."""
    return per_sequence(tokens, tokens.logprobs - tokens.reference)


def loss_of(tokens: TrainedTokens, losses: torch.Tensor, measures: dict[str, torch.Tensor]) -> Loss:
    """Return the sum of losses [k] and their number k; measures [any] as sums and numbers."""
    total, share = losses.sum(), float(tokens.counts)
    if not tokens.counts:
        total = total - total.detach()

    def number(values: torch.Tensor) -> torch.Tensor:
        return losses.new_full((), share * len(values))

    reported = {
        name: (share * values.detach().sum(), number(values)) for name, values in measures.items()
    }
    return Loss(total, number(losses), reported)
