"""GRPO and its variants: importance ratios, clipped, times advantages (arXiv 2402.03300).

With r = p / p_before, the advantage A, the bounds [1 - clip_low, 1 + clip_high] and a weight w that
corrects the engine, the loss of a token is

    ppo    -w min(r A, clip(r) A)                              arXiv 1707.06347
           with dual_clip c, where A < 0:                      arXiv 1912.09729, equation 8
           -w max(min(r A, clip(r) A), c A)                    (verl: clip_ratio_c)
    gspo   the same, r being the geometric mean of r over      arXiv 2507.18071
           the token's sequence
    cispo  -w stop_gradient(clip(r)) A log p                   arXiv 2506.13585

plus kl (u - log u - 1) with u = p_reference / p: the k3 estimate of the divergence from the
reference. gspo is its paper's GSPO-token, which has GSPO's value and gradient if the tokens of a
sequence have equal advantages.

w has no gradient. With v = p_before / p_sampled of the token, and V their product over the tokens
of its sequence, importance_mode is

    token_truncate     w = min(v, cap)                  Yao et al. 2025, "Your Efficient RL
                                                        Framework Secretly Brings You Off-Policy
                                                        RL Training" (TIS)
    sequence_truncate  w = min(V, cap)                  Liu et al. 2025, "When Speed Kills
    sequence_mask      w = V if V <= cap else 0         Stability" (sequence-level TIS and MIS)
    token_mask         w = v if v <= cap else 0         the same rule for one token
"""

import torch

from cray_agents.trainers.methods.loss import Loss, TrainedTokens, per_sequence
from cray_agents.training_jobs import Hyperparameters, Policy

LARGEST_LOG_RATIO = 20.0  # of one token; a policy with larger ratios is beyond repair


def loss(tokens: TrainedTokens, hyper: Hyperparameters) -> Loss:
    """Return the loss summed over tokens, and its divisor: the number of tokens or sequences.

    Measures are means over tokens: `ratio` (p / p_before in the objective's form), `clip_fraction`
    (tokens whose gradient the clip removed; cispo: whose weight it bounded), `kl_before` (k3, of
    p_before from p), `engine_ratio` (p_before / p_sampled), `engine_gap` (the distance of their
    logarithms), `engine_kl` (k3, of p_before from p_sampled), `engine_clip_fraction` (tokens whose
    weight the cap changed), and `kl` and `entropy` if they are computed.
    """
    policy = hyper.policy
    lengths = per_sequence(tokens, torch.ones_like(tokens.logprobs))
    ratio = _ratio(tokens, policy, lengths)
    gain, clipped = _gain(tokens, policy, ratio)
    weight, bounded = _engine_weight(tokens, policy)
    gaps = tokens.before - tokens.sampled
    values = -gain * weight
    measures = {
        "ratio": ratio,
        "clip_fraction": clipped.to(ratio.dtype),
        "kl_before": _k3(tokens.logprobs - tokens.before),
        "engine_ratio": _exp(gaps),
        "engine_gap": gaps.abs(),
        "engine_kl": _k3(gaps),
        "engine_clip_fraction": bounded.to(ratio.dtype),
    }
    if policy.kl:
        measures["kl"] = _k3(tokens.reference - tokens.logprobs)
        values = values + policy.kl * measures["kl"]
    if tokens.entropy is not None:
        measures["entropy"] = tokens.entropy
    sums = {name: (x.detach().sum(), _number(x)) for name, x in measures.items()}
    return Loss(*_normalize(tokens, policy, values, lengths), sums)


def _ratio(tokens: TrainedTokens, policy: Policy, lengths: torch.Tensor) -> torch.Tensor:
    """Return [n]: the importance ratio p / p_before, of the token or (gspo) of its sequence."""
    logs = tokens.logprobs - tokens.before
    if policy.objective == "gspo":
        means = per_sequence(tokens, logs.detach()) / lengths
        logs = means[tokens.sequence] + (tokens.logprobs - tokens.logprobs.detach())
    return _exp(logs)


def _engine_weight(tokens: TrainedTokens, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight w [n] that corrects the engine, and a mask [n] of where the cap acts."""
    logs, cap = tokens.before - tokens.sampled, policy.importance_cap
    if cap is None:
        return torch.ones_like(logs), torch.zeros_like(logs, dtype=torch.bool)
    if policy.importance_mode.startswith("sequence"):
        logs = per_sequence(tokens, logs)[tokens.sequence]
    weight = _exp(logs)
    beyond = weight > cap
    return weight.masked_fill(beyond, 0 if policy.importance_mode.endswith("mask") else cap), beyond


def _gain(
    tokens: TrainedTokens, policy: Policy, ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the objective [n], and a mask [n] of tokens whose gradient the clip removed.

    For cispo the mask marks tokens whose weight the clip bounded.
    """
    bounded = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    if policy.objective == "cispo":
        return bounded.detach() * tokens.advantages * tokens.logprobs, bounded != ratio
    free, within = ratio * tokens.advantages, bounded * tokens.advantages
    gain, clipped = torch.minimum(free, within), within < free
    if policy.dual_clip is not None:
        least = policy.dual_clip * tokens.advantages
        beyond = (tokens.advantages < 0) & (gain < least)
        gain, clipped = torch.where(beyond, least, gain), clipped | beyond
    return gain, clipped


def _normalize(
    tokens: TrainedTokens, policy: Policy, values: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the values [n], and the number of tokens or of sequences with tokens.

    With context parallelism each rank sums its own tokens, and one rank counts the sequences.
    """
    by = policy.normalized_by
    if by == "token":
        return values.sum(), _number(values)
    share = lengths[tokens.sequence] if by == "sequence" else policy.constant
    sequences = (lengths > 0).sum() * tokens.counts
    return (values / share).sum(), sequences.to(values.dtype)


def _exp(logs: torch.Tensor) -> torch.Tensor:
    """Return ratios that stay finite; a ratio at the limit has a gradient of 0."""
    return logs.clamp(max=LARGEST_LOG_RATIO).exp()


def _k3(logs: torch.Tensor) -> torch.Tensor:
    """Return u - log u - 1 for log u; never negative (http://joschu.net/blog/kl-approx.html)."""
    logs = logs.clamp(max=LARGEST_LOG_RATIO)
    return logs.expm1() - logs


def _number(values: torch.Tensor) -> torch.Tensor:
    return values.new_full((), float(len(values)))
