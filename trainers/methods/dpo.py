"""Direct preference optimization (arXiv 2305.18290): the better answer above the worse one.

Of a pair with r(y) = beta (log p(y) - log p_reference(y)), the loss is

    -(1 - e) log sigmoid(r(better) - r(worse)) - e log sigmoid(r(worse) - r(better))

where e, the label smoothing, is the share of pairs that are the wrong way round ("cDPO",
https://ericmitchell.ai/cdpo.pdf).
"""

from torch.nn.functional import logsigmoid

from cray_agents.trainers.methods.loss import Loss, Marked
from cray_agents.trainers.methods.sequences import log_ratios, loss_of
from cray_agents.training_jobs import Hyperparameters


def loss(marked: Marked, hyper: Hyperparameters) -> Loss:
    """The sum over pairs, and their number. Sequences lie better, worse, better, worse.

    A last one without a partner is filler. Measures are means over pairs.
    """
    options = hyper.preference
    pairs = marked.sequences // 2
    rewards = options.beta * log_ratios(marked)
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
    return loss_of(marked, losses, measures)
