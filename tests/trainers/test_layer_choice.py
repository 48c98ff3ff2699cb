"""The layers that GPUs get: what is chosen, what is said of it, and what of it runs on a CPU."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.data.context_parallel import cut
from cray_agents.trainers.models.architecture import Architecture, read_architecture
from cray_agents.trainers.models.attention import (
    PackedAttention,
    attend_by_length,
    attend_to_all,
    packed_sequences,
    token_positions,
)
from cray_agents.trainers.models.layer_choice import LayerChoice, check_layers, choose_layers
from cray_agents.trainers.models.model import confirm, finish_chunk, grouped_problem, varlen_problem
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.support.trainers.forked_ranks import run_forked

choose = partial(choose_layers, gpu=True, transformer_engine=False)


@pytest.fixture
def model(models: Any) -> Architecture:
    return read_architecture(models("qwen3_moe"))


def test_a_choice_says_what_it_takes_and_why() -> None:
    assert choose_layers(gpu=False, transformer_engine=True).text.endswith("of cray-agents")
    assert choose_layers(gpu=True, transformer_engine=True).text == "Transformer Engine"
    fast = choose(experts=True)
    assert (fast.varlen, fast.grouped) == (True, True)
    assert "varlen_attn, experts by grouped_mm" in fast.text
    assert "without Transformer Engine" in fast.text and "not fused" in fast.text
    for obstacle, words in (
        ({"dtype": "float32"}, "takes no float32"),
        ({"head_size": 512}, "at most 256"),
        ({"head_size": 36}, "a multiple of 8, not 36"),
    ):
        slow = choose(**obstacle)
        assert not slow.varlen and words in slow.text and "call per sequence length" in slow.text
    one_by_one = choose(experts=True, dtype="float32")
    assert not one_by_one.grouped and "one expert after the other" in one_by_one.text


TE = choose_layers(gpu=True, transformer_engine=True)


@pytest.mark.parametrize(
    ("layers", "hyper", "recompute", "mixture", "says"),
    [
        (choose(), {"fp8": "tensorwise"}, "none", False, r"fp8=tensorwise needs Transformer Eng"),
        (TE, {"fp8": "mxfp8", "dtype": "float32"}, "none", False, "needs dtype bfloat16, not flo"),
        (TE, {"fp8": "delayed", "lora": Lora()}, "none", False, "all weights, not LoRA"),
        (TE, {"fp8": "delayed"}, "layernorm", False, "another fp8, such as tensorwise"),
        (TE, {}, "layernorm,moe", False, "is not a mixture of experts and has no 'moe': ask for m"),
        (TE, {}, "mlp", True, "is a mixture of experts and has no 'mlp': ask for moe"),
        (choose(), {}, "moe_act", True, "needs Transformer Engine's experts"),
    ],
)
def test_what_layers_have_not_got_is_refused(
    layers: LayerChoice, hyper: dict[str, Any], recompute: str, mixture: bool, says: str
) -> None:
    sizes = Hyperparameters(**{"steps": 1, "dtype": "bfloat16", **hyper})
    with pytest.raises(BadInput, match=says):
        check_layers(layers, sizes, recompute, mixture=mixture)


def test_what_layers_have_is_let_through() -> None:
    sizes = Hyperparameters(steps=1, dtype="bfloat16", fp8="blockwise")
    check_layers(TE, sizes, "layernorm,mlp", mixture=False)
    check_layers(TE, sizes, "moe_act", mixture=True)
    check_layers(choose(), Hyperparameters(steps=1), "full", mixture=True)


def test_recomputed_modules_are_written_in_one_order() -> None:
    spec = {"dataset": "d", "parent": "p", "parent_sha256": "0", "hyperparameters": {"steps": 1}}
    assert JobSpec(**spec, recompute="mlp, layernorm").recompute == "layernorm,mlp"
    assert JobSpec(**spec, recompute="full").recompute == "full"
    for wrong in ("mlp,attention", "full,mlp", ""):
        with pytest.raises(ValueError, match="write none, selective, full, or some of core_attn"):
            JobSpec(**spec, recompute=wrong)


def test_fp8_is_part_of_a_job_and_its_absence_of_none() -> None:
    """Jobs older than the field keep their names."""
    spec = {"dataset": "d", "parent": "p", "parent_sha256": "0"}
    plain, fp8 = (
        JobSpec(**spec, hyperparameters=Hyperparameters(steps=1, learning_rate=1e-3, fp8=way))
        for way in (None, "tensorwise")
    )
    assert plain.id == "job-a97b1c54ece06987" != fp8.id


def test_flash_attention_3_that_fails_is_said_and_left(
    model: Architecture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed by name alone, as on a host whose build of it does not fit torch's."""
    monkeypatch.setattr("cray_agents.trainers.models.model.has_flash_attention_3", lambda: True)
    assert not confirm(choose(), model, torch.device("cpu")).varlen
    said = capsys.readouterr().out
    assert "FlashAttention 3 does not work on cpu, torch's own kernel is used: Module" in said
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_transformer_engines_layers_add_up_gradients_themselves(model: Architecture) -> None:
    """Of a module with their attribute: Transformer Engine itself was not run."""
    chunk: Any = torch.nn.Module()
    chunk.layer, chunk.rotary_pos_emb = torch.nn.Linear(2, 2), torch.nn.Module()
    chunk.post_process = False
    chunk.layer.fuse_wgrad_accumulation, chunk.rotary_pos_emb.inv_freq = False, torch.ones(1)
    finish_chunk(chunk, model, Hyperparameters(steps=1), torch.ones(1), on_cpu=True)
    assert chunk.layer.fuse_wgrad_accumulation


