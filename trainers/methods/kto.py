"""Kahneman-Tversky optimization (arXiv 2402.01306): single answers, each desirable or not.

Of a sequence with r = log p(y) - log p_reference(y), the loss is

    desirable:    w_desirable   (1 - sigmoid(beta (r - z)))
    undesirable:  w_undesirable (1 - sigmoid(beta (z - r)))

z >= 0 is the drift: the mean r of answers put to other prompts, which estimates the divergence from
the reference. No gradient goes through it.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, Marked, per_sequence
from cray_agents.trainers.methods.sequences import log_ratios, loss_of
from cray_agents.training_jobs import Hyperparameters


def loss(marked: Marked, hyper: Hyperparameters) -> Loss:
    """The sum over sequences that have tokens, and their number. Measures are means over these."""
    options = hyper.preference
    real = per_sequence(marked, torch.ones_like(marked.logprobs)) > 0
    ratios, desirable = log_ratios(marked)[real], marked.chosen[real] > 0
    gains = options.beta * torch.where(desirable, ratios - marked.drift, marked.drift - ratios)
    lost = torch.sigmoid(-gains)
    losses = torch.where(desirable, options.desirable * lost, options.undesirable * lost)
    rewards = options.beta * ratios
    measures = {
        "desirable_reward": rewards[desirable],
        "undesirable_reward": rewards[~desirable],
        "drift": torch.full_like(rewards, marked.drift),
    }
    return loss_of(marked, losses, measures)
