"""What each rank of a job does: join, restore, train, save now and then, publish.

The file reads top to bottom like that sentence. launch.py calls `run` in a forked process; every
step of it is collective, so all ranks always agree on what comes next. Read next: train.py.
"""

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from cray_agents.errors import JobError
from cray_agents.trainers import export, resume
from cray_agents.trainers.data import probe_prompts
from cray_agents.trainers.launch import EX_TEMPFAIL, StopFlag
from cray_agents.trainers.train import StepReport, Training, join_ranks
from cray_agents.trainers.work import Work


@dataclass
class Progress:
    """What accumulates over a job's life, across restarts."""

    loss_first: float | None = None
    loss_last: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0  # spent in steps

    def add(self, report: StepReport, seconds: float) -> None:
        """Count a step."""
        self.loss_first = report.loss if self.loss_first is None else self.loss_first
        self.loss_last = report.loss
        self.trained_tokens += report.tokens
        self.seconds += seconds


def run(work: Work, on_cpu: bool, rank: int, store: Any, stop: StopFlag) -> int:
    """Do one rank's part of a job; returns its exit code. Raises CrayError on bad inputs."""
    spec = work.spec
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu)
    attempt, *points = agree((work.attempt, work.resume_from, work.optimizer_from))
    training = Training(work.model, spec.layout, spec.hyperparameters, work.parent, on_cpu)
    progress = restore(training, *points)
    if not train(training, work, attempt, progress, stop):
        return EX_TEMPFAIL
    if not may_publish(work, attempt):
        return 0
    export.publish(
        training,
        spec,
        probe_prompts(work.samples),
        {**vars(progress), "steps": training.done},
        work.journal.home.checkpoint(f".{spec.id}.{attempt}"),
        work.journal.home.checkpoint(spec.id),
    )
    torch.distributed.destroy_process_group()
    return 0


def restore(training: Training, point: Any, optimizer_from: Any) -> Progress:
    """Go on from a resume point of this job, or with the optimizer of another, or from nothing."""
    if point is not None:
        return Progress(**resume.load(training, point))
    if optimizer_from is not None:
        resume.load(training, optimizer_from)
        training.restart_from_parent()
    return Progress()


def train(training: Training, work: Work, attempt: int, progress: Progress, stop: StopFlag) -> bool:
    """Train to the last step, saving on the way; False when asked to stop, or paused, before."""
    spec, steps = work.spec, work.spec.hyperparameters.steps
    main = torch.distributed.get_rank() == 0
    while training.done < steps:
        begun = time.perf_counter()
        report = training.step(work.samples, stop.set or (main and work.journal.paused))
        seconds = time.perf_counter() - begun
        refuse_nonsense(report, training.done)
        progress.add(report, seconds)
        if main:
            work.journal.event(
                "step",
                step=training.done,
                loss=report.loss,
                lr=report.learning_rate,
                grad_norm=report.grad_norm,
                tokens=report.tokens,
                tokens_per_second=report.tokens / seconds,
                seconds=seconds,
            )
        stopping = report.stop and training.done < steps
        due = training.done % spec.save_every == 0 or training.done == steps
        if (due or stopping) and may_publish(work, attempt):
            resume.save(training, work.megatron, attempt, vars(progress))
        if stopping:
            return False
    return True


def refuse_nonsense(report: StepReport, done: int) -> None:
    """Raises JobError when a step's loss or gradient is not a number."""
    for name, value in (("loss", report.loss), ("gradient norm", report.grad_norm)):
        if not math.isfinite(value):
            raise JobError(
                f"the {name} is {value} after {done} whole steps (learning rate"
                f" {report.learning_rate:g}): nothing was saved from there; lower the learning"
                " rate, or look at the parent's weights"
            )


def may_publish(work: Work, attempt: int) -> bool:
    """Whether this attempt is still the one; rank 0 looks, all ranks do as it says."""
    reason = work.journal.fenced(attempt) if torch.distributed.get_rank() == 0 else None
    return agree(reason) is None


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]
