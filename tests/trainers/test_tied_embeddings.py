"""Embedding and head: one or two, as transformers decides it; and no tensor is dropped."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.server.first_version import first_version
from cray_agents.trainers.models.architecture import SUPPORTED
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked

pytestmark = pytest.mark.slow

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [5, 9, 200, 301, 17, 3, 3, 42, 77, 120]


def equal(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def equal_but_for_zeros_sign(tensors: dict[str, Any]) -> None:
    tensors[EMBEDDING][3] = 0.0
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][3] = -0.0


def only_embedding(tensors: dict[str, Any]) -> None:
    del tensors[HEAD]


def only_head(tensors: dict[str, Any]) -> None:
    del tensors[EMBEDDING]


def differing(tensors: dict[str, Any]) -> None:
    assert not bool((tensors[EMBEDDING] == tensors[HEAD]).all())


def differing_in_the_last_number(tensors: dict[str, Any]) -> None:
    equal(tensors)
    tensors[HEAD][-1, -1] += 1


HELD = (
    equal,
    equal_but_for_zeros_sign,
    only_embedding,
    only_head,
    differing,
    differing_in_the_last_number,
)


def says_tied(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A model whose config ties embedding and head, whatever its weights are."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def logprobs(network: Any) -> Any:
    """Of PROMPT's tokens but the first."""
    import torch

    with torch.no_grad():
        found = network(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return found[torch.arange(len(PROMPT) - 1), PROMPT[1:]]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_tied_is_what_transformers_ties(
    models: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    from cray_agents.trainers.models.weights import SafeTensors

    for change in HELD:
        folder = says_tied(models(kind), tmp_path / change.__name__, change)
        network = theirs(folder)
        tied = network.lm_head.weight is network.model.embed_tokens.weight
        assert read_parent(folder).tied == tied, change.__name__
        assert tied == (change not in (differing, differing_in_the_last_number))
        source = SafeTensors(folder, tied=tied)
        for name in (EMBEDDING,) if tied else (EMBEDDING, HEAD):
            assert bool((source[name] == network.get_parameter(name)).all()), change.__name__


def scored_and_exported(folders: list[Path], rank: int, store: Any, stop: Any) -> int:
    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    join_ranks(Layout(), rank, 1, store, on_cpu=True)
    hyper = Hyperparameters(steps=1, learning_rate=0)
    for folder in folders:
        training = RankTraining(read_parent(folder), Layout(), hyper, folder, on_cpu=True)
        out = folder / "out"
        out.mkdir()
        hf_export.export_weights(training, out)
        hf_export.copy_settings(folder, out, tied=training.model.tied)
        [found] = training.score(Samples.of([PROMPT]), temperature=1.0)
        (folder / "scores").write_text(json.dumps(found.tolist()))
    return 0


@pytest.mark.megatron
def test_what_is_trained_is_the_model_that_transformers_loads(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    import torch

    folders = [says_tied(models(kind), tmp_path / kind, differing) for kind in SUPPORTED]
    folders.append(says_tied(models("qwen3"), tmp_path / "only head", only_head))
    work = partial(scored_and_exported, folders)
    assert run_forked(1, tmp_path / "logs", work) is None
    for folder in folders:
        expected = logprobs(theirs(folder))
        found = torch.tensor(json.loads((folder / "scores").read_text()))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(logprobs(theirs(folder / "out")), expected, atol=1e-5, rtol=0)
        config = json.loads((folder / "out" / "config.json").read_bytes())
        assert config["tie_word_embeddings"] == (folder.name == "only head")


def test_a_copy_says_of_itself_what_transformers_decides(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Engines go by the config alone: they would tie, and serve another model."""
    registry = Registry(Home(tmp_path / "home"))
    folder = says_tied(models("qwen3"), tmp_path / "model", differing)
    version = first_version(registry, folder, "m")
    kept = registry.home.checkpoint(version.checkpoint)
    before, after = (json.loads((at / "config.json").read_bytes()) for at in (folder, kept))
    assert after == {**before, "tie_word_embeddings": False}
    assert bool((logprobs(theirs(kept)) == logprobs(theirs(folder))).all())
    assert first_version(registry, folder, "m") == version  # the same command again

    same = says_tied(models("qwen3"), tmp_path / "same", equal)
    taken, _ = registry.import_checkpoint(same)
    kept = registry.home.checkpoint(taken)
    assert (kept / "config.json").read_bytes() == (same / "config.json").read_bytes()


@pytest.mark.parametrize("kind", [*SUPPORTED, *(f"{kind}-tied" for kind in SUPPORTED)])
def test_tensors_that_the_config_does_not_imply_are_named(
    models: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(models(kind), tmp_path / "model"))
    whole = load_file(folder / "model.safetensors")

    def holds(**more: Any) -> None:
        named = {name.replace("__", "."): tensor for name, tensor in more.items()}
        save_file(whole | named, folder / "model.safetensors", metadata={"format": "pt"})

    one = torch.ones(64)
    holds(
        model__layers__0__self_attn__rotary_emb__inv_freq=one,
        model__layers__1__self_attn__rotary_emb__inv_freq=one + 1,
        model__rotary_emb__inv_freq=one + 2,
    )
    assert read_parent(folder).layers == 2
    for name in (
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "lm_head.bias",
        "score.weight",
    ):
        holds(**{name: one})
        with pytest.raises(BadInput, match="does not imply") as refusal:
            read_parent(folder)
        assert name in str(refusal.value)
