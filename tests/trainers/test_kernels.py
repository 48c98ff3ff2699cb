"""Our kernels against their formulas in float64, and their gradients against differences."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.trainers.models import kernels
from cray_agents.trainers.models.attention import PackedAttention, packed_sequences


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rms_norm() -> None:
    x, weight = numbers(5, 2, 6), numbers(6)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda x, w: kernels.rms_norm(x, w, 1e-3), (x, weight))


def test_rms_norm_of_zeros_has_a_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    kernels.rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_rotation() -> None:
    """Each pair (i, i + half) of a head, as a complex number, times e^(i angle)."""
    x, angles = numbers(5, 2, 8), numbers(5, 1, 4).detach()
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    both = torch.cat([angles, angles], -1)
    turned = kernels.rotate(x, both.cos(), both.sin())
    torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag], -1))
    assert torch.autograd.gradcheck(lambda y: kernels.rotate(y, both.cos(), both.sin()), x)


def test_swiglu() -> None:
    x = numbers(5, 1, 8)
    gate, up = x[..., :4], x[..., 4:]
    torch.testing.assert_close(kernels.swiglu(x), gate * gate.sigmoid() * up)
    assert torch.autograd.gradcheck(kernels.swiglu, x)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[6, 6, 6], [3, 1, 9, 9, 2], [12]], ids=str)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_stays_within_its_sequence(lengths: list[int], groups: int) -> None:
    config = SimpleNamespace(num_attention_heads=4, num_query_groups=groups)
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    attention = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=alone))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    query, key, value = (numbers(sum(lengths), heads, 8) for heads in (4, groups, groups))
    packed = packed_sequences(bounds.numpy(), bounds.device)
    found = attention(query, key, value, packed_seq_params=packed)
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    for start, end in pairwise(bounds.tolist()):
        seen[start:end, start:end] = torch.ones(end - start, end - start).tril()
    each = 4 // groups
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(each, 1)) / 8**0.5
    chances = F.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    expected = torch.einsum("hqk,khd->qhd", chances, value.repeat_interleave(each, 1)).flatten(1)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    given = torch.autograd.grad((found * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(given, wanted)
