"""What each rank of a job does: join, look back, restore, train, save now and then, publish.

The file reads top to bottom like that sentence. launch.py calls `run` in a forked process; every
step of it is collective, so all ranks always agree on what comes next. Read next: train.py.
"""

import math
import os
import resource as limits
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from cray_agents.errors import JobError
from cray_agents.trainers.checkpointing import hf_export, resume
from cray_agents.trainers.checkpointing.hf_export import probe_prompts
from cray_agents.trainers.checkpointing.save import Saver
from cray_agents.trainers.data.baseline_logprobs import Known
from cray_agents.trainers.job import engine_agreement
from cray_agents.trainers.job.baselines import Baselines
from cray_agents.trainers.job.job_inputs import JobInputs
from cray_agents.trainers.job.launch import EX_TEMPFAIL, StopFlag
from cray_agents.trainers.planning.arithmetic import flops_per_token
from cray_agents.trainers.planning.hardware import peak_flops
from cray_agents.trainers.training.parallel_groups import agree, is_main, join_ranks
from cray_agents.trainers.training.train_step import StepReport, Stopped, Training

RECENT = 50  # steps whose gradient norms a new one is compared with
EXPLODED = 1000.0  # times the largest of them
SMALL = 1.0  # the least that it counts as: a gradient below is not even clipped, by default


