"""A job's delta checkpoint: written by every rank for its share, and whole to the byte."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.records import DeltaOf, Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.checksums import BLAKE3, hash_of
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.checkpoints import hash_files
from cray_agents.runtime.registry.deltas import build, materialize
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

pytestmark = pytest.mark.slow

LIMIT = 40_000  # bytes a file
SHARE = 20_000  # bytes before another rank writes too


def exported_thrice(folder: Path, layout: Layout, out: Path, rank: int, store: Any, _: Any) -> int:
    """One rank: change a 50th of the weights and export both ways, then change them all."""
    import torch

    from cray_agents.trainers.checkpointing import hf_export

    hyper = Hyperparameters(learning_rate=1e-3, steps=1)
    training = training_in_rank(folder, layout, hyper, rank, store)
    for name, changes, step in (("full", False, 50), ("delta", True, 0), ("all", True, 1)):
        with torch.no_grad():
            for parameter in (p for chunk in training.chunks for p in chunk.parameters() if step):
                parameter.view(-1)[::step] *= 1.5
        result = hf_export.export(training, out / name, LIMIT, SHARE, changes=changes)
        if rank == 0:
            (out / f"{name}.json").write_text(json.dumps(result))
    return 0


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(tensor=2)], ids=["data", "tensor"])
def test_changes_of_all_ranks_make_the_files_of_a_full_export(
    models: Callable[[str], Path], tmp_path: Path, layout: Layout
) -> None:
    for name in ("full", "delta", "all", "built"):
        (tmp_path / name).mkdir()
    work = partial(exported_thrice, models("qwen3"), layout, tmp_path)
    assert run_forked(layout.world, tmp_path / "logs", work) is None

    whole, _ = json.loads((tmp_path / "full.json").read_text())
    hashes, packed = json.loads((tmp_path / "delta.json").read_text())
    assert list(packed) == list(hashes) and len(packed) > 4
    assert not list((tmp_path / "delta").glob("*.safetensors"))
    delta = DeltaOf(parent="p", parent_weights_sha256="", files=packed)
    manifest = Manifest(files=hashes, weights_sha256="", delta=delta)
    build(tmp_path / "delta", manifest, models("qwen3"), tmp_path / "built")
    assert {name: hash_of(tmp_path / "built" / name, BLAKE3) for name in hashes} == hashes
    assert hashes == whole
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*"))
        for name in ("delta/delta", "built")
    ]
    assert sizes[0] < sizes[1] / 4

    hashes, packed = json.loads((tmp_path / "all.json").read_text())
    assert packed == {} and not (tmp_path / "all" / "delta").exists(), "it would not pay"
    assert {name: hash_of(tmp_path / "all" / name, BLAKE3) for name in hashes} == hashes


@pytest.mark.parametrize("backend", ["megatron", "transformers"])
def test_a_job_publishes_what_it_changed(lab: Any, backend: str) -> None:
    """In bfloat16 a small step leaves most weights as they are."""
    import torch
    from safetensors.torch import load_file, save_file

    source, parent = lab.models("qwen3"), lab.home.checkpoint("parent")
    parent.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (parent / path.name).write_bytes(path.read_bytes())
    tensors = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    files = hash_files(parent)
    made = Manifest(files=files, weights_sha256=checkpoints.weights_sha256(files))
    text = checksums.with_crc(made.model_dump_json().encode())
    (parent / checkpoints.MANIFEST).write_bytes(text)
    lab.dataset()
    hyper = {"steps": 2, "learning_rate": 1e-5, "dtype": "bfloat16", "backend": backend}
    spec = lab.spec(parent, hyper=hyper, layout={"data": 2}, changes_only=True)
    assert spec.id == spec.model_copy(update={"changes_only": False}).id
    lab.run(spec)
    child = lab.home.checkpoint(spec.id)
    manifest = checkpoints.verify(child)
    assert manifest.delta is not None and manifest.delta.parent == "parent"
    assert manifest.delta.parent_weights_sha256 == made.weights_sha256
    assert not list(child.glob("*.safetensors")) and manifest.probe
    materialize(lab.home, child)
    checkpoints.verify(child)
    trained = load_file(child / "model.safetensors")
    total = sum(tensor.numel() for tensor in tensors.values())
    changed = sum(int((trained[name] != tensors[name]).sum()) for name in tensors)
    assert 0 < changed < total / 2 and set(trained) == set(tensors)
    assert all(tensor.dtype == torch.bfloat16 for tensor in trained.values())
