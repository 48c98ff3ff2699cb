"""The adapter beside a checkpoint's merged weights: proven, taken along, and loaded by vLLM."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry import checkpoints

pytestmark = pytest.mark.megatron

PROMPTS = [[5, 9, 200, 301, 17, 3, 3, 42, 77, 120], [8, 8, 1, 250], list(range(40, 70))]
SIZE = {"rank": 4, "alpha": 8.0}


def test_a_checkpoint_holds_the_adapter_and_probes_what_is_stored(lab: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    lab.dataset()
    parent = tmp_path / "half"
    network = AutoModelForCausalLM.from_pretrained(lab.models("qwen3"), dtype=torch.bfloat16)
    network.save_pretrained(parent)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(lab.models("qwen3") / name, parent / name)
    spec = lab.spec(parent, hyper={"steps": 4, "learning_rate": 1e-2, "lora": SIZE})
    lab.run(spec)
    folder = lab.home.checkpoint(spec.id)
    manifest = checkpoints.verify(folder)
    inside = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert inside < set(manifest.files)
    weights = {"model.safetensors": manifest.files["model.safetensors"]}
    assert manifest.weights_sha256 == checkpoints.weights_sha256(weights)
    config = json.loads((folder / "adapter/adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == spec.parent
    assert (config["r"], config["lora_alpha"]) == (4, 8)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in manifest.probe:
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0].log_softmax(-1)
        truth = logits.gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(prompt.logprobs, truth, atol=1e-4)

    other = Home(tmp_path / "other")
    name, copied = checkpoints.take_in(other, folder)
    assert copied.files == manifest.files
    adapter = other.checkpoint(name) / "adapter/adapter_model.safetensors"
    assert adapter.read_bytes() == (folder / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["other/x.json", "adapter/deep/x.json", "adapter/../x.json"])
def test_of_folders_only_the_adapters_is_taken_in(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    (source / "adapter").mkdir(parents=True)
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("{}")
    files = {name: durable.sha256_file(source / name)}
    manifest = Manifest(files=files, weights_sha256=checkpoints.weights_sha256(files))
    (source / "manifest.json").write_text(manifest.model_dump_json())
    with pytest.raises(BadInput, match=r"not taken in|is not the name of a file in it"):
        checkpoints.take_in(Home(tmp_path / "home"), source)


@pytest.mark.vllm
@pytest.mark.usefixtures("forked_servers")
async def test_vllm_loads_the_adapter_into_a_running_server(lab: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from cray_agents.runtime.pool.vllm_engine import VllmEngine
    from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
    from cray_agents.runtime.registry.checkpoints import ADAPTER
    from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

    parent = tmp_path / "parent"
    shape = ModelShape(init_std=0.1)
    make_seed_model(parent, seed=1, corpus=["What is 47 + 385?"], shape=shape)
    lab.dataset()
    spec = lab.spec(parent, hyper={"steps": 8, "learning_rate": 1e-2, "lora": SIZE})
    lab.run(spec)
    checkpoint = lab.home.checkpoint(spec.id)

    def truth(folder: Path) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = []
        for prompt in PROMPTS:
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            found += [float(logits[i, token]) for i, token in enumerate(prompt[1:])]
        return found

    async def score(engine: VllmEngine) -> list[float]:
        return [x for row in await engine.score(PROMPTS) for x in row.logprobs]

    replica = VllmProcess(
        "m", EngineSettings(kv_cache_gib=0.125, max_lora_rank=8), tmp_path / "replica.log"
    )
    await replica.start(parent, "m@1")
    try:
        learnt = await replica.engine.load_adapter(checkpoint / ADAPTER, "learnt")
        with_adapter, without = await score(learnt), await score(replica.engine)
    finally:
        await replica.stop()
    merged, plain = truth(checkpoint), truth(parent)
    np.testing.assert_allclose(with_adapter, merged, atol=1e-3)
    np.testing.assert_allclose(without, plain, atol=1e-3)
    assert np.abs(np.subtract(merged, plain)).max() > 0.1
