"""Golden stage: a small model's losses and gradients on the device against float32 on the CPU."""

import os
import subprocess
import sys
import time
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.errors import JobError
from cray_agents.training_jobs import Hyperparameters
from tests.gpu.bench import FULL, Bench, Failed, kernel_paths, layers_of
from tests.gpu.report import Report

STEPS = 6
MODELS = ("small", "small-moe")
#: Bounds of the largest relative difference: of a loss, and of a tensor's gradient by its norm.
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 1e-2)}
#: A gradient may also be as far off as this many times what the dtype's rounding makes on the CPU:
#: those of norms and of q and k are small at the start, and bfloat16 is far off for any kernel.
ROUNDINGS = 4.0


def main(bench: Bench) -> None:
    """Compare both dtypes, in each kind of layers."""
    if bench.on_cpu:
        golden(bench)
    else:  # a process that sees no GPU
        command = [sys.executable, "-m", "tests.gpu.golden", str(bench.folder)]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=hidden, check=True)
    failed = []
    for name, path, dtype in product(MODELS, kernel_paths(bench.on_cpu), BOUNDS):
        row: dict[str, object] = {"model": name, "dtype": dtype, "layers": path}
        out = bench.folder / f"{name}-{path}-{dtype}.npz"
        try:
            bench.in_rank(train, name, dtype, path, out)
        except JobError as death:
            bench.report.add("golden", **row, problem=last_line(death))
            failed.append(f"{name}, {path} in {dtype}")
            continue
        rounded = bench.folder / f"golden-{name}-{dtype}.npz"
        loss, gradient, tensor = compare(
            bench.folder / f"golden-{name}-float32.npz", rounded, out, BOUNDS[dtype][1]
        )
        ok = loss <= BOUNDS[dtype][0] and gradient <= 1.0  # False if not a number
        bench.report.add(
            "golden", **row, loss_apart=loss, bound=BOUNDS[dtype][0], gradient_apart=gradient,
            gradient_bound=1.0, worst=tensor, ok=ok,
        )  # fmt: skip
        if not ok:
            failed.append(f"{name}, {path} in {dtype}")
    if failed:
        raise Failed(f"not as on the CPU: {', '.join(failed)}")


def golden(bench: Bench) -> None:
    """Train on the CPU in both dtypes: float32 is the truth, bfloat16 tells what rounding makes."""
    for name, dtype in product(MODELS, BOUNDS):
        bench.in_rank(train, name, dtype, "cpu", bench.folder / f"golden-{name}-{dtype}.npz")


def last_line(death: JobError) -> str:
    """Return the last line of a dead rank's log."""
    return next(reversed(death.log_tail.strip().splitlines()), str(death))[:200]


def train(bench: Bench, name: str, dtype: str, path: str, out: Path) -> None:
    """In a rank: train some steps; write the losses, and the first step's gradients."""
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.tensors import tensor_shapes
    from cray_agents.trainers.models.weights import export_tensors, plan_export
    from cray_agents.trainers.training.train_step import RankTraining
    from cray_agents.training_jobs import Layout

    parent, model = bench.model(name)
    hyper = Hyperparameters(
        steps=STEPS,
        batch_size=8,
        learning_rate=1e-3,
        clip_grad=1e9,  # gradients are compared as they were computed
        max_tokens_per_microbatch=128,
        dtype=dtype,
        init="random",  # made on the CPU: the same on every device
    )
    with layers_of(path):
        training = RankTraining(model, Layout(), hyper, parent, bench.on_cpu)
    random = np.random.default_rng(1)
    starts = zip(random.integers(0, model.vocab, 32), random.integers(1, 5, 32), strict=True)
    rows = [[int(a + b * i) % model.vocab for i in range(8 + n)] for n, (a, b) in enumerate(starts)]
    known = BaselineLogprobs(Samples.of(rows))
    losses: list[float] = []
    found: dict[str, Any] = {}
    for step in range(STEPS):
        losses.append(training.step(known).loss)
        if step == 0:
            plan = plan_export(training.chunks, model, dict.fromkeys(tensor_shapes(model), 0))
            tensors = export_tensors(plan, model, of=attrgetter("main_grad"))
            found = {name: tensor.float().cpu().numpy().copy() for name, tensor in tensors}
    np.savez(out, losses=np.array(losses), **found)


def compare(truth: Path, rounded: Path, other: Path, floor: float) -> tuple[float, float, str]:
    """Return the largest relative differences of losses and of gradients, and whose that is.

    A gradient's is a share of its bound: `floor`, or some times what rounding alone makes.
    """

    def apart(one: Any, name: str) -> float:
        return float(np.linalg.norm(one[name] - want[name]) / np.linalg.norm(want[name]))

    with np.load(truth) as want, np.load(rounded) as usual, np.load(other) as got:
        assert sorted(want) == sorted(got)
        losses = np.abs(got["losses"] - want["losses"]) / want["losses"]
        shares = {
            name: apart(got, name) / max(floor, ROUNDINGS * apart(usual, name))
            for name in want
            if name != "losses"
        }
    worst = max(shares, key=lambda name: (np.isnan(shares[name]), shares[name]))
    return float(losses.max()), shares[worst], worst


if __name__ == "__main__":
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    folder = Path(sys.argv[1])
    alone = Bench(Report(folder), folder, FULL, on_cpu=True, deadline=time.monotonic() + 600)
    golden(alone)
