"""distill against its formula by hand, tinker-cookbook's numbers, and the gradient of TRL's GKD."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.methods.loss import TrainedTokens
from cray_agents.training_jobs import Policy
from tests.support.trainers.method_batches import answers, gradient, hyper, marked

LENGTHS = [3, 5, 1, 6]


@pytest.mark.parametrize("cap", [2.0, None])
def test_value_gradient_and_divergence_are_the_formulas(cap: float | None) -> None:
    batch = answers(5, LENGTHS)
    given = marked(batch, fillers=1)
    loss = METHODS["distill"](given, hyper(policy=Policy(importance_cap=cap)))
    value, divergence, slopes = 0.0, 0.0, []
    for answer in batch:
        columns = (answer.now, answer.before, answer.sampled, answer.teacher)
        for now, before, sampled, teacher in zip(*columns, strict=True):
            ratio, advantage = math.exp(now - before), teacher - before
            weight = 1.0 if cap is None else min(math.exp(before - sampled), cap)
            bounded = min(max(ratio, 0.8), 1.2)
            free = ratio * advantage <= bounded * advantage
            value -= weight * (ratio if free else bounded) * advantage
            slopes.append(-weight * ratio * advantage if free else 0.0)
            divergence += ratio * (now - teacher)
    count = sum(LENGTHS)
    assert loss.count.item() == count
    assert loss.total.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient(given, loss), slopes, rtol=1e-10, atol=1e-15)
    assert 0 < slopes.count(0.0) < count, "some tokens are clipped, and not all"
    total, number = loss.measures["reverse_kl"]
    assert total.item() == pytest.approx(divergence, rel=1e-12)
    assert number.item() == count


# What tinker-cookbook 0.6.1 gives for these samples: its incorporate_kl_penalty, run once with
# kl_penalty_coef 1 and kl_discount_factor 0, gave this mean `teacher_kl` and the advantages 0.25,
# -1.75, -0.375, 1.625, -0.125. With these, its default loss importance_sampling, as Tinker's
# documents state it, is -sum(exp(now - sampled) advantages); the slopes are its derivatives.
SAMPLED = [-0.5, -1.25, -0.125, -2.0, -0.75]  # of a sample of three tokens, and one of two
TEACHER = [-0.25, -3.0, -0.5, -0.375, -0.875]
NOW = [-0.625, -1.0, -0.25, -1.5, -1.0]
COOKBOOK_KL = 0.075
COOKBOOK_LOSS = -0.22446537497716124
COOKBOOK_SLOPES = [-0.2206242256, 2.2470444792, 0.3309363385, -2.6791720649, 0.0973500979]


def tokens(now: torch.Tensor, before: Any, teacher: Any) -> TrainedTokens:
    """Tokens sampled by an engine that computes as the trainer does."""

    def row(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64)

    zeros = torch.zeros(len(now), dtype=torch.float64)
    return TrainedTokens(
        logprobs=now,
        sequence=torch.zeros(len(now), dtype=torch.int64),
        sequences=1,
        weight=zeros,
        advantages=zeros,
        sampled=row(before),
        before=row(before),
        reference=zeros,
        teacher=row(teacher),
        chosen=torch.zeros(1, dtype=torch.float64),
    )


def test_the_numbers_are_those_of_tinker_cookbook() -> None:
    now = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    given = tokens(now, SAMPLED, TEACHER)
    unclipped = Policy(clip_low=1, clip_high=1e6)
    loss = METHODS["distill"](given, hyper(policy=unclipped))
    assert loss.total.item() == pytest.approx(COOKBOOK_LOSS, rel=1e-6)
    np.testing.assert_allclose(gradient(given, loss), COOKBOOK_SLOPES, rtol=1e-6)
    at_the_start = tokens(given.sampled.clone().requires_grad_(), given.sampled, given.teacher)
    total, number = METHODS["distill"](at_the_start, hyper()).measures["reverse_kl"]
    assert (total / number).item() == pytest.approx(COOKBOOK_KL, rel=1e-6)


@pytest.mark.slow
def test_the_expected_gradient_is_that_of_the_exact_divergence() -> None:
    """Over all tokens that might be drawn: KL(student || teacher), as TRL's GKD computes it."""
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(3)
    student = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 9, dtype=torch.float64)
    exact = GKDTrainer.generalized_jsd_loss(student, teacher, beta=1, reduction="sum")
    (expected,) = torch.autograd.grad(exact, student)

    now, q = student.log_softmax(-1), teacher.log_softmax(-1)
    total, divergence = torch.zeros((), dtype=torch.float64), 0.0
    for place in range(4):
        for token in range(9):
            log = now[place, token]
            given = tokens(log[None], [log.item()], [q[place, token].item()])
            loss = METHODS["distill"](given, hyper())
            total = total + log.detach().exp() * loss.total
            divergence += (log.exp() * loss.measures["reverse_kl"][0]).item()
    (found,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert divergence == pytest.approx(exact.item(), rel=1e-12)
