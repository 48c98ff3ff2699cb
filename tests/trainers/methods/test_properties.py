"""Properties of every method, for any batch."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.trainers.methods import METHODS
from tests.support.trainers.method_batches import (
    VARIANTS,
    Answer,
    Numbers,
    Variant,
    answers,
    batches,
    gradient,
    marked,
    variants,
)

Totals = dict[str, float]


def units(variant: Variant, batch: list[Answer]) -> list[list[Answer]]:
    """What stays together: pairs, or each answer alone."""
    size = 2 if variant[0] == "dpo" else 1
    return [batch[i : i + size] for i in range(0, len(batch), size)]


def worked(variant: Variant, batch: list[Answer], fillers: int = 0) -> tuple[Totals, Numbers]:
    """Every sum that the method gives back, and the gradient token by token."""
    method, hyper = variant
    given = marked(batch, fillers)
    loss = METHODS[method](given, hyper)
    sums = {"total": loss.total.item(), "count": loss.count.item()}
    for name, (value, count) in loss.measures.items():
        assert not value.requires_grad, name
        sums |= {name: value.item(), f"{name} of": count.item()}
    return sums, gradient(given, loss)


def close(one: Totals, other: Totals) -> None:
    assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=150)
@given(batches, variants, st.randoms(use_true_random=False), st.integers(0, 1))
def test_the_order_of_sequences_and_a_filler_change_nothing(
    batch: list[Answer], variant: Variant, random: Random, fillers: int
) -> None:
    ordered = units(variant, batch)
    mixed = list(range(len(ordered)))
    random.shuffle(mixed)
    sums, slopes = worked(variant, batch)
    mixed_sums, mixed_slopes = worked(variant, [a for i in mixed for a in ordered[i]], fillers)
    close(sums, mixed_sums)
    bounds = np.cumsum([0] + [sum(len(a.now) for a in unit) for unit in ordered])
    expected = [slopes[bounds[i] : bounds[i + 1]] for i in mixed]
    np.testing.assert_allclose(mixed_slopes, np.concatenate(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=150)
@given(batches, variants, st.data())
def test_microbatches_add_up_to_the_batch(
    batch: list[Answer], variant: Variant, data: st.DataObject
) -> None:
    whole = units(variant, batch)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    expected, slopes = worked(variant, batch)
    added, parts = dict.fromkeys(expected, 0.0), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        part = [a for unit in whole[start:end] for a in unit]
        sums, part_slopes = worked(variant, part, fillers=data.draw(st.integers(not part, 1)))
        added = {name: added[name] + sums[name] for name in added}
        parts.append(part_slopes)
    close(added, expected)
    np.testing.assert_allclose(np.concatenate(parts), slopes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_micro_batch_of_filler_counts_for_nothing_and_has_a_gradient(name: str) -> None:
    sums, slopes = worked(VARIANTS[name], [], fillers=1)
    assert set(sums.values()) == {0.0}
    assert slopes.shape == (0,)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [1e2, 1e5, 1e30])
def test_far_apart_policies_stay_finite(name: str, size: float) -> None:
    method, hyper = VARIANTS[name]
    far = []
    for shift in (size, -size):
        for a in answers(3, [2, 3]):
            far.append(replace(a, reference=a.now + shift))
            far.append(replace(a, before=a.now + shift))
            far.append(replace(a, sampled=a.now + shift))
            far.append(replace(a, teacher=a.now + shift))
    far += [replace(a, now=a.now - size) for a in far]
    far += [replace(a, advantage=-a.advantage) for a in far]
    far += [replace(a, advantage=0.0) for a in far]
    given = marked(far, dtype=torch.float32)
    loss = METHODS[method](given, hyper)
    assert torch.isfinite(loss.total)
    assert np.isfinite(gradient(given, loss)).all()
    for value, _ in loss.measures.values():
        assert torch.isfinite(value)


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_is_enough(name: str) -> None:
    method, hyper = VARIANTS[name]
    batch = answers(5, [200, 300, 50, 120])
    exact, rounded = marked(batch), marked(batch, dtype=torch.float32)
    losses = METHODS[method](exact, hyper), METHODS[method](rounded, hyper)
    assert losses[1].total.item() == pytest.approx(losses[0].total.item(), rel=1e-4, abs=1e-4)
    slopes = gradient(exact, losses[0]), gradient(rounded, losses[1])
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-4, atol=1e-6)
