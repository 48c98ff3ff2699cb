"""The same figures as TRL's trainers, whose own loss methods are given the same log-probabilities.

The trainers are made without their constructors, which want models and data sets, and read the
log-probabilities from what stands where their model would be.
"""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.methods.loss import Loss
from cray_agents.training_jobs import Policy, Preference
from tests.support.trainers.method_batches import (
    DRIFT,
    Answer,
    Numbers,
    answers,
    gradient,
    hyper,
    marked,
)

LENGTHS = [3, 5, 1, 6, 2, 4]
PREFERENCE = Preference(beta=0.4, desirable=1.3, undesirable=0.7)


def trainer_of(kind: type, **attributes: Any) -> Any:
    made: Any = object.__new__(kind)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        is_main_process=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    vars(made).update(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )
    return made


def metrics_of(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def padded(rows: Sequence[Numbers]) -> torch.Tensor:
    """[answers, longest], zeros behind."""
    longest = max(map(len, rows))
    return torch.tensor(np.array([np.pad(row, (0, longest - len(row))) for row in rows]))


class Known:
    """Stands for TRL's model: the next of the given log-probabilities, [answers, tokens]."""

    def __init__(self, *found: torch.Tensor) -> None:
        self.found = list(found)

    def __call__(self, **inputs: Any) -> Any:
        logprobs = self.found.pop(0)
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )


