"""Supervised fine-tuning: the mean negative log-likelihood of the tokens that the mask marks.

Rejection-sampling fine-tuning is the same over runs that were chosen by their reward; with
`weigh_loss` each sample's tokens count by its weight, whose mean over the batch's tokens is 1.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, Marked
from cray_agents.training_jobs import Hyperparameters


def loss(marked: Marked, hyper: Hyperparameters) -> Loss:
    """The sum over marked tokens, and their number."""
    values = -marked.logprobs
    if hyper.weigh_loss:
        values = values * marked.weight
    count = torch.tensor(float(len(values)), device=values.device)
    return Loss(values.sum(), count)