@pytest.mark.megatron
def test_megatron_takes_the_options(model: Architecture) -> None:
    """As far as its configuration is made; FP8 itself needs a GPU."""
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.models.model import transformer_config

    load_megatron()

    def config(recompute: str = "none", layout: Layout | None = None, **hyper: Any) -> Any:
        sizes = Hyperparameters(**{"steps": 1, "dtype": "bfloat16", **hyper})
        dense = replace(model, experts=None, layers=7)
        return transformer_config(dense, layout or Layout(), sizes, True, False, recompute)

    assert config("layernorm,mlp").recompute_modules == ["layernorm", "mlp"]
    assert config("selective").recompute_modules == ["core_attn"]
    assert config("full").recompute_granularity == "full"
    ways = {way: config(fp8=way) for way in ("tensorwise", "delayed", "blockwise", "mxfp8")}
    assert {way: (c.fp8, c.fp8_recipe) for way, c in ways.items()} == {
        "tensorwise": ("hybrid", "tensorwise"),
        "delayed": ("hybrid", "delayed"),
        "blockwise": ("e4m3", "blockwise"),
        "mxfp8": ("e4m3", "mxfp8"),
    }
    stages = config(layout=Layout(pipeline=2, interleave=2)).pipeline_model_parallel_layout
    counts = [[len(chunk) for chunk in stage] for stage in stages.layout]
    assert counts == [[1 + 2, 2], [2, 1 + 1]]  # with embedding and loss
    assert config(layout=Layout(pipeline=7)).pipeline_model_parallel_layout is None


