"""Direct preference optimization (arXiv 2305.18290): rank the better answer above the worse.

With r(y) = beta (log p(y) - log p_reference(y)), the loss of a pair is

    -(1 - e) log sigmoid(r(better) - r(worse)) - e log sigmoid(r(worse) - r(better))

where e, the label smoothing, is the share of pairs with swapped labels ("cDPO",
https://ericmitchell.ai/cdpo.pdf).
"""

import torch
from torch.nn.functional import logsigmoid

from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.trainers.methods.sequences import log_ratios, loss_of
from cray_agents.training_jobs import Hyperparameters


def loss(tokens: TrainedTokens, hyper: Hyperparameters) -> Loss:
    """Return the loss summed over pairs, and their number. Measures are means over pairs.

    Sequences alternate: better, worse, better, worse. A last one without a partner is filler.
    """
    options = hyper.preference
    pairs = tokens.sequences // 2
    rewards = options.beta * log_ratios(tokens)
    better, worse = rewards[: 2 * pairs].view(pairs, 2).unbind(1)
    margins = better - worse
    flipped = options.label_smoothing
    losses = -(1 - flipped) * logsigmoid(margins) - flipped * logsigmoid(-margins)
    measures = {
        "reward_margin": margins,
        "accuracy": (margins > 0).to(margins.dtype),
        "chosen_reward": better,
        "rejected_reward": worse,
    }
    every = torch.ones_like(losses, dtype=torch.bool)
    return loss_of(tokens, losses, every, {name: (one, every) for name, one in measures.items()})