@dataclass
class JobTotals:
    """Kept in every resume point, so that a restarted job counts on."""

    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0  # spent in steps
    norms: list[float] = field(default_factory=list)  # of the last RECENT gradients
    evaluated: int = -1  # after how many steps that was done last

    def add(self, report: StepReport, seconds: float, before: int) -> None:
        """Count a step, with so many before it.

        Raises JobError when its loss or gradient makes no sense.
        """
        for name, value in (("loss", report.loss), ("gradient norm", report.grad_norm)):
            if not math.isfinite(value):
                raise _nonsense(f"the {name} is {value}", report, before)
        # not what is usual: where few batches have anything to learn, that is next to nothing
        largest = max(SMALL, *self.norms) if len(self.norms) >= 10 else math.inf
        if report.grad_norm > EXPLODED * largest:
            what = f"the gradient norm is {report.grad_norm:g}, and was at most {largest:g} before"
            raise _nonsense(what, report, before)
        self.norms = [*self.norms[1 - RECENT :], report.grad_norm]
        self.loss_first = report.loss if self.loss_first is None else self.loss_first
        self.loss_last = report.loss
        self.trained_tokens += report.tokens
        self.seconds += seconds

    def state(self) -> dict[str, Any]:
        """Plain data for a resume point."""
        return vars(self).copy()

    def summary(self) -> dict[str, Any]:
        """What the checkpoint's manifest says."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        del known["norms"], known["evaluated"]
        return known


def _nonsense(what: str, report: StepReport, before: int) -> JobError:
    return JobError(
        f"{what} after {before} whole steps (learning rate {report.learning_rate:g}): nothing was"
        " saved from there; lower the learning rate, or look at the parent's weights and the"
        " samples"
    )


def run(work: JobInputs, on_cpu: bool, rank: int, store: Any, stop: StopFlag) -> int:
    """Do one rank's part of a job; returns its exit code. Raises CrayError on bad inputs.

    Asked to stop, or superseded, it ends within a step, or between two parts of what takes longer.
    """
    spec = work.spec
    # they would fill the end of the log, where the reason of a death is looked for
    warnings.filterwarnings("ignore", category=FutureWarning)
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu)
    attempt, *points = agree((work.attempt, work.resume_from, work.optimizer_from))

    def asked_to_stop() -> bool:
        return stop.set or (
            is_main() and (work.journal.paused or bool(work.journal.fenced(attempt)))
        )

    training = Training(
        work.model,
        spec.layout,
        spec.hyperparameters,
        work.parent,
        on_cpu,
        method=spec.method,
        recompute=spec.recompute,
        asked_to_stop=asked_to_stop,
    )
    try:
        known, validation = look_back(training, work)
        progress = restore(training, *points)
        finished = train(training, work, known, validation, attempt, progress)
        if finished and may_publish(work, attempt):
            training.finish()
            hf_export.publish(
                training,
                spec,
                probe_prompts(work.samples),
                {**progress.summary(), "steps": training.done},
                work.journal.home.checkpoint(f".{spec.id}.{attempt}"),
                work.journal.home.checkpoint(spec.id),
            )
    except Stopped:
        finished = False
    code = 0 if finished or not may_publish(work, attempt) else EX_TEMPFAIL
    torch.distributed.destroy_process_group()
    return code


def look_back(training: Training, work: JobInputs) -> tuple[Known, Known | None]:
    """What the weights before training say of the samples; proves that the engine agrees."""
    comparable = agree(work.comparable)  # nodes may have looked at different times
    found = engine_agreement.compare(comparable, training.score(comparable))
    if found is not None:
        limit = engine_agreement.limit_of(work.spec)
        if is_main():
            work.journal.event("agreement", **vars(found), limit=limit)
        found.refuse(limit)
    baselines = Baselines(training, work.spec, work.reference, work.journal.folder / "baselines")
    known = baselines.of_training(work.samples)
    if work.validation is None:
        return known, None
    return known, baselines.of_validation(work.validation)


def restore(training: Training, point: Any, optimizer_from: Any) -> JobTotals:
    """Go on from a resume point of this job, or with the optimizer of another, or from nothing."""
    if point is not None:
        return JobTotals(**resume.load(training, point))
    if optimizer_from is not None:
        resume.load(training, optimizer_from)
        training.restart()
    return JobTotals()


def train(
    training: Training,
    work: JobInputs,
    known: Known,
    validation: Known | None,
    attempt: int,
    progress: JobTotals,
) -> bool:
    """Train to the last step, saving on the way; False when asked to stop, or paused, before."""
    spec, steps = work.spec, work.spec.hyperparameters.steps
    saver = Saver(
        training,
        work.megatron,
        attempt,
        spec.keep,
        may_publish=lambda: work.journal.fenced(attempt) is None,
        tell=lambda step, seconds: work.journal.event("saved", step=step, seconds=seconds),
    )

    def to_evaluate() -> bool:
        done = training.done
        due = done == steps or done % (spec.evaluate_every or steps) == 0
        return validation is not None and due and progress.evaluated < done

    begun, stopped = training.done, False
    while not stopped and (training.done < steps or to_evaluate()):
        try:
            if validation is not None and to_evaluate():
                evaluate(training, work, validation, progress)
            else:
                stopped = step(training, work, known, progress)
        except Stopped:
            stopped = True
        if stopped and not may_publish(work, attempt):
            return False  # nothing is left to save for: another attempt goes on, or none
        due = training.done == steps or training.done % spec.save_every == 0
        if training.done > begun and (stopped or (due and not to_evaluate())):
            saver.save(progress.state())
        saver.poll()
    saver.finish()
    return training.done == steps and not to_evaluate()


def step(training: Training, work: JobInputs, known: Known, progress: JobTotals) -> bool:
    """Train one step and tell of it; returns whether to stop."""
    begun, before = time.perf_counter(), training.done
    report = training.step(known)
    seconds = time.perf_counter() - begun
    progress.add(report, seconds, before)
    if is_main():
        tell(training, work, report, seconds)
    return report.stop


def tell(training: Training, work: JobInputs, report: StepReport, seconds: float) -> None:
    """Write a step's line into the job's events."""
    rate = report.processed / seconds
    values: dict[str, Any] = {
        "step": training.done,
        "loss": report.loss,
        "lr": report.learning_rate,
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "tokens_per_second": rate,
        "seconds": seconds,
        "memory_gib": memory_gib(training.on_cpu),
        **report.measures,
    }
    if not training.on_cpu and (peak := peak_flops(torch.cuda.get_device_name())):
        flops = flops_per_token(work.model, report.length, training.hyper.lora)
        values["mfu"] = rate * flops / (peak * training.layout.world)
    work.journal.event("step", **values)


def memory_gib(on_cpu: bool) -> float:
    """The most memory that this rank has held so far, in GiB: of its GPU, else of its process."""
    if on_cpu:
        return limits.getrusage(limits.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.cuda.max_memory_allocated() / 2**30


def evaluate(training: Training, work: JobInputs, validation: Known, progress: JobTotals) -> None:
    """The loss on the validation split, as an event and for the manifest."""
    loss, measures = training.evaluate(validation)
    progress.validation_loss, progress.evaluated = loss, training.done
    if is_main():
        tokens = int(validation.marks.sum())
        work.journal.event("evaluation", step=training.done, loss=loss, tokens=tokens, **measures)


def may_publish(work: JobInputs, attempt: int) -> bool:
    """Whether this attempt is still the one; rank 0 looks, all ranks do as it says."""
    return agree(work.journal.fenced(attempt) if is_main() else None) is None
