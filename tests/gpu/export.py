"""Export stage: rates of a checkpoint's way from the device to the disk, step by step and whole."""

import os
import shutil
from typing import Any

from bench.exporting import write_plainly
from cray_agents.runtime.disk.checksums import BLAKE3, FileHash
from tests.gpu.bench import Bench, seconds_of
from tests.gpu.speed import hyperparameters

HASHED = 1 << 30  # bytes
TIMES = 2  # the second of each is reported: the first finds cold pages


def main(bench: Bench, stage: str, name: str) -> None:
    bench.in_rank(measure, stage, name)


def measure(bench: Bench, stage: str, name: str) -> None:
    """In a rank: copy all weights to the host, hash and write as many bytes, and export them."""
    import torch

    from cray_agents.trainers.checkpointing import hf_export

    training = bench.build(name, hyperparameters(1, bench.scale.longest))
    weights = [p.detach() for chunk in training.chunks for p in chunk.parameters()]
    size = sum(p.numel() * p.element_size() for p in weights)
    target = bench.folder / "export"

    def add(what: str, content: int, work: Any) -> None:
        seconds = [seconds_of(bench, work) for _ in range(TIMES)][-1]
        rate = content / 1e9 / seconds
        bench.report.add(
            stage, model=name, what=what, gb=content / 1e9, seconds=seconds, gb_per_second=rate
        )

    add("device to host", size, lambda: [p.cpu() for p in weights])
    if not bench.on_cpu:
        largest = max(p.numel() * p.element_size() for p in weights)
        room = torch.empty(largest, dtype=torch.uint8, pin_memory=True)

        def copy_pinned() -> None:
            for p in weights:
                flat = p.reshape(-1).view(torch.uint8)
                room[: flat.numel()].copy_(flat, non_blocking=True)

        add("device to pinned memory", size, copy_pinned)
        del room
    block = os.urandom(min(size, HASHED))
    add("BLAKE3", len(block), lambda: FileHash(BLAKE3).update(block))
    plain = bench.folder / "plain"
    content = [memoryview(block)] * -(-size // len(block))
    add("write + fsync", size, lambda: write_plainly(plain, content, size))
    plain.unlink()

    def export() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        hf_export.export_weights(training, target)

    add("export: copy, write, hash, fsync", size_of_export(training), export)
    shutil.rmtree(target)


def size_of_export(training: Any) -> int:
    """Return the bytes of the stored weights."""
    from cray_agents.trainers.models.weights import InitialWeights
    from cray_agents.trainers.planning.arithmetic import count_weights

    stored = InitialWeights(training.model, 0).dtype("any")
    return count_weights(training.model).total * stored.itemsize