@pytest.mark.megatron
def test_mixtures_fuse_what_this_transformer_engine_has(
    model: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that it binds in Megatron. Routes are replayed to the plain router alone."""
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.models.model import transformer_config

    load_megatron()
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    from cray_agents.trainers.models.router_replay import replay

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", len)
    names = ["permute", "permute_with_probs", "sort_chunks_by_index", "unpermute"]
    names += ["sort_chunks_by_index_with_probs", "topk_with_score_function"]
    sizes = Hyperparameters(steps=1, dtype="bfloat16")
    for kernel in (None, len):
        for name in names:
            monkeypatch.setattr(moe_utils, f"fused_{name}", kernel, raising=False)
        config = transformer_config(model, Layout(), sizes, True, True, "none")
        fused = (config.moe_permute_fusion, config.moe_router_fusion)
        assert fused == (kernel is len, kernel is len)
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.config, router.topk, router.layer_number = config, 2, 1
    router.weight = torch.nn.Parameter(torch.zeros(1))
    replay(router, np.zeros((3, 2), np.int64), 0, 1)
    assert not config.moe_router_fusion and config.moe_permute_fusion


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_positions_on_the_device_are_those_of_the_cut(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    for _ in range(20):
        lengths = random.integers(1, 9, random.integers(1, 6)) * (1 if ranks == 1 else 2 * ranks)
        bounds = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32)
        for rank in range(ranks):
            positions, _ = cut(lengths, rank, ranks)
            found = token_positions(bounds, len(positions), rank, ranks)
            np.testing.assert_array_equal(found, positions)


class OneContext:
    """A process group of one rank, as attention sees it."""

    def size(self) -> int:
        return 1


def attention(varlen: bool) -> PackedAttention:
    config: Any = None
    ranks = type("Groups", (), {"cp": OneContext()})
    return PackedAttention(config, 1, None, "self", pg_collection=ranks, varlen=varlen)


@pytest.mark.megatron
def test_attention_to_all_sequences_never_reads_from_the_device() -> None:
    """Tensors of the device `meta` have no numbers: whatever reads one fails."""
    from cray_agents.trainers.models.megatron_fixes import load_megatron

    load_megatron()
    shapes = [(20, 4, 32), (20, 2, 32), (20, 2, 32)]
    given = [torch.empty(s, device="meta", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    packed = packed_sequences(np.array([0, 7, 8, 20], np.int32), torch.device("cpu"))
    packed.cu_seqlens_q = packed.cu_seqlens_q.to("meta")
    for varlen in (True, False):
        out = attention(varlen)(*given, packed_seq_params=packed)
        assert out.shape == (20, 128)
        out.sum().backward()
        assert [tensor.grad.shape for tensor in given] == [torch.Size(s) for s in shapes]
    assert token_positions(packed.cu_seqlens_q, 20, 0, 1).shape == (20,)


def test_a_kernel_that_fails_is_not_used(model: Architecture, capsys: Any) -> None:
    """torch's attention for unequal lengths has no CPU version, its grouped product has one."""
    cpu = torch.device("cpu")
    assert grouped_problem(model, cpu) is None
    assert "_flash_attention_forward" in (varlen_problem(model, cpu) or "")
    layers = LayerChoice(False, True, True, "")
    assert confirm(layers, model, cpu) == LayerChoice(False, False, True, "")
    assert "the kernel 'varlen' does not work on cpu" in capsys.readouterr().out


def on_a_gpu(model: Architecture, rank: int, store: Any, stop: Any) -> int:
    """One rank: both kernels pass their trial, and attention is right for usual lengths too."""
    gpu = torch.device("cuda")
    assert confirm(choose(experts=True), model, gpu) == choose(experts=True)
    lengths = [300, 7, 7, 1000, 1]
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device=gpu, dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    bounds = torch.tensor([0, *lengths], device=gpu).cumsum(0).int()
    ours = attend_to_all(q, k, v, bounds, max(lengths), None)
    theirs = torch.cat(list(attend_by_length(q, k, v, lengths, None)))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    return 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has these kernels on GPUs alone")
def test_kernels_work_on_a_gpu(model: Architecture, tmp_path: Path) -> None:
    """In a rank of its own, so that CUDA stays untouched by the process that forks ranks."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks

    work = partial(on_a_gpu, model)
    assert run_ranks(find_placement(1, "kernels"), tmp_path / "logs", work).code == 0


def product_of_experts(folder: Path, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: a layer's experts, one after the other, all at once, and at once in a buffer."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from cray_agents.trainers.models import model as models
    from cray_agents.trainers.training.optimizer import wrap
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.training_jobs import Hyperparameters

    join_ranks(Layout(), rank, 1, store, on_cpu=True)
    model = read_architecture(folder)
    found: list[list[dict[str, torch.Tensor]]] = []
    for dtype in ("float32", "bfloat16"):
        hyper = Hyperparameters(steps=1, dtype=dtype)
        (chunk,) = models.build_model(model, Layout(), hyper, on_cpu=True)
        single = chunk.decoder.layers[0].mlp.experts
        assert type(single) is SequentialMLP
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "layers_of", lambda *_: LayerChoice(False, False, True, ""))
            (chunk,) = models.build_model(model, Layout(), hyper, on_cpu=True)
        at_once = chunk.decoder.layers[0].mlp.experts
        assert type(at_once) is models.grouped_experts()
        at_once.load_state_dict(single.state_dict())
        counts = torch.tensor([5, 0, 9, 2])
        tokens = torch.randn(16, model.hidden).to(next(single.parameters()).dtype)
        found.append([])
        for place, experts in enumerate((single, at_once, at_once)):
            if place == 2:
                wrap([chunk], Layout(), hyper, overlap=False)
                weights = [experts.local_experts[i].linear_fc1.weight for i in range(4)]
                together, one = models.as_one(weights), models.as_one(weights[:1])
                assert together.data_ptr() == one.data_ptr() == weights[0].data_ptr()  # no copy
                assert all(torch.equal(*pair) for pair in zip(together, weights, strict=True))
            x, probs = tokens.clone().requires_grad_(), torch.linspace(0, 1, 16).requires_grad_()
            experts.zero_grad()
            y, _ = experts(x, counts, probs)
            y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).view_as(y))
            gradients = {
                name: (p.grad if p.grad is not None else p.main_grad).clone()
                for name, p in experts.named_parameters()
            }
            found[-1].append({"y": y.detach(), "x": x.grad, "probs": probs.grad, **gradients})
    torch.save(found, out / "found.pt")
    return 0


@pytest.mark.megatron
def test_experts_at_once_equal_one_after_the_other(models: Any, tmp_path: Path) -> None:
    work = partial(product_of_experts, models("qwen3_moe"), tmp_path)
    assert run_forked(1, tmp_path / "logs", work) is None
    close = partial(torch.testing.assert_close, check_dtype=False)
    for (these, *others), error in zip(
        torch.load(tmp_path / "found.pt"), (1e-5, 0.02), strict=True
    ):
        for those in others:
            assert these.keys() == those.keys() and len(these) == 3 + 2 * 4
            for name, numbers in these.items():
                close(those[name], numbers, rtol=error, atol=error, msg=name)
