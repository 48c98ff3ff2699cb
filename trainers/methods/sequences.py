"""Sequence losses: helpers of dpo.py and kto.py, whose losses are of whole sequences.

With context parallelism every rank computes the same values of a sequence from sums over all
ranks. One rank reports them. The other ranks add zero, but with the gradient of their own tokens.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, TrainedTokens, per_sequence


def log_ratios(tokens: TrainedTokens) -> torch.Tensor:
    """Return log p(sequence) - log p_reference(sequence) over the trained tokens, [sequences]."""
    return per_sequence(tokens, tokens.logprobs - tokens.reference)


def loss_of(
    tokens: TrainedTokens,
    losses: torch.Tensor,
    real: torch.Tensor,
    measures: dict[str, tuple[torch.Tensor, torch.Tensor]],
) -> Loss:
    """Return the sum of losses [k] and their number, of those that are `real` [k], bool.

    Measures are values and which of them count, both [any], and become sums and numbers.
    """
    share = float(tokens.counts)
    total = torch.where(real, losses, 0.0).sum()
    if not tokens.counts:
        total = total - total.detach()

    def number(counted: torch.Tensor) -> torch.Tensor:
        return share * counted.sum().to(losses.dtype)

    reported = {
        name: (share * torch.where(counted, values.detach(), 0.0).sum(), number(counted))
        for name, (values, counted) in measures.items()
    }
    return Loss(total, number(real), reported)
