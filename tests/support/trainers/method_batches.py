"""Answers as plain numpy arrays in float64, and the micro-batches that methods see of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.training_jobs import Hyperparameters, MethodName, Policy, Preference

Numbers = npt.NDArray[np.float64]
DRIFT = 0.3


@dataclass(frozen=True)
class Answer:
    """A sequence's marked tokens: what each policy gives them, all [tokens], and its own facts."""

    now: Numbers
    before: Numbers
    sampled: Numbers
    reference: Numbers
    teacher: Numbers
    entropy: Numbers
    advantage: float
    chosen: float
    weight: float


def answers(seed: int, lengths: Sequence[int]) -> list[Answer]:
    """Random ones; policies differ enough that clips act on many tokens. Desirable ones first."""
    random, of_teacher = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    made = []
    for place, length in enumerate(lengths):
        now = -random.exponential(1.5, length)
        before, sampled, reference = (now + random.normal(0, s, length) for s in (0.3, 0.5, 0.4))
        teacher = now + of_teacher.normal(0, 1, length)
        entropy = random.uniform(0, 3, length)
        facts = float(random.normal()), float(1 - place % 2), float(random.uniform(0.5, 2))
        made.append(Answer(now, before, sampled, reference, teacher, entropy, *facts))
    return made


def marked(
    batch: Sequence[Answer], fillers: int = 0, dtype: torch.dtype = torch.float64, **more: Any
) -> TrainedTokens:
    """The micro-batch, its log-probabilities a leaf; with sequences without tokens at its end."""

    def per_token(rows: list[Numbers]) -> torch.Tensor:
        return torch.tensor(np.concatenate([np.zeros(0), *rows]), dtype=dtype)

    return TrainedTokens(
        logprobs=per_token([a.now for a in batch]).requires_grad_(),
        sequence=torch.tensor([i for i, a in enumerate(batch) for _ in a.now], dtype=torch.int64),
        sequences=len(batch) + fillers,
        weight=per_token([np.full(len(a.now), a.weight) for a in batch]),
        advantages=per_token([np.full(len(a.now), a.advantage) for a in batch]),
        sampled=per_token([a.sampled for a in batch]),
        before=per_token([a.before for a in batch]),
        reference=per_token([a.reference for a in batch]),
        teacher=per_token([a.teacher for a in batch]),
        chosen=torch.tensor([a.chosen for a in batch] + [0.0] * fillers, dtype=dtype),
        drift=DRIFT,
        entropy=per_token([a.entropy for a in batch]),
        **more,
    )


def gradient(marked: TrainedTokens, loss: Loss) -> Numbers:
    """[n]: of the total, with respect to the log-probabilities."""
    (found,) = torch.autograd.grad(loss.total, marked.logprobs)
    return found.double().numpy()


def hyper(**options: Any) -> Hyperparameters:
    return Hyperparameters(**{"steps": 1, "learning_rate": 1e-3, **options})


Variant = tuple[MethodName, Hyperparameters]
VARIANTS: dict[str, Variant] = {
    "sft": ("sft", hyper()),
    "sft-weighed": ("sft", hyper(weigh_loss=True)),
    "dpo": ("dpo", hyper()),
    "dpo-smoothed": ("dpo", hyper(preference=Preference(beta=0.5, label_smoothing=0.2))),
    "kto": ("kto", hyper()),
    "kto-weighed": ("kto", hyper(preference=Preference(beta=0.5, desirable=1.3, undesirable=0.7))),
    "grpo": ("grpo", hyper()),
    "grpo-sequence": ("grpo", hyper(policy=Policy(normalization="sequence", kl=0.1))),
    "grpo-constant": ("grpo", hyper(policy=Policy(normalization="constant", constant=7))),
    "cispo": ("grpo", hyper(policy=Policy(objective="cispo", clip_low=1, kl=0.05))),
    "gspo": ("grpo", hyper(policy=Policy(objective="gspo", clip_low=0.05, clip_high=0.05))),
    "sequence-mask": ("grpo", hyper(policy=Policy(importance_mode="sequence_mask"))),
    "uncorrected": ("grpo", hyper(policy=Policy(importance_cap=None))),
    "distill": ("distill", hyper()),
    "distill-sequence": ("distill", hyper(policy=Policy(normalization="sequence", kl=0.1))),
}

batches = st.builds(
    answers,
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(lambda half: [*half, *half[::-1]]),
)
variants = st.sampled_from(sorted(VARIANTS)).map(VARIANTS.__getitem__)
