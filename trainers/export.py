"""From trained Megatron weights to a published checkpoint: a Hugging Face directory and a manifest.

Every (pipeline stage, expert rank) writes its own safetensors file; rank 0 adds the parent's
config, tokenizer and chat template, the golden probe and the hashes, and renames the whole into
place. The weights keep the parent's stored type; the probe is of the weights as stored.
Read next: rank.py, which calls `publish` last.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cray_agents.records import JobSpec, Manifest
from cray_agents.runtime import checkpoints, durable
from cray_agents.trainers.data import as_probe
from cray_agents.trainers.publish import hash_files, publish_folder
from cray_agents.trainers.train import Training
from cray_agents.trainers.weights import SafeTensors, exported

_COPIED = checkpoints.SUFFIXES - {".safetensors"}
_OURS = {checkpoints.MANIFEST, "model.safetensors.index.json"}


def export_weights(training: Training, folder: Path) -> None:
    """Write the weights as safetensors. Collective; the folder exists.

    Rounds the model's own weights to the stored type first, so that they are what is stored.
    """
    from megatron.core import parallel_state as ps

    stored = SafeTensors(training.parent).dtype()
    round_weights(training, stored)
    stage, stages = (
        ps.get_pipeline_model_parallel_rank(),
        ps.get_pipeline_model_parallel_world_size(),
    )
    expert, experts = (
        ps.get_expert_model_parallel_rank(),
        ps.get_expert_model_parallel_world_size(),
    )
    files = stages * experts
    name = f"model-{stage * experts + expert + 1:05d}-of-{files:05d}.safetensors"
    name = "model.safetensors" if files == 1 else name
    tensors = {
        tensor_name: tensor.to("cpu", stored).contiguous()
        for tensor_name, tensor in exported(training.inner, training.model)
        if expert == 0 or ".experts." in tensor_name
    }
    if ps.get_tensor_model_parallel_rank() == 0 and ps.get_expert_data_parallel_rank() == 0:
        save_file(tensors, folder / name, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (name, list(tensors), size))
    if torch.distributed.get_rank() == 0 and files > 1:
        index = {
            "metadata": {"total_size": sum({part[0]: part[2] for part in parts}.values())},
            "weight_map": {tensor: part[0] for part in parts for tensor in part[1]},
        }
        durable.replace_file(
            folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode()
        )


@torch.no_grad()
def round_weights(training: Training, stored: torch.dtype) -> None:
    """Round the model's weights to the type that they are stored in."""
    for parameter in training.inner.parameters():
        parameter.copy_(parameter.to(stored))


def publish(
    training: Training,
    spec: JobSpec,
    prompts: Sequence[list[int]],
    metrics: dict[str, Any],
    draft: Path,
    final: Path,
) -> None:
    """Export, probe, hash and publish as `final`; an existing one stays. Collective."""
    main = torch.distributed.get_rank() == 0
    if main:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    torch.distributed.barrier()
    export_weights(training, draft)
    logprobs = training.logprobs(prompts)
    torch.distributed.barrier()
    if main:
        for path in training.parent.iterdir():
            if path.is_file() and path.suffix in _COPIED and path.name not in _OURS:
                shutil.copyfile(path, draft / path.name)
        files = hash_files(draft)
        manifest = Manifest(
            files=files,
            weights_sha256=checkpoints.weights_sha256(files),
            parent_sha256=spec.parent_sha256,
            job=spec.id,
            dataset=spec.dataset,
            metrics=metrics,
            probe=as_probe(prompts, logprobs),
        )
        durable.replace_file(draft / "manifest.json", manifest.model_dump_json(indent=1).encode())
        if not publish_folder(draft, final):
            shutil.rmtree(draft)
    torch.distributed.barrier()
