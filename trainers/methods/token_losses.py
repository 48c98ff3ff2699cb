"""Token losses: the losses that a client of a training session names in a command.

With r = p / p_sampled, the advantage A and the weight w, the loss of a token is

    cross_entropy         -w log p
    importance_sampling   -w r A
    ppo                   -w min(r A, clip(r) A)                    arXiv 1707.06347
    cispo                 -w stop_gradient(clip(r)) A log p         arXiv 2506.13585
    linear                w g log p, where the client's own loss has the gradient g at log p

Each is summed over tokens and never divided. Called by job/command_run.py.
"""

from collections.abc import Callable

import torch

from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.training_commands import ForwardBackward, LossName


def token_loss(command: ForwardBackward) -> Callable[[TrainedTokens], Loss]:
    """Return the loss that a command names, as a function of a micro-batch's tokens."""
    values_of = LOSSES[command.loss]

    def loss(tokens: TrainedTokens) -> Loss:
        values = tokens.weight * values_of(tokens, command)
        count = values.new_full((), float(len(values)))
        ratios = torch.exp((tokens.logprobs - tokens.sampled).detach())
        known = 0.0 if command.loss in WITHOUT_RATIO else 1.0
        return Loss(values.sum(), count, {"ratio": (known * ratios.sum(), known * count)})

    return loss


def _cross_entropy(tokens: TrainedTokens, command: ForwardBackward) -> torch.Tensor:
    return -tokens.logprobs


def _importance_sampling(tokens: TrainedTokens, command: ForwardBackward) -> torch.Tensor:
    return -_ratio(tokens) * tokens.advantages


def _ppo(tokens: TrainedTokens, command: ForwardBackward) -> torch.Tensor:
    ratio = _ratio(tokens)
    bounded = ratio.clamp(1 - command.clip_low, 1 + command.clip_high)
    return -torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)


def _cispo(tokens: TrainedTokens, command: ForwardBackward) -> torch.Tensor:
    bounded = _ratio(tokens).clamp(1 - command.clip_low, 1 + command.clip_high)
    return -bounded.detach() * tokens.advantages * tokens.logprobs


def _linear(tokens: TrainedTokens, command: ForwardBackward) -> torch.Tensor:
    return tokens.advantages * tokens.logprobs  # the column holds the gradients


def _ratio(tokens: TrainedTokens) -> torch.Tensor:
    return torch.exp(tokens.logprobs - tokens.sampled)


LOSSES: dict[LossName, Callable[[TrainedTokens, ForwardBackward], torch.Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "linear": _linear,
}
WITHOUT_RATIO = ("cross_entropy", "linear")
