"""Model configs, rotary positions, and logits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import BadInput, NotFound
from cray_agents.trainers.models.architecture import VARIANTS, read_architecture, rope_frequencies
from cray_agents.trainers.models.head import padded_vocab
from cray_agents.trainers.models.seed_model import (
    CHAT_TEMPLATE,
    ModelShape,
    make_seed_model,
    render,
)
from cray_agents.training_jobs import Hyperparameters, Layout, Policy
from tests.support.trainers.forked_ranks import run_forked

SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.1 * i for i in range(8)]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
ROPES: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "default, older": {"rope_theta": 5e5, "rope_scaling": None},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "linear, older": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_theta": 2e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "yarn, all said": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        }
    },
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "longrope": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    },
    "mixtral's base": {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2},
}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@pytest.mark.parametrize("name", ROPES)
def test_positions_are_rotated_as_transformers_does(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = written(tmp_path, **ROPES[name])
    rope = read_architecture(folder).rope
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    found, scaling = rope_frequencies(rope, head_size=16)
    assert torch.equal(found, theirs.inv_freq)
    assert scaling == theirs.attention_scaling


def test_longrope_is_trained_within_its_original_length(tmp_path: Path) -> None:
    assert read_architecture(written(tmp_path, **ROPES["longrope"])).max_tokens == 64
    assert read_architecture(written(tmp_path, **ROPES["yarn"])).max_tokens == 256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unheard_of"}, ["transformers", "unheard_of"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, [*VARIANTS, "spiral"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"vocab_size": None, "rms_norm_eps": None}, ["vocab_size, rms_norm_eps"]),
    ],
)
def test_what_cannot_be_trained_is_named(
    tmp_path: Path, changes: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(BadInput) as refusal:
        read_architecture(written(tmp_path, **changes))
    assert all(words in str(refusal.value) for words in said)


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        read_architecture(tmp_path)


def test_a_vocabulary_is_padded_to_the_ranks() -> None:
    assert [padded_vocab(n, 4) for n in (303, 304, 305)] == [304, 304, 308]


VOCAB, TOKENS, TEMPERATURE = 303, 16, 0.7


def logits_of(folder: Path, layout: Layout, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: its share of a prompt's logits, whole and of some rows."""
    import torch

    from cray_agents.trainers.models.attention import packed_sequences
    from cray_agents.trainers.models.model import build_model
    from cray_agents.trainers.models.weights import SafeTensors, load_weights
    from cray_agents.trainers.training.parallel_groups import join_ranks

    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    model = read_architecture(folder)
    hyper = Hyperparameters(steps=1, policy=Policy(temperature=TEMPERATURE))
    parts = build_model(model, layout, hyper, on_cpu=True)
    load_weights(parts, model, SafeTensors(folder))
    (part,) = parts
    packed = packed_sequences(np.array([0, TOKENS], np.int32), torch.device("cpu"))
    tokens = torch.arange(TOKENS)[None]
    found = {}
    for name, rows in {"whole": None, "rows": torch.tensor([2, 3, 11])}.items():
        part.head.rows, part.head.want_entropy = rows, rows is not None
        logits = part(tokens, tokens, None, packed_seq_params=packed)
        found[name] = (logits[0].detach(), part.head.entropy)
    torch.save(found, out / f"{rank}.pt")
    return 0


@pytest.mark.megatron
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)],
    ids=["one", "tensor2", "tensor2sp"],
)
def test_the_head_chooses_rows_and_hides_padding(
    models: Callable[[str], Path], tmp_path: Path, layout: Layout
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    network: Any = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32)
    network.resize_token_embeddings(VOCAB)
    network.save_pretrained(tmp_path / "odd")
    with torch.no_grad():
        expected = network(torch.arange(TOKENS)[None]).logits[0] / TEMPERATURE
    work = partial(logits_of, tmp_path / "odd", layout, tmp_path)
    assert run_forked(layout.world, tmp_path / "logs", work) is None

    ranks = [torch.load(tmp_path / f"{n}.pt") for n in range(layout.world)]
    for name, rows in (("whole", slice(None)), ("rows", [2, 3, 11])):
        found = torch.cat([rank[name][0] for rank in ranks], -1)
        assert found.shape[-1] == padded_vocab(VOCAB, layout.tensor)
        assert (found[:, VOCAB:] == -torch.inf).all()
        torch.testing.assert_close(found[:, :VOCAB], expected[rows], atol=1e-5, rtol=0)
    entropy = torch.distributions.Categorical(logits=expected[[2, 3, 11]].double()).entropy()
    for rank in ranks:
        assert rank["whole"][1] is None
        torch.testing.assert_close(rank["rows"][1], entropy.float(), atol=1e-5, rtol=0)


def test_the_seed_model_is_what_transformers_makes(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.chat_template_utils import render_jinja_template

    call = {"name": "add", "arguments": {"é": "1 < 2", "n": None}}
    talk: list[Any] = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": call}]},
    ]
    shape = ModelShape(400, 64, 3, heads=4, kv_heads=1, feed_forward=96, context=128, init_std=0.1)
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"properties": {"é": {}}}}}
    ]
    assert [render(talk, tools)] == render_jinja_template(
        [talk], tools, chat_template=CHAT_TEMPLATE
    )[0]
    make_seed_model(tmp_path / "ours", seed=3, corpus=[render(talk, tools)], shape=shape)

    config = Qwen3Config(
        vocab_size=400,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
