"""Layouts: which fit a model, which is proposed instead, which is chosen."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.layouts import (
    Choice,
    LayoutQuestion,
    check_layout,
    choose_layout,
    possible_layouts,
    why_unfit,
)
from cray_agents.trainers.planning.step_time import find_gpu
from cray_agents.training_jobs import Layout, Lora
from tests.support.trainers.model_configs import (
    LLAMA_2_70B,
    LLAMA_31_8B,
    LLAMA_31_405B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    SMALL,
    hyper,
    written,
)


@pytest.fixture
def llama8(tmp_path: Path) -> Architecture:
    return written(tmp_path, LLAMA_31_8B)


@pytest.fixture
def llama70(tmp_path: Path) -> Architecture:
    return written(tmp_path, LLAMA_2_70B | {"vocab_size": 128256})


@pytest.fixture
def mixture(tmp_path: Path) -> Architecture:
    return written(tmp_path, QWEN3_30B_A3B)


def choose(
    model: Architecture, ranks: int, gib: float = 79, tokens: int = 4096, **more: Any
) -> Choice:
    sizes = hyper(max_tokens_per_microbatch=tokens, **more)
    return choose_layout(LayoutQuestion(model, sizes, ranks, gib, 8, tokens))


# ---- what fits
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tensor": 3}, "does not divide its 32 attention heads"),
        ({"tensor": 16}, "does not divide its 8 key-value heads"),
        ({"interleave": 2}, "interleave=2 needs pipeline > 1"),
        ({"pipeline": 4, "interleave": 9}, "pipeline=4 times interleave=9 are more chunks than"),
        (
            {"data": 4, "optimizer_instances": 3},
            "optimizer_instances=3 does not divide the 4 ranks",
        ),
        ({"data": 2, "expert": 2}, "it has no experts"),
        ({"sequence_parallel": True}, "no effect with tensor=1"),
    ],
)
def test_what_does_not_fit_is_told(
    llama8: Architecture, layout: dict[str, int], reason: str
) -> None:
    assert reason in str(why_unfit(llama8, Layout(**layout)))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"expert": 3, "data": 3}, "expert=3 does not divide its 128 experts"),
        ({"expert": 4, "data": 2}, "expert=4 does not divide the 2 ranks it lives in"),
        ({"tensor": 2}, "experts with tensor>1 need sequence_parallel=true"),
        ({"data": 4, "expert": 4, "optimizer_instances": 2}, "the 1 ranks of an expert that share"),
    ],
)
def test_what_does_not_fit_experts_is_told(
    mixture: Architecture, layout: dict[str, int], reason: str
) -> None:
    assert reason in str(why_unfit(mixture, Layout(**layout)))


def test_experts_live_in_data_and_context_ranks(mixture: Architecture) -> None:
    assert why_unfit(mixture, Layout(data=2, context=2, expert=4)) is None


@pytest.mark.parametrize(
    ("layers", "pipeline", "interleave", "expected"),
    [
        (94, 4, 1, [23, 24, 24, 23]),
        (94, 8, 1, [11, *[12] * 6, 11]),
        (94, 16, 1, [5, *[6] * 14, 5]),
        (126, 4, 1, [31, 32, 32, 31]),
        (126, 8, 1, [15, *[16] * 6, 15]),
        (126, 16, 1, [7, *[8] * 14, 7]),
        (94, 8, 4, [11, *[12] * 6, 11]),
        (61, 4, 1, [15, 15, 16, 15]),
        (32, 4, 2, [8, 8, 8, 8]),
        (7, 4, 1, [2, 2, 2, 1]),
    ],
)
def test_stages_need_not_be_equal(
    layers: int, pipeline: int, interleave: int, expected: list[int]
) -> None:
    """The first and the last, with the embedding and the loss, have the fewest layers."""
    layout = Layout(pipeline=pipeline, interleave=interleave)
    assert list(layout.stage_layers(layers)) == expected
    chunks = layout.chunk_layers(layers)
    assert (sum(chunks), len(chunks)) == (layers, pipeline * interleave)
    assert max(chunks) - min(chunks) <= 1 and min(chunks) == chunks[-1] > 0


def proposals(error: str) -> list[Layout]:
    """The layouts that an error names, as a user would type them in."""
    found = []
    for text in error.split("these fit: ")[1].split("; "):
        fields = re.findall(r"(\w+)=(\w+)", text)
        found.append(Layout(**{name: json.loads(value) for name, value in fields}))
    return found


def test_the_error_proposes_layouts_that_fit_the_nearest_first(llama8: Architecture) -> None:
    asked = Layout(data=2, tensor=16)
    with pytest.raises(BadInput) as caught:
        check_layout(llama8, asked)
    found = proposals(str(caught.value))
    assert caught.value.param == "layout"
    assert found[0] == Layout(data=4, tensor=8, sequence_parallel=True)
    assert len(found) > 3
    for layout in found:
        assert layout.world == 32
        assert why_unfit(llama8, layout) is None


def test_a_layout_that_fits_is_let_through(llama8: Architecture) -> None:
    check_layout(llama8, Layout(data=2, tensor=4, pipeline=2, interleave=4, context=2))
    check_layout(llama8, Layout(pipeline=5, interleave=3, data=4, optimizer_instances=2))


@given(world=st.integers(1, 48), layers=st.integers(1, 16), kv=st.sampled_from([1, 2, 4, 8]))
def test_possible_layouts_have_the_world_asked_for(world: int, layers: int, kv: int) -> None:
    model = replace(SMALL, layers=layers, kv_heads=kv)
    found = list(possible_layouts(model, world))
    assert Layout(data=world) in found
    assert len({layout.model_dump_json() for layout in found}) == len(found)
    assert all(layout.world == world and why_unfit(model, layout) is None for layout in found)


# ---- what is chosen
def test_what_fits_a_rank_is_not_split(llama8: Architecture) -> None:
    choice = choose(llama8, 8, gib=140)
    assert (choice.layout, choice.recompute, choice.fits) == (Layout(data=8), "none", True)
    assert any("holds the whole model" in reason for reason in choice.reasons)


def test_what_does_not_is_split_within_the_node_first(llama8: Architecture) -> None:
    choice = choose(llama8, 8)
    assert choice.layout == Layout(data=4, tensor=2, sequence_parallel=True)
    text = "\n".join(choice.reasons)
    assert f"{choice.memory.gib:.1f} GiB" in text
    assert "tensor=2:" in text
    assert "data=4:" in text


def test_a_model_larger_than_a_node_gets_a_pipeline(llama70: Architecture) -> None:
    layout = choose(llama70, 32).layout
    assert (layout.tensor, layout.pipeline, layout.data) == (8, 2, 2)


def test_long_sequences_are_split_over_context_ranks(llama70: Architecture) -> None:
    layout = choose(llama70, 64, tokens=131072, batch_size=4, gib=140).layout
    assert (layout.tensor, layout.context, layout.data) == (8, 8, 1)
    short = choose(llama70, 64, gib=140).ranking
    assert all(candidate.layout.context == 1 for candidate in short)


def test_a_mixture_splits_its_experts_first(mixture: Architecture) -> None:
    layout = choose(mixture, 8, gib=140).layout
    assert (layout.data, layout.expert, layout.tensor, layout.pipeline) == (8, 4, 1, 1)


def test_where_nothing_fits_the_smallest_is_chosen_and_said(llama70: Architecture) -> None:
    choice = choose(llama70, 8)
    assert not choice.fits
    assert choice.memory.total == min(c.memory.total for c in choice.ranking)
    assert "nothing fits" in choice.reasons[1]
    assert f"{choice.memory.gib:.1f} GiB" in choice.reasons[1]


def test_activations_are_recomputed_only_where_they_must(llama8: Architecture) -> None:
    alone = choose(llama8, 1, gib=79, tokens=32768, lora=Lora())
    assert (alone.recompute, alone.fits) == ("full", True)
    assert any("activations are computed again" in reason for reason in alone.reasons)
    half = choose(llama8, 1, gib=79, tokens=16384, lora=Lora())
    assert (half.recompute, half.fits) == ("mlp", True)
    assert any("feed-forward layers are computed again" in reason for reason in half.reasons)
    assert choose(llama8, 1, gib=79, tokens=2048, lora=Lora()).recompute == "none"


def test_a_small_batch_is_not_spread_over_more_data_ranks_than_it_feeds(
    llama8: Architecture,
) -> None:
    choice = choose(llama8, 64, gib=140, batch_size=8)
    assert choice.layout.data == 8
    assert any("batch is too small for data=64" in reason for reason in choice.reasons)


# ---- models that need all of it
@pytest.mark.parametrize(
    ("config", "gpu", "layers"), [(LLAMA_31_405B, "H200", 126), (QWEN3_235B_A22B, "H100", 94)]
)
def test_very_large_models_fit_64_gpus(
    tmp_path: Path, config: dict[str, Any], gpu: str, layers: int
) -> None:
    model = written(tmp_path, config)
    choice = choose(model, 64, gib=find_gpu(gpu).gib)
    layout = choice.layout
    assert choice.fits and layout.world == 64
    assert why_unfit(model, layout) is None
    assert sum(layout.stage_layers(layers)) == layers and layers % layout.pipeline
    assert choice.memory.gib < 0.9 * find_gpu(gpu).gib
