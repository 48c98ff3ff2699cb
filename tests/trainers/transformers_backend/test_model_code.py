"""Code that comes with a model runs where the operator allows its directory, and nowhere else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cray_agents.config import load_config
from cray_agents.errors import BadInput, ConfigError, EngineUnavailable
from cray_agents.paths import Home
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE
from cray_agents.runtime.pool.golden_probe import prove
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess, command
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.foreign_model import VARIABLE, may_run
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from tests.support.trainers.tiny_families import FAMILIES, write_parent

MAP = {
    "AutoConfig": "configuration_novel.NovelConfig",
    "AutoModel": "modeling_novel.NovelModel",
    "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM",
}
CODE = {
    "configuration_novel.py": """
from transformers import LlamaConfig

class NovelConfig(LlamaConfig):
    model_type = "novel"
""",
    "modeling_novel.py": """
from transformers import LlamaForCausalLM, LlamaModel
from .configuration_novel import NovelConfig

open({mark!r}, "a").write("ran")

class NovelModel(LlamaModel):
    config_class = NovelConfig

class NovelForCausalLM(LlamaForCausalLM):
    config_class = NovelConfig
""",
}


class Novel:
    """A model whose code tells that it ran, by a file beside its directory."""

    def __init__(self, folder: Path) -> None:
        from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

        self.folder, self._mark = folder, folder.with_name("mark")
        tiny = ModelShape(hidden=32, layers=1, heads=1, kv_heads=1)
        make_seed_model(folder, seed=0, corpus=["47 + 385"], shape=tiny)
        config = FAMILIES["llama"]()
        config.hidden_size, config.head_dim = 128, 32  # heads that vLLM has kernels for
        write_parent(folder, config, dtype=torch.float32)
        for name, text in CODE.items():
            (folder / name).write_text(text.format(mark=str(self._mark)))
        self.change(model_type="novel", architectures=["NovelForCausalLM"], auto_map=MAP)

    def change(self, **fields: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    @property
    def ran(self) -> bool:
        return self._mark.exists()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder that transformers copies code to, and imports it from."""
    folder = str(tmp_path_factory.mktemp("imported"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.setenv("HF_MODULES_CACHE", folder)  # of processes that are started
        yield


@pytest.fixture
def novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: None) -> Novel:
    monkeypatch.delenv(VARIABLE, raising=False)
    return Novel(tmp_path / "novel")


def test_code_is_not_run_unless_its_directory_is_allowed(
    novel: Novel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = r"'novel'.*does not know this kind.*never run unless.*trust_remote_code"
    for allowed in (None, "", str(novel.folder.parent), f"{novel.folder}/deeper"):
        if allowed is not None:
            monkeypatch.setenv(VARIABLE, allowed)
        with pytest.raises(BadInput, match=refusal):
            read_parent(novel.folder)
        assert not may_run(novel.folder)
    assert not novel.ran
    monkeypatch.setenv(VARIABLE, os.pathsep.join(["/elsewhere", str(novel.folder)]))
    model = read_parent(novel.folder)
    assert (model.backend, model.network) == ("transformers", "NovelForCausalLM")
    files = ParentFiles(novel.folder)
    network = files.build(torch.float32)
    units = files.units(network)
    assert sum(len(unit.tensors) for unit in units) == len(network.state_dict())
    assert novel.ran


@pytest.mark.parametrize(
    "reference",
    [
        "../novel/modeling_novel.NovelModel",
        "{folder}/modeling_novel.NovelModel",
        "some/hub--modeling_novel.NovelModel",
        "{folder}/..--modeling_novel.NovelModel",
        "{other}--modeling_novel.NovelModel",
    ],
)
def test_a_reference_that_leads_elsewhere_is_not_followed(
    novel: Novel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    other = tmp_path / "other"
    novel.folder.rename(other)
    novel.folder.mkdir()
    for path in other.iterdir():
        (novel.folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(VARIABLE, str(novel.folder))
    assert may_run(novel.folder)
    where = reference.format(folder=novel.folder, other=other)
    settings = novel.folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"auto_map": {"AutoTokenizer": [where, None]}}))
    assert not may_run(novel.folder)
    settings.write_text(json.dumps({"auto_map": where}).replace("auto_map", "auto\\u005fmap"))
    assert not may_run(novel.folder)
    settings.unlink()
    novel.change(auto_map=MAP | {"AutoModelForCausalLM": where})
    assert not may_run(novel.folder)
    with pytest.raises(BadInput, match="never run unless"):
        read_parent(novel.folder)
    assert not novel.ran


def test_vllm_may_run_the_code_of_that_directory_alone(
    novel: Novel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(checkpoint: Path) -> list[str]:
        return command(checkpoint, ("m",), EngineSettings())

    plain, home = tmp_path / "plain", Home(tmp_path / "home")
    write_parent(plain, FAMILIES["llama"]())
    assert "--trust-remote-code" not in line(novel.folder)
    before, _ = checkpoints.take_in(home, novel.folder)  # its references lead to itself
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(novel.folder), str(plain)]))
    name, _ = checkpoints.take_in(home, novel.folder)
    assert "--trust-remote-code" in line(home.checkpoint(name))
    assert "--trust-remote-code" not in line(home.checkpoint(before))
    assert "--trust-remote-code" not in line(plain)
    assert not list(home.checkpoint(name).glob("*.py")) and not novel.ran


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert load_config({}, tmp_path).trust_remote_code == []
    (tmp_path / "cray-agents.toml").write_text('trust_remote_code = ["/models/x"]')
    assert load_config({}, tmp_path).trust_remote_code == [Path("/models/x")]
    monkeypatch.setenv("CRAY_AGENTS_SUPERVISED", "/folder")  # as in a job, which has no such file
    monkeypatch.setenv(VARIABLE, "/a:/b")
    assert load_config({}, tmp_path).trust_remote_code == [Path("/a"), Path("/b")]
    for wrong, said in (("a/b", "not a whole path"), ("/models--x/y", "'--' in its path")):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=said):
            load_config({}, tmp_path)


