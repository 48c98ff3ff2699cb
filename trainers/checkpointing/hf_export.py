"""From trained Megatron weights to a published checkpoint: a Hugging Face directory and a manifest.

The first rank that holds a tensor writes it, into safetensors files of bounded size that are laid
out beforehand from names and shapes, so that no rank ever holds more than one file's tensors. Rank
0 adds the parent's config, tokenizer and chat template, the golden probe and the hashes, and
renames the whole into place. The weights keep the parent's stored types; the probe is of the
weights as stored. Read next: rank.py, which calls `publish` last.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cray_agents.errors import NotFound
from cray_agents.records import Manifest, ProbePrompt
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints, model_files
from cray_agents.runtime.registry.model_config import TIED, read_config
from cray_agents.runtime.registry.model_files import CONFIG
from cray_agents.trainers.checkpointing.peft_adapter import write_adapter
from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.models.lora import fold
from cray_agents.trainers.models.tensors import shapes
from cray_agents.trainers.models.weights import (
    exported,
    round_weights,
    weight_source,
    written,
)
from cray_agents.trainers.training.train_step import Training
from cray_agents.training_jobs import JobSpec


def publish_folder(draft: Path, final: Path) -> bool:
    """Rename a finished folder into place; False if the name is taken (published folders stay)."""
    for path in draft.rglob("*"):
        durable.sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    return durable.publish_directory(draft, final)


def hash_files(folder: Path) -> dict[str, str]:
    """Name within a folder -> SHA-256, for all plain files there and below but its manifest."""
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {n: durable.sha256_file(p) for n, p in files.items() if n != checkpoints.MANIFEST}


def weights_sha256(checkpoint: Path) -> str:
    """The hash that names a checkpoint directory's weights (`JobSpec.parent_sha256`).

    Computed from the files, whatever a manifest says. Raises NotFound without safetensors.
    """
    files = {p.name: checksums.sha256_of(p) for p in sorted(checkpoint.glob("*.safetensors"))}
    if not files:
        raise NotFound(f"{checkpoint} holds no *.safetensors: give a Hugging Face checkpoint")
    return checkpoints.weights_sha256(files)


def parent_sha256(checkpoint: Path, init: str) -> str:
    """`JobSpec.parent_sha256`: of the weights, or of the config where they start at random."""
    return checkpoints.config_sha256(checkpoint) if init == "random" else weights_sha256(checkpoint)


FILE_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_COPIED = checkpoints.SUFFIXES - {".safetensors"}
_OURS = {checkpoints.MANIFEST, _INDEX}


def export_weights(training: Training, folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write the weights as safetensors. Collective; the folder exists.

    Rounds the model's own weights to the stored types first, so that they are what is stored.
    """
    parts, model = training.inner, training.model
    source = weight_source(training.parent, model, training.hyper)
    round_weights(parts, model, source)
    sizes = {n: prod(s) * source.dtype(n).itemsize for n, s in shapes(model).items()}
    mine = written(parts, model)
    each: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(each, mine)
    files = name_files(list(chain.from_iterable(cut(n, sizes, file_bytes) for n in each)))
    where = {tensor: name for name, tensors in files.items() for tensor in tensors}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in exported(parts, model):
        waiting[name] = tensor.to("cpu", source.dtype(name)).contiguous()
        file = where[name]
        if len(waiting) == len(files[file]):
            save_file(waiting, folder / file, metadata={"format": "pt"})
            waiting = {}
    if torch.distributed.get_rank() == 0 and len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        durable.replace_file(folder / _INDEX, json.dumps(index, indent=1).encode())


def copy_settings(parent: Path, folder: Path, *, tied: bool) -> None:
    """Copy config, tokenizer and chat template; the config says what embedding and head are."""
    parent = parent.resolve()
    for name in model_files.names_in(parent, _COPIED):
        if name not in _OURS:
            with model_files.open_file(parent, name) as old, (folder / name).open("wb") as new:
                shutil.copyfileobj(old, new)
    config = read_config(parent)
    if bool(config.get(TIED)) != tied:
        durable.write_file(folder / CONFIG, json.dumps({**config, TIED: tied}, indent=2).encode())


def cut(names: Sequence[str], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """One rank's tensors, in order, as files of at most `limit` bytes; larger ones stand alone."""
    files: list[list[str]] = []
    room = 0
    for name in names:
        if not files or sizes[name] > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= sizes[name]
    return files


def name_files(files: Sequence[list[str]]) -> dict[str, list[str]]:
    """File name -> its tensors, named as transformers does."""
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": f for n, f in enumerate(files, 1)}


def publish(
    training: Training,
    spec: JobSpec,
    prompts: Sequence[list[int]],
    metrics: dict[str, Any],
    draft: Path,
    final: Path,
) -> None:
    """Export, probe, hash and publish as `final`; an existing one stays. Collective.

    Ends the training: adapters are folded into the weights that they adapt.
    """
    main = torch.distributed.get_rank() == 0
    if main:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    torch.distributed.barrier()
    if (lora := training.hyper.lora) is not None:
        adapter = draft / checkpoints.ADAPTER
        write_adapter(training.inner, training.model, lora, spec.parent, adapter)
        fold(training.inner)
    export_weights(training, draft)
    found = training.score(Samples.of(prompts), temperature=1.0)
    torch.distributed.barrier()
    if main:
        copy_settings(training.parent, draft, tied=training.model.tied)
        files = hash_files(draft)
        manifest = Manifest(
            files=files,
            weights_sha256=checkpoints.weights_sha256(files),
            parent_sha256=spec.parent_sha256,
            job=spec.id,
            dataset=spec.dataset,
            metrics=metrics,
            probe=[
                ProbePrompt(token_ids=prompt, logprobs=logprobs.tolist())
                for prompt, logprobs in zip(prompts, found, strict=True)
            ],
        )
        text = checksums.with_crc(manifest.model_dump_json(indent=1).encode())
        durable.replace_file(draft / "manifest.json", text)
        if not publish_folder(draft, final):
            shutil.rmtree(draft)
    torch.distributed.barrier()


PROBE_PROMPTS = 8
PROBE_TOKENS = 64


def probe_prompts(samples: Samples) -> list[list[int]]:
    """The golden prompts of a dataset: starts and ends, by turns, of its first samples.

    The first samples often start alike (a system prompt); their ends differ.
    """
    found: list[list[int]] = []
    for number, ids in enumerate(samples.tokens):
        window = ids[-PROBE_TOKENS:] if number % 2 else ids[:PROBE_TOKENS]
        prompt = [int(token) for token in window]
        if prompt not in found:
            found.append(prompt)
        if len(found) == PROBE_PROMPTS:
            break
    return found
