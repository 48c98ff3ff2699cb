"""The memory that is estimated: its formulas, how it grows, and what Megatron really holds."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.trainers.models.architecture import MOST_LOGITS, read_architecture
from cray_agents.trainers.planning.arithmetic import (
    count_weights,
    estimate_memory,
    in_flight,
    layer_activations,
    weight_share,
)
from cray_agents.trainers.planning.layouts import possible_layouts, why_unfit
from cray_agents.training_jobs import JobSpec, Layout, Lora
from tests.support.trainers.forked_ranks import run_forked
from tests.support.trainers.model_configs import LLAMA_2_7B, LLAMA_31_8B, SMALL, hyper, written


def test_a_layer_keeps_what_the_paper_says(tmp_path: Path) -> None:
    """arXiv 2205.05198: 34 s b h a layer, 10 + 24 / t of it; 2 h of it are dropout masks.

    Its gelu layer of 4 h keeps 16 h bytes, as does a gated one of 8 h / 3.
    """
    sizes = {"hidden_size": 3072, "intermediate_size": 8192}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24}
    model = written(tmp_path, LLAMA_2_7B | sizes | heads)
    assert layer_activations(model, Layout(), 2) == 32 * 3072
    assert layer_activations(model, Layout(tensor=4), 2) == (8 + 24 / 4) * 3072
    assert layer_activations(model, Layout(tensor=4, sequence_parallel=True), 2) == 32 / 4 * 3072


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages() -> None:
    assert in_flight(Layout(pipeline=4), 16) == 4
    assert in_flight(Layout(pipeline=4), 2) == 2
    assert in_flight(Layout(pipeline=4, interleave=2), 16) == 4 * (1 + 3 / 8)
    assert in_flight(Layout(pipeline=4), 16, stage=3) == 1
    assert in_flight(Layout(pipeline=4, interleave=2), 16, stage=3) == (1 * 4 + 1) / 2


def test_logits_in_chunks_are_not_held_at_once(tmp_path: Path) -> None:
    """On GPUs at most MOST_LOGITS are held, with a gradient of the head; CPUs hold all."""
    model = written(tmp_path, LLAMA_31_8B)
    few, many = (hyper(max_tokens_per_microbatch=tokens) for tokens in (2048, 65536))

    def logits(size: Any, **where: Any) -> float:
        return estimate_memory(model, Layout(), size, sequence_length=2048, **where).logits

    assert logits(few) == logits(few, on_cpu=True) == 2048 * 128256 * 8
    assert logits(many, on_cpu=True) == 65536 * 128256 * 8
    assert logits(many) == MOST_LOGITS * 8 + 128256 * 4096 * 4


LAYOUTS = [
    layout
    for layout in possible_layouts(SMALL, 16)
    if layout.interleave == 1 and layout.context <= 2
]
sizes = st.builds(
    hyper,
    batch_size=st.integers(1, 300),
    max_tokens_per_microbatch=st.integers(256, 8192),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    lora=st.sampled_from([None, Lora(rank=4)]),
)


@given(st.sampled_from(LAYOUTS), sizes, st.sampled_from(["none", "mlp", "full"]))
def test_more_ranks_never_need_more_memory_each(layout: Layout, size: Any, way: Any) -> None:
    before = estimate_memory(SMALL, layout, size, sequence_length=1024, recompute=way).total
    for name in ("data", "tensor", "context"):
        more: dict[str, Any] = {name: 2 * getattr(layout, name)}
        if name == "tensor":
            more["sequence_parallel"] = True
        other = layout.model_copy(update=more)
        if why_unfit(SMALL, other) is None:
            after = estimate_memory(SMALL, other, size, sequence_length=1024, recompute=way)
            assert after.total <= before, other


@given(st.sampled_from(LAYOUTS), st.booleans())
def test_shares_add_up_to_the_model(layout: Layout, tied: bool) -> None:
    """Tensor ranks add norms, and a row of padding where 32,001 does not divide; stages a table."""
    model = replace(SMALL, tied=tied)
    stages = [weight_share(model, layout, stage).dense for stage in range(layout.pipeline)]
    copies = (layout.tensor - 1) * (2 * model.layers + 1) * model.hidden
    table = -(-model.vocab // layout.tensor) * layout.tensor
    padding = (table - model.vocab) * model.hidden * (1 if tied and layout.pipeline == 1 else 2)
    twice = model.vocab * model.hidden if tied and layout.pipeline > 1 else 0
    assert sum(stages) * layout.tensor == count_weights(model).total + copies + padding + twice


# ---- memory, as Megatron takes it
def buffers(spec: JobSpec, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: build a model with its optimizer, and write down how many bytes each holds."""
    import torch
    from megatron.core import parallel_state as ps

    from cray_agents.trainers.models.lora import add_lora
    from cray_agents.trainers.models.model import build_model
    from cray_agents.trainers.training.optimizer import build_optimizer, wrap
    from cray_agents.trainers.training.parallel_groups import join_ranks

    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu=True)
    model, sizes = read_architecture(Path(spec.parent)), spec.hyperparameters
    chunks = build_model(model, spec.layout, sizes, on_cpu=True)
    if sizes.lora is not None:
        add_lora(chunks, model, sizes.lora, seed=0)
    parts = wrap(chunks, spec.layout, sizes, overlap=False)
    optimizer = build_optimizer(parts, sizes)
    optimizer.step()  # the moments are made by the first
    parameters = [p for part in parts for p in part.parameters()]
    moments = [
        tensor
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
        for state in one.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.dim()
    ]
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {
        "stage": ps.get_pipeline_model_parallel_rank(),
        "weights": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(
            p.main_grad.numel() * p.main_grad.element_size() for p in parameters if p.requires_grad
        ),
        "optimizer": sum(t.numel() * t.element_size() for t in moments)
        + sum(p.numel() * 4 for p in masters if sizes.dtype == "bfloat16"),
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    return 0


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("kind", "layout", "sizes"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {"data": 2, "optimizer_instances": 2}, {}),
        ("llama", {"data": 2}, {"dtype": "bfloat16"}),
        ("qwen2", {"tensor": 2, "sequence_parallel": True}, {}),
        ("qwen3-tied", {"pipeline": 2}, {"dtype": "bfloat16"}),
        ("mixtral", {"data": 2, "expert": 2}, {}),
        ("mistral", {"data": 2}, {"lora": {"rank": 4}}),
    ],
    ids=["one", "instances", "data", "tensor", "pipeline", "expert", "lora"],
)
def test_megatron_holds_the_bytes_that_are_estimated(
    lab: Any, tmp_path: Path, kind: str, layout: dict[str, Any], sizes: dict[str, Any]
) -> None:
    lab.dataset()
    spec = lab.spec(kind, layout=layout, hyper=sizes)
    world = spec.layout.world
    assert run_forked(world, tmp_path / "logs", partial(buffers, spec, tmp_path)) is None
    ranks = [json.loads((tmp_path / f"rank-{n}.json").read_bytes()) for n in range(world)]
    model = read_architecture(Path(spec.parent))
    fullest = asdict(estimate_memory(model, spec.layout, spec.hyperparameters, sequence_length=30))
    for name in ("weights", "gradients"):
        assert fullest[name] == max(rank[name] for rank in ranks), name
    stages = {rank["stage"]: rank["optimizer"] for rank in ranks}
    whole = sum(r["optimizer"] for r in ranks if r["stage"] == max(stages, key=stages.__getitem__))
    assert fullest["optimizer"] * len(ranks) / spec.layout.pipeline == whole