@pytest.mark.megatron
def test_a_job_trains_by_the_code_and_its_checkpoint_refers_to_it(
    lab: Any, novel: Novel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.dataset()
    spec = lab.spec(novel.folder, hyper={"steps": 2})
    assert "never run unless" in lab.fail(spec) and not novel.ran
    monkeypatch.setenv(VARIABLE, str(novel.folder))
    spec = lab.spec(novel.folder, hyper={"steps": 2, "seed": 1})
    lab.run(spec)
    child = lab.home.checkpoint(spec.id)
    assert novel.ran and not list(child.glob("*.py"))
    own = json.loads((child / "config.json").read_text())["auto_map"]
    assert own == {name: f"{novel.folder}--{place}" for name, place in MAP.items()}
    assert read_parent(child) == read_parent(novel.folder) and may_run(child)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(BadInput, match="never run unless"):
        read_parent(child)


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.skipif("CRAY_TEST_SERVING" not in os.environ, reason="make soak starts vLLM")
async def test_vllm_serves_by_the_code(
    lab: Any, novel: Novel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.dataset()
    monkeypatch.setenv(VARIABLE, str(novel.folder))
    spec = lab.spec(novel.folder, hyper={"steps": 2, "learning_rate": 1e-2})
    lab.run(spec)
    child = lab.home.checkpoint(spec.id)
    novel._mark.unlink()
    settings = EngineSettings(max_model_len=256, max_num_seqs=4)
    replica = VllmProcess("m", settings, tmp_path / "replica.log")
    try:
        monkeypatch.setenv(VARIABLE, "")
        with pytest.raises(EngineUnavailable):
            await replica.start(child, "m@1")
        assert not novel.ran
        monkeypatch.setenv(VARIABLE, str(novel.folder))
        await replica.start(child, "m@1")
        assert novel.ran
        probe = checkpoints.read_manifest(child).probe
        assert (await prove(replica.engine, "m@1", probe, FLOAT32_PROBE)).passed
    finally:
        await replica.stop()
