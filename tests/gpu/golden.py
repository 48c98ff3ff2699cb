"""Golden stage: a small model's losses and gradients on the device against float32 on the CPU."""

import os
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.errors import JobError
from cray_agents.training_jobs import Hyperparameters
from tests.gpu.bench import FULL, Bench, Failed, kernel_paths, layers_of
from tests.gpu.report import Report

STEPS = 6
#: Bounds of the largest relative difference: of a loss, and of a tensor's gradient by its norm.
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 1e-1)}


def main(bench: Bench) -> None:
    """Compare both dtypes, in each kind of layers."""
    golden = bench.folder / "golden.npz"
    if bench.on_cpu:
        bench.in_rank(train, "float32", "cpu", golden)
    else:  # a process that sees no GPU
        command = [sys.executable, "-m", "tests.gpu.golden", str(bench.folder)]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=hidden, check=True)
    failed = []
    for path in kernel_paths(bench.on_cpu):
        for dtype, bounds in BOUNDS.items():
            row: dict[str, object] = {"dtype": dtype, "layers": path}
            try:
                out = bench.folder / f"{path}-{dtype}.npz"
                bench.in_rank(train, dtype, path, out)
            except JobError as death:
                bench.report.add("golden", **row, problem=last_line(death))
                failed.append(f"{path} in {dtype}")
                continue
            loss, gradient, tensor = compare(golden, out)
            ok = loss <= bounds[0] and gradient <= bounds[1]  # False if not a number
            bench.report.add(
                "golden", **row, loss_apart=loss, bound=bounds[0], gradient_apart=gradient,
                gradient_bound=bounds[1], worst=tensor, ok=ok,
            )  # fmt: skip
            if not ok:
                failed.append(f"{path} in {dtype}")
    if failed:
        raise Failed(f"not as on the CPU: {', '.join(failed)}")


def last_line(death: JobError) -> str:
    """Return the last line of a dead rank's log."""
    return next(reversed(death.log_tail.strip().splitlines()), str(death))[:200]


def train(bench: Bench, dtype: str, path: str, out: Path) -> None:
    """In a rank: train some steps; write the losses, and the first step's gradients."""
    from cray_agents.trainers.data.baseline_logprobs import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.tensors import tensor_shapes
    from cray_agents.trainers.models.weights import export_tensors, plan_export
    from cray_agents.trainers.training.train_step import Training
    from cray_agents.training_jobs import Layout

    parent, model = bench.model("small")
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
        training = Training(model, Layout(), hyper, parent, bench.on_cpu)
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


def compare(golden: Path, other: Path) -> tuple[float, float, str]:
    """Return the largest relative differences of losses and of gradients, and whose that is."""
    with np.load(golden) as want, np.load(other) as got:
        assert sorted(want) == sorted(got)
        losses = np.abs(got["losses"] - want["losses"]) / want["losses"]
        apart = {
            name: float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name]))
            for name in want
            if name != "losses"
        }
    worst = max(apart, key=lambda name: (np.isnan(apart[name]), apart[name]))
    return float(losses.max()), apart[worst], worst


if __name__ == "__main__":
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    folder = Path(sys.argv[1])
    alone = Bench(Report(folder), folder, FULL, on_cpu=True, deadline=time.monotonic() + 600)
    alone.in_rank(train, "float32", "cpu", folder / "golden.npz")
