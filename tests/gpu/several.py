"""Stages of several ranks: a split model learns as a whole one, in whatever layout it goes on.

A hang is told with its cause. All take two GPUs, or two ranks on the CPU, and leave a note where
there is one GPU.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from cray_agents.errors import JobError
from cray_agents.trainers.job.failures.rank_monitor import SILENCE_VARIABLE, read_end
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.gpu.bench import Bench, Failed
from tests.gpu.speed import data

LIMIT = "20"  # seconds without progress; five times as long before the first step
STEPS = 3
BOUND = 1e-4  # between losses, relative: float32, and another order of sums
SPLIT = (
    ("small", Layout(tensor=2)),
    ("small", Layout(pipeline=2)),
    ("small-moe", Layout(data=2, expert=2)),
)
#: From the layout that saves to the one that goes on.
MOVES = (
    ("small", Layout(tensor=2), Layout(pipeline=2)),
    ("small", Layout(data=2), Layout(tensor=2)),
    ("small-moe", Layout(data=2, expert=2), Layout(data=2)),
)


# ---- a hang
def hang(bench: Bench, stage: str) -> None:
    """Let a rank stop in its own code; the launcher has to name it, and what the other waits in."""
    if bench.most_ranks < 2:
        bench.report.add(stage, note="one GPU: not run")
        return
    begun = time.monotonic()
    os.environ[SILENCE_VARIABLE] = LIMIT
    why: JobError | None = None
    try:
        bench.in_rank(stop_after_steps, layout=Layout(data=2))
    except JobError as error:
        why = error
    finally:
        del os.environ[SILENCE_VARIABLE]
    end = read_end(bench.folder)
    seconds = time.monotonic() - begun
    if not (bench.folder / "hangs").is_dir():
        raise Failed(f"no hang was found: {why}; {end}")
    (report,) = (bench.folder / "hangs").iterdir()
    known = "collectives are not known" not in report.read_text()
    how = "" if end is None else end.how
    bench.report.add(
        stage, model="small", seconds=seconds, limit=float(LIMIT), how=how, recorded=known
    )
    if end is None or end.rank != 1 or "stop_after_steps" not in how or "rank 0 waits" not in how:
        raise Failed(f"rank 1 stopped in stop_after_steps, and the report says: {end}")
    if not known:
        raise Failed(f"collectives are not known: {report.read_text()[-2000:]}")


def stop_after_steps(bench: Bench) -> None:
    """In each rank: take steps together; then rank 1 does nothing more."""
    import torch

    training, known = build(bench, "small", Layout(data=2))
    for _ in range(STEPS):
        training.step(known)
    if torch.distributed.get_rank() == 1:
        time.sleep(600)
    training.step(known)


# ---- parallel layouts
def parallel(bench: Bench, stage: str) -> None:
    """Compare the losses of tensor, pipeline and expert parallelism with those of one rank."""
    if bench.most_ranks < 2:
        bench.report.add(stage, note="one GPU: not run")
        return
    failed = []
    for name, layout in SPLIT:
        whole, split = (losses(bench, name, one) for one in (Layout(), layout))
        apart = max(abs(a - b) / b for a, b in zip(split, whole, strict=True))
        ok = apart <= BOUND  # False if not a number
        words = describe(layout)
        bench.report.add(
            stage, model=name, layout=words, loss_last=split[-1], apart=apart, bound=BOUND, ok=ok
        )
        if not ok:
            failed.append(f"{name} with {words}")
    if failed:
        raise Failed(f"not as on one rank: {', '.join(failed)}")


def losses(
    bench: Bench,
    name: str,
    layout: Layout,
    steps: int = STEPS,
    *,
    save: Path | None = None,
    start: Path | None = None,
) -> list[float]:
    """Return the losses of some steps in a layout; save in a folder, start at a resume point."""
    out = bench.folder / "losses.json"
    bench.in_rank(take_steps, name, layout, steps, save, start, out, layout=layout)
    found: list[float] = json.loads(out.read_bytes())
    return found


def take_steps(
    bench: Bench,
    name: str,
    layout: Layout,
    steps: int,
    save: Path | None,
    start: Path | None,
    out: Path,
) -> None:
    """In each rank: take steps; rank 0 writes the losses, which all ranks have."""
    from cray_agents.trainers.checkpointing.resume import load
    from cray_agents.trainers.checkpointing.save import Saver
    from cray_agents.trainers.training.parallel_groups import is_rank0

    training, known = build(bench, name, layout)
    if start is not None:
        load(training, start)
    found = [training.step(known).loss for _ in range(steps)]
    if save is not None:
        saver = Saver(training, save, 1, 1, lambda: True)
        saver.save({})
        saver.finish()
    if is_rank0():
        out.write_text(json.dumps(found))


def resume(bench: Bench, stage: str) -> None:
    """Save in one layout, go on in another: the losses are those of training without a stop."""
    from cray_agents.trainers.checkpointing.save import folder_name

    if bench.most_ranks < 2:
        bench.report.add(stage, note="one GPU: not run")
        return
    failed = []
    for name, first, second in MOVES:
        through = losses(bench, name, first, 2 * STEPS)
        points = bench.folder / "points"
        points.mkdir()
        losses(bench, name, first, save=points)
        again = losses(bench, name, second, start=points / folder_name(STEPS))
        shutil.rmtree(points)
        apart = max(abs(a - b) / b for a, b in zip(again, through[STEPS:], strict=True))
        words = " then ".join(map(describe, (first, second)))
        ok = apart <= BOUND  # False if not a number
        bench.report.add(stage, model=name, layouts=words, apart=apart, bound=BOUND, ok=ok)
        if not ok:
            failed.append(f"{name}: {words}")
    if failed:
        raise Failed(f"not as without a stop: {', '.join(failed)}")


def describe(layout: Layout) -> str:
    return ", ".join(f"{k}={v}" for k, v in layout.model_dump(exclude_defaults=True).items())


def build(bench: Bench, name: str, layout: Layout) -> tuple[Any, Any]:
    """Return a training with random weights, which are made on the CPU, and a step's samples."""
    from cray_agents.trainers.training.train_step import RankTraining

    parent, model = bench.model(name)
    known = data(bench, model.vocab, "chats")
    hyper = Hyperparameters(
        steps=10**6,
        batch_size=len(known.samples),
        learning_rate=1e-3,
        max_tokens_per_microbatch=bench.scale.microbatches[0],
        init="random",
    )
    return RankTraining(model, layout, hyper, parent, bench.on_cpu), known
