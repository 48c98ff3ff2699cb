"""Adapters of transformers' modules as PEFT reads them: names, transposed layers, mixers, parts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cray_agents.runtime.registry.adapters import CONFIG, WEIGHTS
from cray_agents.trainers.checkpointing.peft_adapter import config_of_adapters, peft_tensors
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.lora import adapters, merged_weight, without_adapters
from cray_agents.trainers.models.transformers_backend.linear_adapter import add_adapters
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.training_jobs import Lora
from tests.support.trainers.plain_model import plain_network
from tests.support.trainers.tiny_families import FAMILIES, FURTHER, write_parent

TOKENS = torch.arange(3, 43)[None]
#: part of a tensor's name in the adapter's file -> whether there has to be such a tensor
NAMES = {
    "laguna": {".mlp.shared_expert.up_proj.": True, ".shared_experts.": False},
    "gpt2": {"transformer.h.0.attn.c_attn.": True, "transformer.h.1.mlp.c_proj.": True},
    "mamba2": {".mixer.in_proj.": True, "out_proj": False},
    "falcon": {".self_attention.query_key_value.": True},
    # files of Gemma 3 and Llama 4 call the text otherwise than transformers does
    "gemma3": {".model.language_model.model.": True, ".model.model.language_model.": False},
    "gemma4": {"model.language_model.layers.0.self_attn.q_proj.": True, "vision": False},
}


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = network(input_ids=TOKENS, use_cache=False).logits
    return out


@pytest.mark.parametrize("family", NAMES)
def test_peft_computes_with_an_adapter_what_the_trainer_does(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    torch.set_num_threads(1)
    write_parent(tmp_path, (FAMILIES | FURTHER)[family]())
    parent, lora = ParentFiles(tmp_path), Lora(rank=4)
    network = parent.build(torch.float32)
    before = logits(network)
    add_adapters(network, lora, 0, parent.adapter_names())
    random = torch.Generator().manual_seed(0)
    for _, _, adapter in adapters([network]):
        adapter.b.data.normal_(0, 0.2, generator=random)
    ours = logits(network)
    tensors = peft_tensors([network], read_architecture(tmp_path))
    config = config_of_adapters([network], tensors, lora, str(tmp_path))
    for part, there in NAMES[family].items():
        assert any(part in name for name in tensors) == there, sorted(tensors)
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    theirs = logits(PeftModel.from_pretrained(plain_network(tmp_path), tmp_path / "adapter").eval())
    assert (ours - before).abs().max() > 0.05
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    with without_adapters([network]) as around, torch.no_grad():
        assert not list(adapters([network]))
        for weight, adapter in around.items():
            weight.copy_(merged_weight(adapter))
        torch.testing.assert_close(logits(network), ours, atol=1e-4, rtol=1e-4)
