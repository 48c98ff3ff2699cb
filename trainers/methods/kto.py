"""Kahneman-Tversky optimization (arXiv 2402.01306): single answers, each desirable or not.

With r = log p(y) - log p_reference(y), the loss of a sequence is

    desirable:    w_desirable   (1 - sigmoid(beta (r - z)))
    undesirable:  w_undesirable (1 - sigmoid(beta (z - r)))

z >= 0 is the drift, the mean r of answers paired with other prompts. It estimates the divergence
from the reference, and has no gradient.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, TrainedTokens, per_sequence
from cray_agents.trainers.methods.sequences import log_ratios, loss_of
from cray_agents.training_jobs import Hyperparameters


def loss(tokens: TrainedTokens, hyper: Hyperparameters) -> Loss:
    """Return the loss summed over sequences with tokens, and their number; measures are means."""
    options = hyper.preference
    # masks, not a choice of rows: their number would have to be read from the device
    real = per_sequence(tokens, torch.ones_like(tokens.logprobs)) > 0
    ratios, desirable = log_ratios(tokens), tokens.chosen > 0
    gains = options.beta * torch.where(desirable, ratios - tokens.drift, tokens.drift - ratios)
    lost = torch.sigmoid(-gains)
    losses = torch.where(desirable, options.desirable * lost, options.undesirable * lost)
    rewards = options.beta * ratios
    measures = {
        "desirable_reward": (rewards, real & desirable),
        "undesirable_reward": (rewards, real & ~desirable),
        "drift": (torch.full_like(rewards, tokens.drift), real),
    }
    return loss_of(tokens, losses, real, measures)
