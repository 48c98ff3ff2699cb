"""Exporting 1 GB of weights by two ranks, hashes included, against the disk's plain write rate."""

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.rounds import ROUNDS
from cray_agents.training_jobs import Hyperparameters, Layout

LAYOUTS = {"two data ranks": Layout(data=2), "two tensor ranks": Layout(tensor=2)}
BLOCK = 16 << 20


def model(folder: Path) -> Path:
    """The config of a Qwen3 of 258M parameters, 1.03 GB in float32."""
    from transformers import Qwen3Config

    Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=20,
        intermediate_size=3072,
        vocab_size=16384,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="float32",
    ).save_pretrained(folder)
    return folder


def measure(parent: Path, layout: Layout, folder: Path, rank: int, store: Any, stop: Any) -> int:
    """In a rank: export, and write as many bytes plainly, in turn; write the seconds down."""
    import torch

    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    hyper = Hyperparameters(learning_rate=1e-3, steps=1, init="random")
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    training = RankTraining(read_architecture(parent), layout, hyper, parent, on_cpu=True)
    weights = [
        memoryview(parameter.detach().view(-1).numpy()).cast("B")
        for chunk in training.chunks
        for parameter in chunk.parameters()
    ]
    target, plain = folder / "export", folder / f"plain-{rank}"
    found: dict[str, list[float]] = {"export": [], "plain": []}
    size = 0

    def timed(what: str, act: Callable[[], object]) -> None:
        torch.distributed.barrier()
        began = time.perf_counter()
        act()
        torch.distributed.barrier()  # until both are done
        found[what].append(time.perf_counter() - began)

    for _ in range(ROUNDS):
        target.mkdir(exist_ok=True)
        timed("export", lambda: hf_export.export_weights(training, target))
        size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(target)
        timed("plain", partial(write_plainly, plain, weights, size // layout.world))
        plain.unlink()
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps({**found, "size": size}))
    return 0


def write_plainly(path: Path, weights: list[memoryview], size: int) -> None:
    """Write this many bytes of a rank's weights into a file, and fsync it."""
    with path.open("wb", buffering=0) as file:
        for content in weights:
            content = content[:size]
            size -= len(content)
            while content:
                content = content[file.write(content[:BLOCK]) :]
        os.fsync(file.fileno())


async def main(home: Path) -> None:
    """A row for each layout: medians of rounds that take turns, and of their ratios."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    for name, layout in LAYOUTS.items():
        folder = home / name
        work = partial(measure, model(folder / "model"), layout, folder)
        run_ranks(find_placement(layout.world, "bench"), folder / "logs", work)
        found = json.loads((folder / "seconds.json").read_bytes())
        rates = {
            what: [found["size"] / 1e6 / s for s in found[what]] for what in ("export", "plain")
        }
        ratio = statistics.median(a / b for a, b in zip(*rates.values(), strict=True))
        export, plain = (statistics.median(each) for each in rates.values())
        what = f"{found['size'] / 1e9:.2f} GB of weights, {name}"
        of = "export with BLAKE3 / both ranks' plain write + fsync"
        print(f"| {what} | {of} | {export:,.0f} / {plain:,.0f} MB/s | {ratio:.2f} |", flush=True)
