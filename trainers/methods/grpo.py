"""GRPO and its variants: importance ratios, clipped, times advantages (arXiv 2402.03300).

With r = p / p_before, the advantage A, the bounds [1 - clip_low, 1 + clip_high] and the weight
w = min(p_before / p_sampled, cap) that corrects the engine, the loss of a token is

    ppo    -w min(r A, clip(r) A)                              arXiv 1707.06347
           with dual_clip c, where A < 0:                      arXiv 1912.09729, equation 8
           -w max(min(r A, clip(r) A), c A)                    (verl: clip_ratio_c)
    gspo   the same, r being the geometric mean of r over      arXiv 2507.18071
           the token's sequence
    cispo  -w stop_gradient(clip(r)) A log p                   arXiv 2506.13585

plus kl (u - log u - 1) with u = p_reference / p: the k3 estimate of the divergence from the
reference. gspo is written as its paper's GSPO-token, which is GSPO in value and gradient where the
tokens of a sequence have the same advantage. w (truncated importance sampling,
https://fengyao.notion.site/off-policy-rl) has no gradient, and is of the token alone in all three.
"""

import torch

from cray_agents.trainers.methods.loss import Loss, Marked, per_sequence
from cray_agents.training_jobs import Hyperparameters, Policy

LARGEST_LOG_RATIO = 20.0  # of one token; a policy that came this far is lost anyway


def loss(marked: Marked, hyper: Hyperparameters) -> Loss:
    """The sum over tokens, and what the normalization divides by: tokens or sequences.

    Measures are means over tokens: `ratio` (p / p_before as the objective has it), `clip_fraction`
    (tokens whose gradient the clip took; cispo: whose weight it bounded), `kl_before` (k3, of
    p_before from p), `engine_ratio` (p_before / p_sampled), `engine_gap` (how far these are apart
    as logarithms), `kl` and `entropy` (where known).
    """
    policy = hyper.policy
    lengths = per_sequence(marked, torch.ones_like(marked.logprobs))
    ratio = _ratio(marked, policy, lengths)
    gain, clipped = _gain(marked, policy, ratio)
    engine = _exp(marked.before - marked.sampled)
    if policy.importance_cap is not None:
        gain = gain * engine.clamp(max=policy.importance_cap)
    values = -gain
    measures = {
        "ratio": ratio,
        "clip_fraction": clipped.to(ratio.dtype),
        "kl_before": _k3(marked.logprobs - marked.before),
        "engine_ratio": engine,
        "engine_gap": (marked.before - marked.sampled).abs(),
    }
    if policy.kl:
        measures["kl"] = _k3(marked.reference - marked.logprobs)
        values = values + policy.kl * measures["kl"]
    if marked.entropy is not None:
        measures["entropy"] = marked.entropy
    sums = {name: (x.detach().sum(), _number(x)) for name, x in measures.items()}
    return Loss(*_normalized(marked, policy, values, lengths), sums)


def _ratio(marked: Marked, policy: Policy, lengths: torch.Tensor) -> torch.Tensor:
    """[n]: the importance ratio p / p_before, of the token or (gspo) of its sequence."""
    logs = marked.logprobs - marked.before
    if policy.objective == "gspo":
        means = per_sequence(marked, logs.detach()) / lengths
        logs = means[marked.sequence] + (marked.logprobs - marked.logprobs.detach())
    return _exp(logs)


def _gain(marked: Marked, policy: Policy, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n]: what is maximised, and whether the clip took a token's gradient (cispo: bound it)."""
    bounded = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
    if policy.objective == "cispo":
        return bounded.detach() * marked.advantages * marked.logprobs, bounded != ratio
    free, held = ratio * marked.advantages, bounded * marked.advantages
    gain, clipped = torch.minimum(free, held), held < free
    if policy.dual_clip is not None:
        least = policy.dual_clip * marked.advantages
        beyond = (marked.advantages < 0) & (gain < least)
        gain, clipped = torch.where(beyond, least, gain), clipped | beyond
    return gain, clipped


def _normalized(
    marked: Marked, policy: Policy, values: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the values [n], and the tokens or the sequences (those with any) it is over.

    With context parallelism each rank sums its own tokens, and one of them counts the sequences.
    """
    by = policy.normalized_by
    if by == "token":
        return values.sum(), _number(values)
    share = lengths[marked.sequence] if by == "sequence" else policy.constant
    sequences = (lengths > 0).sum() * marked.counts
    return (values / share).sum(), sequences.to(values.dtype)


def _exp(logs: torch.Tensor) -> torch.Tensor:
    """Ratios that stay finite, also in their gradient, which is 0 where they are cut off."""
    return logs.clamp(max=LARGEST_LOG_RATIO).exp()


def _k3(logs: torch.Tensor) -> torch.Tensor:
    """u - log u - 1, given log u: never negative (http://joschu.net/blog/kl-approx.html)."""
    logs = logs.clamp(max=LARGEST_LOG_RATIO)
    return logs.expm1() - logs


def _number(values: torch.Tensor) -> torch.Tensor:
    return values.new_tensor(float(len(values)))
