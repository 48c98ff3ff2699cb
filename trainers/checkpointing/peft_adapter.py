"""PEFT adapter: write LoRA adapters in PEFT's layout, for PEFT and vLLM to load.

hf_export.py calls `stage_adapter`. In Megatron q, k and v (gate and up) share one A; PEFT gets a
copy for each. Read next: models/lora.py, whose `load_adapters` reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.adapters import CONFIG, WEIGHTS
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.lora import LoraLinear, adapters
from cray_agents.trainers.models.transformers_backend.linear_adapter import LinearAdapter
from cray_agents.trainers.models.weights import Origin, unpack
from cray_agents.trainers.training.parallel_groups import (
    gather_from_ranks,
    is_rank0,
    write_together,
)
from cray_agents.training_jobs import Lora


def write_adapter(
    chunks: list[Any], model: Architecture, lora: Lora, parent: str, folder: Path
) -> None:
    """Write this model's adapters into a new folder. Collective; rank 0 writes. Raises StoreError.

    See `stage_adapter`.
    """
    write_together("the checkpoint", stage_adapter(chunks, model, lora, parent, folder))


def stage_adapter(
    chunks: list[Any], model: Architecture, lora: Lora, parent: str, folder: Path
) -> Callable[[], None]:
    """Gather this model's adapters on rank 0; return what writes them there. Collective.

    `parent` is the path of the weights below, for the next job and PEFT's users. The writer raises
    OSError.
    """
    from megatron.core import parallel_state as ps

    mine = peft_tensors(chunks, model)
    first = ps.get_data_parallel_rank(with_context_parallel=True) == 0
    if not first or ps.get_tensor_model_parallel_rank() > 0:
        mine = {}  # another rank of this pipeline stage has the same
    stages = gather_from_ranks(save(mine))

    tensors = {name: tensor for stage in stages for name, tensor in load(stage).items()}
    config = config_of_adapters(chunks, tensors, lora, parent) if is_rank0() else {}

    def write() -> None:
        if is_rank0():
            folder.mkdir()
            durable.write_file(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
            durable.write_file(folder / CONFIG, json.dumps(config, indent=1).encode())

    return write


@torch.no_grad()
def peft_tensors(chunks: list[Any], model: Architecture) -> dict[str, torch.Tensor]:
    """Return this pipeline stage's adapters on the CPU: PEFT's name -> tensor.

    Collective over tensor ranks.
    """
    tensors = {}
    for chunk, name, adapter in adapters(chunks):
        if isinstance(adapter, LinearAdapter):
            stem = f"base_model.model.{adapter.saved_as.tensors}"
            tensors[f"{stem}.lora_A.weight"] = adapter.a.to("cpu", copy=True)
            tensors[f"{stem}.lora_B.weight"] = adapter.b.to("cpu", copy=True)
            continue
        origin = Origin(chunk, f"{name}.weight", model)
        a, bs = _whole(adapter, origin.how, model)
        for weight, b in zip(origin.names, bs, strict=True):
            stem = f"base_model.model.{weight.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = a.to("cpu", copy=True)
            tensors[f"{stem}.lora_B.weight"] = b.to("cpu", copy=True).contiguous()
    return tensors


def _whole(
    adapter: LoraLinear, how: str, model: Architecture
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather A [rank, in], and a B [out, rank] for each of the linear's Hugging Face matrices."""
    split = (adapter.b if adapter.column else adapter.a).detach().contiguous()
    slices = [torch.empty_like(split) for _ in range(adapter.group.size())]
    torch.distributed.all_gather(slices, split, group=adapter.group)
    if adapter.column:
        return adapter.a.detach(), unpack(how, slices, model)
    return torch.cat(slices, 1), [adapter.b.detach()]


def config_of_adapters(
    chunks: list[Any], tensors: dict[str, torch.Tensor], lora: Lora, parent: str
) -> dict[str, Any]:
    """Return PEFT's adapter_config.json for all adapters of a model; rank 0 has `tensors`."""
    linear = [one for _, _, one in adapters(chunks) if isinstance(one, LinearAdapter)]
    if not linear:
        return peft_config(lora, parent, {name.split(".")[-3] for name in tensors})
    config = peft_config(lora, parent, {one.saved_as.target for one in linear})
    return config | {"fan_in_fan_out": any(one.transposed for one in linear)}


def peft_config(lora: Lora, parent: str, modules: set[str]) -> dict[str, Any]:
    """Return PEFT's adapter_config.json for adapters of the projections in `modules`."""
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": parent,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
