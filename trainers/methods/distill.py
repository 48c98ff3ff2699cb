"""On-policy distillation: a teacher judges every token that the student sampled.

For a token that the student sampled, with the log-probabilities of the student that the job starts
from (p_before) and of the teacher (q), the advantage is the negative reverse divergence

    A = log q - log p_before

and the loss is grpo's with that advantage: -w min(r A, clip(r) A), r = p / p_before, and so on.
Source: https://thinkingmachines.ai/blog/on-policy-distillation, as its authors publish it (tinker-
cookbook, distillation/train_on_policy.py, with kl_penalty_coef 1 and kl_discount_factor 0): a token
answers for itself alone, not for those that follow. The gradient at p = p_before is that of the
divergence KL(p || q) of the next token, estimated on the samples; it is MiniLLM's (arXiv
2306.08543) without the long-range term, and GKD's (arXiv 2306.13649) with beta 1 and student data,
estimated from one token in place of the whole vocabulary. Unlike there, p_before is the trainer's
own, as q is: numeric differences of the engine cancel, and `importance_cap` weighs them.
"""

from dataclasses import replace

from cray_agents.trainers.methods import grpo
from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.training_jobs import Hyperparameters


def loss(tokens: TrainedTokens, hyper: Hyperparameters) -> Loss:
    """Return grpo's loss with the teacher's advantages. Measures are grpo's and `reverse_kl`.

    `reverse_kl` estimates the divergence from the teacher, in nats per token: the mean of
    r (log p - log q), which is unbiased for the tokens after the prefixes that were sampled.
    """
    policy = grpo.loss(replace(tokens, advantages=tokens.teacher - tokens.before), hyper)
    now = tokens.logprobs.detach()
    ratio = (now - tokens.before).clamp(max=grpo.LARGEST_LOG_RATIO).exp()
    divergence = ratio * (now - tokens.teacher)
    number = divergence.new_full((), float(len(divergence)))
    measures = {**policy.measures, "reverse_kl": (divergence.sum(), number)}
    return replace(policy, measures=measures)
