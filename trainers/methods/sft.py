"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

Rejection-sampling fine-tuning is the same method over runs chosen by their reward. With
`weigh_loss` a sample's tokens count by its weight, whose mean over the batch's tokens is 1.
"""

from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.training_jobs import Hyperparameters


def loss(tokens: TrainedTokens, hyper: Hyperparameters) -> Loss:
    """Return the loss summed over trained tokens, and their number."""
    values = -tokens.logprobs
    if hyper.weigh_loss:
        values = values * tokens.weight
    count = values.new_full((), float(len(values)))
    return Loss(values.sum(), count)
