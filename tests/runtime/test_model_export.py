"""Versions for other programs: GGUF files that read back, merged directories, adapters, cards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, ProbePrompt, Prompt
from cray_agents.runtime.registry import checkpoints, gguf_export
from cray_agents.runtime.registry.gguf_conversion import convert
from cray_agents.runtime.registry.model_export import export_version
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from tests.support.bare_models import bare_model
from tests.support.command_line import cli, refused
from tests.support.trainers.tiny_families import FAMILIES, write_parent

Q = "model.layers.0.self_attn.q_proj"
#: As on the hub; the widths of Qwen3's heads and experts are what transformers takes them for.
QWEN = {"rms_norm_eps": 1e-6, "norm_topk_prob": True, "moe_intermediate_size": 768}
QWENS = {"qwen2": QWEN, "qwen3": QWEN | {"head_dim": 128}, "qwen3_moe": QWEN}
OTHERS = {"rms_norm_eps": 1e-5, "sliding_window": None}


def made(folder: Path, kind: str = "llama") -> Path:
    """A Hugging Face directory of a tiny model, in bfloat16, as transformers writes it."""
    make_seed_model(folder, seed=0, corpus=["he"], shape=ModelShape(vocabulary=500))
    config = FAMILIES[kind]()
    config.update(QWENS.get(kind, OTHERS))
    write_parent(folder, config)
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """A registry whose m@1 is a model of the hub with a licence."""
    model = made(tmp_path / "model")
    (model / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# A model\n")
    registry = Registry(Home(tmp_path / "home"))
    version = registry.register("m", *registry.import_checkpoint(model))
    registry.promote("m", version.number, who="ada", reason="the first one", numbers={"p": 0.01})
    return registry


def adapter_version(registry: Registry) -> tuple[torch.Tensor, Path]:
    """Register m@2, an adapter over m@1; return what it adds to Q, and its directory."""
    base = registry.home.checkpoint(registry.resolve("m@1").checkpoint)
    folder = registry.home.checkpoint("job-lora")
    left_out = shutil.ignore_patterns("manifest.json", "*.safetensors", "*.md")
    shutil.copytree(base, folder, ignore=left_out)
    (folder / "adapter").mkdir()
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    pair = {f"base_model.model.{Q}.lora_{name}.weight": t for name, t in (("A", a), ("B", b))}
    save_file(pair, folder / "adapter" / "adapter_model.safetensors")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "fan_in_fan_out": False}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    files, below = checkpoints.hash_files(folder), checkpoints.read_manifest(base).weights_sha256
    manifest = Manifest(
        files=files, weights_sha256=checkpoints.weights_sha256(files, below), parent_sha256=below,
        base=base.name, base_sha256=below, dataset="d-1", metrics={"loss": 0.25},
        probe=[ProbePrompt(token_ids=[5, 6, 7, 8], logprobs=[-1.0, -1.0, -1.0])])  # fmt: skip
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    registry.register("m", folder.name, manifest)
    return b @ a * 2, folder


@pytest.mark.slow
def test_a_version_is_exported_in_each_form_with_its_card(
    registry: Registry, tmp_path: Path
) -> None:
    added, folder = adapter_version(registry)
    words = ["models", "export", "m@2", "--home", registry.home.root, "--output"]
    done = cli(*words, "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    base = load_file(folder.parent / registry.resolve("m@1").checkpoint / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    base[f"{Q}.weight"] = (base[f"{Q}.weight"].float() + added).bfloat16()
    assert_close(whole, base, rtol=0, atol=0)
    checkpoints.verify(tmp_path / "whole")
    taken = Registry(Home(tmp_path / "elsewhere")).import_checkpoint(tmp_path / "whole")
    assert len(taken[1].probe) == 1, "another root can check it"
    card = (tmp_path / "whole" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: m@1\n")
    for text in ("# m@2", "Training set `d-1`", "- `m@1`, weights", "card of `m@1` states"):
        assert text in card

    assert cli(*words, "lora", "--to", "adapter", cwd=tmp_path).returncode == 0
    assert {path.name for path in (tmp_path / "lora").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors"}  # fmt: skip
    done = cli(*words, "file", "--to", "gguf", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["files"] == ["README.md", "m-2.gguf"] and told["licence"] == "apache-2.0"
    assert told["checked"]["tokens"] == 3 and told["checked"]["max"] < 1e-4
    (again := tmp_path / "again").mkdir()
    convert(tmp_path / "file" / "m-2.gguf", again)  # as a parent is read
    assert_close(load_file(again / "model.safetensors"), whole, rtol=0, atol=0)

    refused(cli(*words, "file", cwd=tmp_path), "exists: give a new folder")
    refused(cli(*words, "x", "--to", "onnx", cwd=tmp_path), "give hf, gguf, adapter")
    with pytest.raises(BadInput, match="m@1 has whole weights and no adapter"):
        export_version(registry, "m@1", "adapter", tmp_path / "none")
    with pytest.raises(NotFound, match="m@9"):
        export_version(registry, "m@9", "hf", tmp_path / "none")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in cli(*words, "x", cwd=tmp_path).stderr
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert not left and not (tmp_path / "none").exists() and not (tmp_path / "x").exists()


def test_a_card_says_what_is_not_on_record(tmp_path: Path) -> None:
    registry = Registry(Home(tmp_path / "home"))
    bare = bare_model(tmp_path / "bare")
    (bare / "README.md").write_text("---\ntags: [x]\n---\nlicense: gpl-3.0 is what others use\n")
    prompts = {"crier": Prompt(instructions="Cry.")}
    registry.register("m", *registry.import_checkpoint(bare), prompts)
    registry.reject("m", 1, who="bob", reason="it is rude", numbers={"p": 0.5, "pairs": [1]})
    words = ["models", "export", "m@1", "--home", registry.home.root, "--output"]
    assert "no licence is on record" in cli(*words, "out", cwd=tmp_path).stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "by bob: it is rude (p 0.5)" in card and "license:" not in card
    assert "None is on record: ask" in card and card.count("None is on record.") == 3
    assert json.loads((tmp_path / "out" / "prompts.json").read_text())["crier"] == {
        "instructions": "Cry.", "examples": [], "tools": {}
    }  # fmt: skip
    assert f"`crier` ({prompts['crier'].id})" in card
    refused(cli(*words, "x", "--to", "gguf", cwd=tmp_path), "is of the kind None", "--to hf")


@pytest.mark.slow
@pytest.mark.parametrize("kind", gguf_export.ARCHITECTURES)
def test_each_kind_comes_back(tmp_path: Path, kind: str) -> None:
    folder = made(tmp_path / "model", kind)
    gguf_export.write_gguf(folder, tmp_path / "back.gguf", "m@1", None)
    assert gguf_export.compare(tmp_path / "back.gguf", folder, [list(range(40))]).max < 1e-4
    (again := tmp_path / "again").mkdir()
    convert(tmp_path / "back.gguf", again)
    assert_close(*(load_file(one / "model.safetensors") for one in (folder, again)), rtol=0, atol=0)


@pytest.mark.slow
def test_what_gguf_cannot_hold_is_refused_and_another_model_is_found_out(tmp_path: Path) -> None:
    folder, right = tmp_path / "model", tmp_path / "right.gguf"
    make_seed_model(folder, seed=0, corpus=["he"])
    gguf_export.write_gguf(folder, right, "x", None)
    plain = json.loads((folder / "config.json").read_text())

    def said(**changes: Any) -> str:
        (folder / "config.json").write_text(json.dumps(plain | changes))
        with pytest.raises(BadInput) as refusal:
            gguf_export.write_gguf(folder, tmp_path / "x.gguf", "x", None)
        return str(refusal.value)

    def compared(**changes: Any) -> float:
        (folder / "config.json").write_text(json.dumps(plain | changes))
        return gguf_export.compare(right, folder, [list(range(40))]).max

    for kind in FAMILIES.keys() - gguf_export.ARCHITECTURES:
        assert f"kind {kind!r}" in said(model_type=kind)
    assert "scales its RoPE (llama3)" in said(rope_parameters={"rope_type": "llama3"})
    for kind in ("mistral", "phi3", "qwen2"):
        window = said(model_type=kind, sliding_window=16, use_sliding_window=True)
        assert "attends to 16 tokens" in window
    assert "norm_topk_prob" in said(model_type="qwen3_moe")
    assert compared() < 1e-4
    for key, value in {"rms_norm_eps": 1.001e-6, "hidden_act": "gelu"}.items():
        with pytest.raises(Corrupt, match=f"is read with {key} .*, and the model has"):
            compared(**{key: value})
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].roll(1, 0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Corrupt, match="does not read back as the model"):
        compared()
    save_file(tensors | {"model.odd.weight": torch.ones(2)}, folder / "model.safetensors")
    assert "model.odd.weight" in said()
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) | {"pre_tokenizer": {"type": "Whitespace"}}
    path.write_text(json.dumps(tokenizer))
    assert "llama.cpp knows by name" in said() and not (tmp_path / "x.gguf").exists()