def tokens_of(batch: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """A prompt of one token before each answer."""
    mask = torch.nn.functional.pad(padded([np.ones(len(a.now)) for a in batch]), (1, 0))
    ones = torch.ones_like(mask, dtype=torch.int64)
    return {"input_ids": ones, "attention_mask": ones, "completion_mask": mask.long()}


def assert_same(
    batch: Sequence[Answer], loss: Loss, given: Any, theirs: torch.Tensor, now: torch.Tensor
) -> None:
    """Loss and gradient; `now` is what theirs is differentiated by, [answers, longest]."""
    assert loss.total.item() / loss.count.item() == pytest.approx(theirs.item(), rel=1e-9)
    (slopes,) = torch.autograd.grad(theirs, now)
    flat = np.concatenate([slopes[i, : len(a.now)].numpy() for i, a in enumerate(batch)])
    ours = gradient(given, loss) / loss.count.item()
    np.testing.assert_allclose(ours, flat, rtol=1e-6, atol=1e-9)


def trl_dpo(pairs: Sequence[Answer], kind: str, smoothing: float) -> tuple[Any, Any, torch.Tensor]:
    from trl import DPOTrainer

    batch = [*pairs[::2], *pairs[1::2]]
    now = padded([a.now for a in batch]).requires_grad_()
    reference = torch.tensor([a.reference.sum() for a in batch])
    half = len(batch) // 2
    inputs = tokens_of(batch)
    inputs |= {"ref_chosen_logps": reference[:half], "ref_rejected_logps": reference[half:]}
    trainer = trainer_of(
        DPOTrainer,
        beta=PREFERENCE.beta,
        label_smoothing=smoothing,
        loss_types=[kind],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        ld_alpha=None,
        use_weighting=False,
    )
    return trainer, trainer.compute_loss(Known(now), inputs), now


@pytest.mark.slow
def test_dpo() -> None:
    batch = answers(31, LENGTHS)
    given = marked(batch)
    loss = METHODS["dpo"](given, hyper(preference=PREFERENCE))
    trainer, theirs, now = trl_dpo(batch, "sigmoid", 0.0)
    order = [0, 3, 1, 4, 2, 5]  # back from chosen, then rejected
    (slopes,) = torch.autograd.grad(theirs, now)
    flat = [slopes[order[i], : len(a.now)].numpy() for i, a in enumerate(batch)]
    assert loss.total.item() / 3 == pytest.approx(theirs.item(), rel=1e-6)
    np.testing.assert_allclose(gradient(given, loss) / 3, np.concatenate(flat), rtol=1e-6)
    metrics = metrics_of(trainer)
    names = {
        "reward_margin": "rewards/margins",
        "accuracy": "rewards/accuracies",
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
    }
    for ours, name in names.items():
        value, count = loss.measures[ours]
        assert (value / count).item() == pytest.approx(metrics[name], rel=1e-6), ours


def test_dpo_with_label_smoothing() -> None:
    """TRL smooths labels as cDPO does in its "aot" loss only, which of one pair is the same."""
    options = PREFERENCE.model_copy(update={"label_smoothing": 0.2})
    for seed in range(3):
        pair = answers(seed, [4, 2])
        given = marked(pair)
        loss = METHODS["dpo"](given, hyper(preference=options))
        _, theirs, now = trl_dpo(pair, "aot", 0.2)
        assert_same(pair, loss, given, theirs, now)


def test_kto() -> None:
    from trl import KTOTrainer

    batch = answers(32, LENGTHS)
    now = padded([a.now for a in batch]).requires_grad_()
    trainer = trainer_of(
        KTOTrainer,
        beta=PREFERENCE.beta,
        desirable_weight=PREFERENCE.desirable,
        undesirable_weight=PREFERENCE.undesirable,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
    )
    mismatched = torch.full((len(batch), 2), DRIFT / 2, dtype=torch.float64)
    inputs = tokens_of(batch)
    inputs |= {f"KL_{name}": values[:, :3] for name, values in inputs.items()}
    inputs |= {
        "label": torch.tensor([a.chosen > 0 for a in batch]),
        "ref_logps": torch.tensor([a.reference.sum() for a in batch]),
        "ref_KL_logps": torch.zeros(len(batch), dtype=torch.float64),
    }
    theirs = trainer.compute_loss(Known(mismatched, now), inputs)
    given = marked(batch)
    loss = METHODS["kto"](given, hyper(preference=PREFERENCE))
    assert_same(batch, loss, given, theirs, now)
    metrics = metrics_of(trainer)
    names = {
        "drift": "kl",
        "desirable_reward": "rewards/chosen",
        "undesirable_reward": "rewards/rejected",
    }
    for ours, name in names.items():
        value, count = loss.measures[ours]
        assert (value / count).item() == pytest.approx(metrics[name], rel=1e-6), ours


POLICIES = {
    "grpo": ("grpo", "token", Policy(normalization="sequence")),
    "grpo-kl": ("grpo", "token", Policy(normalization="sequence", kl=0.1, clip_high=0.28)),
    "dapo": ("dapo", "token", Policy(clip_high=0.28)),
    "dapo-uncorrected": ("dapo", "token", Policy(importance_cap=None)),
    "dr_grpo": ("dr_grpo", "token", Policy(normalization="constant", constant=9)),
    "cispo": ("cispo", "token", Policy(objective="cispo", clip_low=1, clip_high=0.3)),
    "gspo": (
        "grpo",
        "sequence",
        Policy(objective="gspo", clip_low=0.05, clip_high=0.08, importance_cap=None),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_grpo(name: str) -> None:
    from trl import GRPOTrainer

    kind, level, policy = POLICIES[name]
    batch = answers(33, LENGTHS)
    now = padded([a.now for a in batch]).requires_grad_()
    before, sampled, reference, entropy = (
        padded([getattr(a, column) for a in batch])
        for column in ("before", "sampled", "reference", "entropy")
    )
    mask = padded([np.ones(len(a.now)) for a in batch])
    cap = policy.importance_cap
    above = {"cispo": 1.0}.get(kind, 0.0)  # there the bound itself, not its distance from 1
    trainer = trainer_of(
        GRPOTrainer,
        loss_type=kind,
        importance_sampling_level=level,
        epsilon_low=policy.clip_low,
        epsilon_high=above + policy.clip_high,
        beta=policy.kl,
        max_completion_length=policy.constant,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, entropy, None),
    )
    theirs = trainer.compute_loss(
        trainer.model,
        {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": torch.tensor([a.advantage for a in batch], dtype=torch.float64),
            "old_per_token_logps": before,
            "ref_per_token_logps": reference,
            "importance_sampling_ratio": torch.clamp(torch.exp(before - sampled), max=cap or 1.0),
            "num_items_in_batch": mask.sum(),
        },
    )
    given = marked(batch)
    loss = METHODS["grpo"](given, hyper(policy=policy))
    assert_same(batch, loss, given, theirs, now)
    metrics = metrics_of(trainer)
    names = {"entropy": "entropy"}
    names |= {"kl": "kl"} if policy.kl else {}
    if policy.objective == "ppo":  # of gspo TRL counts sequences, and of cispo only A > 0
        names["clip_fraction"] = "clip_ratio/region_mean"
    for ours, theirs_name in names.items():
        value, count = loss.measures[ours]
        assert (value / count).item() == pytest.approx(metrics[theirs_name], rel=1e-6), ours
