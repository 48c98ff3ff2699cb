"""Session stage: from a job handed to a training session until its candidate is ready.

Trainer, local scheduler and session are those of a platform; only the dataset is made here. Each
job starts from what the one before published, as a loop's iterations do, and has to publish other
weights: in bfloat16 a small learning rate shows only in what the optimizer keeps in float32.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.gpu.bench import Bench, Failed, sequences

STEPS = 4
KEPT = ("LD_LIBRARY_PATH",)
PATHS = tuple(sys.path)  # before packages add folders of their own


def main(
    bench: Bench,
    stage: str,
    name: str,
    rate: float = 1e-5,
    lora: Lora | None = None,
    *,
    growing: bool = False,
) -> None:
    """Train a chain of jobs; a row for each says where its time went, and what it changed.

    `growing`: files have to differ more and more from those of the first job, as they do while
    the optimizer's weights, which are carried on, move away from where the first job rounded them.
    """
    from cray_agents.runtime.scheduler.gpu_placement import visible_gpus
    from cray_agents.runtime.scheduler.local import LocalProcesses
    from cray_agents.trainers.job.journal import JobJournal
    from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
    from cray_agents.trainers.planning.cluster_resources import Gpus, Resources

    home = Home(bench.folder / f"home-{stage}")
    parent, model = bench.model(name)
    count = write_dataset(home, sequences(bench.scale, model.vocab))
    gpus = visible_gpus(os.environ, 1)[:1] if not bench.on_cpu else []
    about = bench.report.read()["about"]
    has = None if bench.on_cpu else Gpus(about["device"], about["device GiB"], 1)
    with LocalProcesses(home.logs, gpus=gpus) as scheduler:
        trainer = MegatronTrainer(home, AsHere(scheduler), Resources(gpus=has))
        before: JobSpec | None = None
        first_job, least = "", 0.0
        for number in range(bench.scale.jobs):
            if bench.over:
                bench.report.add(stage, model=name, job=number + 1, problem="no time left")
                return
            spec = next_spec(home, parent, before, count, bench, rate, lora)
            begun = time.time()
            status = trainer.submit(spec)
            while status.state in ("queued", "running"):
                time.sleep(0.01)
                status = trainer.status(spec.id)
            total = time.time() - begun
            journal = JobJournal(home, spec.id)
            if status.state != "succeeded":
                raise Failed(f"{spec.id} {status.state}: {status.error or journal.log_tail()}")
            published = weights_of(home.checkpoint(spec.id))
            if published == spec.parent_sha256:
                raise Failed(f"{spec.id} published its parent's weights: nothing was learnt")
            events = list(journal.events())
            steps = sum(e["seconds"] for e in events if e["event"] == "step")
            first_job = first_job or spec.id
            since = differing(home.checkpoint(spec.id), home.checkpoint(first_job))
            bench.report.add(
                stage,
                model=name,
                job=number + 1,
                starts="the session" if before is None else "from memory",
                seconds=total,
                in_steps=steps,
                latency=total - steps,
                until_first_step=first(events, "step") - begun,
                checkpoint_gb=size_of(home.checkpoint(spec.id)) / 1e9,
                changed_share=status.changed_share,
                changed_since_first=since,
            )
            if status.warnings or not status.changed_share:
                raise Failed(
                    f"{spec.id} changed {status.changed_share}, and warns: {status.warnings}"
                )
            if growing and before is not None and not since > 1.1 * least:
                raise Failed(f"{spec.id} is {since} of the weights away from the first, as {least}")
            least = least or since
            if before is not None:  # resume points are six times as large as the weights
                shutil.rmtree(home.job(before.id) / "megatron")
            before = spec


class AsHere:
    """A Scheduler whose commands find the packages and libraries that this process finds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.name, self._scheduler = scheduler.name, scheduler

    def submit(self, command: Command) -> str:
        """Start a command. Raises Failed where a session ended before: it was not asked to."""
        if self._scheduler.status(command.name).state in ("failed", "succeeded"):
            raise Failed(f"the session ended: {Path(command.log).read_text()[-2000:]}")
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        paths = os.pathsep.join(str(Path(path).resolve()) for path in PATHS)
        environment = {**kept, "PYTHONPATH": paths, **command.environment}
        return self._scheduler.submit(command.model_copy(update={"environment": environment}))

    def status(self, name: str) -> CommandStatus:
        return self._scheduler.status(name)

    def cancel(self, name: str) -> None:
        self._scheduler.cancel(name)


def next_spec(
    home: Home,
    parent: Path,
    before: JobSpec | None,
    batch: int,
    bench: Bench,
    rate: float,
    lora: Lora | None,
) -> JobSpec:
    """Return the first job, which begins with random weights, or the next one of the chain.

    The first one trains all weights in any case.
    """
    from cray_agents.trainers.checkpointing.hf_export import parent_sha256

    if before is not None:
        parent = home.checkpoint(before.id)
    return JobSpec(
        dataset="gpu",
        parent=str(parent),
        parent_sha256=parent_sha256(parent, "random") if before is None else weights_of(parent),
        optimizer_from=before.id
        if before is not None and before.hyperparameters.lora == lora
        else None,
        hyperparameters=Hyperparameters(
            steps=STEPS,
            batch_size=batch,
            learning_rate=rate,
            lora=None if before is None else lora,
            max_tokens_per_microbatch=bench.scale.microbatches[0],
            dtype="bfloat16",
            init="random" if before is None else "parent",
        ),
        layout=Layout(),
        session="gpu",
    )


def weights_of(checkpoint: Path) -> str:
    """Return the hash of a checkpoint's weights, as its manifest has it."""
    return checksums.read_record(Manifest, checkpoint / "manifest.json").weights_sha256


def differing(one: Path, other: Path) -> float:
    """Return the share of the weights of two checkpoints of one model that are not equal.

    An adapter version has no weights of its own: 0.
    """
    from safetensors import safe_open

    count = different = 0
    for path in one.glob("*.safetensors"):
        with safe_open(path, "pt") as mine, safe_open(other / path.name, "pt") as theirs:
            for name in mine.keys():  # noqa: SIM118 (no mapping)
                weight = mine.get_tensor(name)
                count += weight.numel()
                different += int((weight != theirs.get_tensor(name)).sum())
    return different / max(1, count)


def write_dataset(home: Home, rows: list[list[int]]) -> int:
    """Write a training set of these sequences; return how many there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = home.dataset("gpu")
    folder.mkdir(parents=True)
    path = folder / "train-00000.parquet"
    columns = {
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "loss_mask": pa.array([[1] * len(row) for row in rows], pa.list_(pa.int8())),
        "weight": pa.array([1.0] * len(rows), pa.float64()),
    }
    pq.write_table(pa.table(columns), path)
    counts = {"samples": len(rows), "tokens": sum(map(len, rows))}
    manifest = {
        "method": "sft",
        "files": {path.name: {"sha256": durable.sha256_file(path)}},
        "splits": {"train": counts},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return len(rows)


def first(events: list[dict[str, Any]], kind: str) -> float:
    """Return when the first event of a kind was written."""
    return float(next(e["time"] for e in events if e["event"] == kind))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
