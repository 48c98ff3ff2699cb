"""Losses that are of whole sequences: what dpo.py and kto.py share.

With context parallelism every rank computes the same values of a sequence from sums over all
ranks. One of them reports these; the others add zero, and the gradient of their own tokens.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, Marked, per_sequence


def log_ratios(marked: Marked) -> torch.Tensor:
    """log p(sequence) - log p_reference(sequence) over the marked tokens, [sequences]."""
    return per_sequence(marked, marked.logprobs - marked.reference)


def loss_of(marked: Marked, losses: torch.Tensor, measures: dict[str, torch.Tensor]) -> Loss:
    """The sum of losses [k] and their number k; each measure [any] as its sum and number."""
    total, share = losses.sum(), float(marked.counts)
    if not marked.counts:
        total = total - total.detach()

    def number(values: torch.Tensor) -> torch.Tensor:
        return losses.new_tensor(share * len(values))

    reported = {
        name: (share * values.detach().sum(), number(values)) for name, values in measures.items()
    }
    return Loss(total, number(losses), reported)
