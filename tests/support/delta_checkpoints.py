"""Checkpoints of a root, full or as what changed in another one, made without Megatron."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cray_agents.paths import Home
from cray_agents.records import DeltaOf, Manifest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.deltas import Parent
from cray_agents.trainers.checkpointing.weight_files import DeltaFile

Words = npt.NDArray[Any]
NAMES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}  # stored types by their bytes


def header(tensors: Mapping[str, Words]) -> bytes:
    """The header of a safetensors file, its length before it."""
    entries: dict[str, Any] = {}
    end = 0
    for name, words in tensors.items():
        start, end = end, end + words.nbytes
        entries[name] = {
            "dtype": NAMES[words.itemsize],
            "shape": words.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def full(home: Home, name: str, files: Mapping[str, Mapping[str, Words]]) -> Path:
    """A full checkpoint: its files of tensors by name."""
    directory = home.checkpoint(name)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for file, tensors in files.items():
        content = b"".join([header(tensors), *(words.tobytes() for words in tensors.values())])
        (directory / file).write_bytes(content)
    return _publish(directory, {})


def changed(
    home: Home, name: str, parent: str, files: Mapping[str, Mapping[str, Words]]
) -> tuple[Path, dict[str, int]]:
    """A delta checkpoint over a full one, and the bytes of its files."""
    directory = home.checkpoint(name)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    hashes, packed, sizes = {}, {}, {}
    with Parent(home.checkpoint(parent)) as base:
        for file, tensors in files.items():
            with DeltaFile(directory / file, base.tensors) as written:
                written.write(memoryview(header(tensors)))
                for words in tensors.values():
                    written.write(memoryview(words.tobytes()))
            hashes[file], packed[file] = written.hash, written.packed_sha256
            sizes[file] = written.size
    before = checkpoints.read_manifest(home.checkpoint(parent)).weights_sha256
    delta = DeltaOf(parent=parent, parent_weights_sha256=before, files=packed)
    return _publish(directory, hashes, delta), sizes


def _publish(directory: Path, hashes: dict[str, str], delta: DeltaOf | None = None) -> Path:
    files = dict(hashes)
    for path in directory.iterdir():
        if path.is_file():
            files[path.name] = durable.sha256_file(path)
    files = dict(sorted(files.items()))
    manifest = Manifest(files=files, weights_sha256=checkpoints.weights_sha256(files), delta=delta)
    text = checksums.with_crc(manifest.model_dump_json().encode())
    (directory / checkpoints.MANIFEST).write_bytes(text)
    return directory


def bfloat16(count: int, seed: int = 0) -> Words:
    """Random weights, as a model's."""
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2")


def with_changes(words: Words, share: float, seed: int = 1) -> Words:
    """The same, but for a share of the elements, which are other weights."""
    random = np.random.default_rng(seed)
    places = random.choice(len(words), int(share * len(words)), replace=False)
    other = words.copy()
    other[places] = bfloat16(len(words), seed + 1)[places] ^ 1
    return other