# ---- activations, as torch keeps them
TOKENS = 120  # in three sequences
SHAPES: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_attention_heads": 6,
        "head_dim": 16,
    },
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "head_dim": 32,
    },
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4}
    | {"num_attention_heads": 4, "head_dim": 32, "num_experts_per_tok": 2},
}
USUAL = {"num_key_value_heads": 2, "vocab_size": 304, "max_position_embeddings": 256}


def write_shapes(root: Path) -> dict[str, Path]:
    """Folders with random models of two and four layers for each of SHAPES."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    for name, sizes in SHAPES.items():
        for layers in (2, 4):
            config = AutoConfig.for_model(name, **USUAL, **sizes, num_hidden_layers=layers)
            network = AutoModelForCausalLM.from_config(config)
            network.save_pretrained(root / name / str(layers))
    return {name: root / name for name in SHAPES}


def kept_by_a_layer(shapes: dict[str, Path], out: Path, rank: int, store: Any, _: Any) -> int:
    """The only rank: bytes that a layer keeps of a token, by shape, backend and type.

    Of models that differ in the number of their layers alone, two more layers keep so much more.
    """
    import torch

    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    join_ranks(Layout(), rank, 1, store, on_cpu=True)
    known = BaselineLogprobs(Samples.of([[i % 300 for i in range(TOKENS // 3 + 1)]] * 3))

    def measured(folder: Path, backend: str, dtype: str) -> float:
        sizes = hyper(max_tokens_per_microbatch=TOKENS, batch_size=3, dtype=dtype, backend=backend)
        sizes = sizes.model_copy(update={"learning_rate": 1e-3})
        model = read_architecture(folder, sizes.backend)
        training = RankTraining(model, Layout(), sizes, folder, on_cpu=True)
        own = {p.untyped_storage().data_ptr() for p in training.wrapped_chunks[0].parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that none has its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            training.step(known)
        return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)

    found = {
        f"{name} {backend} {dtype}": (
            measured(folder / "4", backend, dtype) - measured(folder / "2", backend, dtype)
        )
        / (2 * TOKENS)
        for name, folder in shapes.items()
        for backend in ("megatron", "transformers")
        for dtype in ("float32", "bfloat16")
    }
    (out / "found.json").write_text(json.dumps(found))
    return 0


@pytest.mark.megatron
def test_a_layer_keeps_what_is_estimated(tmp_path: Path) -> None:
    shapes = write_shapes(tmp_path / "shapes")
    work = partial(kept_by_a_layer, shapes, tmp_path)
    assert run_forked(1, tmp_path / "logs", work) is None
    found: dict[str, float] = json.loads((tmp_path / "found.json").read_bytes())
    for case, real in found.items():
        name, backend, dtype = case.split()
        model = read_architecture(shapes[name] / "4", backend)  # type: ignore[arg-type]
        size = 2 if dtype == "bfloat16" else 4
        planned = layer_activations(model, Layout(), size, on_cpu=True)
        assert 0.9 * planned < real < 1.07 * planned, (case, real, planned)
