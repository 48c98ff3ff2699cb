"""One rank of a job: join, score baselines, restore, train, save now and then, publish.

The functions below stand in this order. launch.py calls `run` in its process. Every step is
collective, so all ranks agree on the next one. Read next: training/train_step.py.
"""

import ctypes
import gc
import json
import math
import os
import resource as limits
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from cray_agents.errors import DiskFull, JobError
from cray_agents.records import LogprobDistance
from cray_agents.runtime.registry.checkpoints import base_of
from cray_agents.trainers import progress
from cray_agents.trainers.checkpointing import hf_export, resume
from cray_agents.trainers.checkpointing.hf_export import probe_prompts
from cray_agents.trainers.checkpointing.save import Saver
from cray_agents.trainers.checkpointing.state import allocate_moments
from cray_agents.trainers.data.packer import BaselineLogprobs
from cray_agents.trainers.job import engine_agreement, master_weights
from cray_agents.trainers.job.baselines import Baselines, LogprobsBySample
from cray_agents.trainers.job.command_run import run_commands
from cray_agents.trainers.job.failures.health_gate import check_ranks
from cray_agents.trainers.job.failures.rank_monitor import node_name
from cray_agents.trainers.job.job_inputs import JobInputs, choose_start
from cray_agents.trainers.job.job_versions import JobVersions
from cray_agents.trainers.job.launch import EX_TEMPFAIL, StopFlag
from cray_agents.trainers.job.weights_check import FailedEverywhere, check_parent, check_start
from cray_agents.trainers.models.lora import AdapterBase
from cray_agents.trainers.planning.arithmetic import flops_per_token
from cray_agents.trainers.planning.step_time import peak_flops
from cray_agents.trainers.progress import CLOCK
from cray_agents.trainers.training.parallel_groups import (
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
    join_ranks,
)
from cray_agents.trainers.training.train_step import RankTraining, StepReport, Stopped
from cray_agents.training_jobs import Layout

RECENT = 50  # steps whose gradient norms a new norm is compared with
EXPLODED = 1000.0  # times the largest recent norm
ROOM_TRIES, ROOM_PAUSE = 12, 5.0  # seconds between two trials to save on a full disk
TIDY_STEPS = 8  # after so many steps a process on a CPU returns its free memory
SMALL = 1.0  # floor for the largest recent norm: smaller gradients are not clipped by default


@dataclass
class JobTotals:
    """Totals of a job, kept in every resume point so that a restarted job continues them."""

    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0  # spent in steps
    norms: list[float] = field(default_factory=list)  # of the last RECENT gradients
    evaluated: int = -1  # the step of the last evaluation
    learning_rate: float | None = None  # of the last step

    def add(self, report: StepReport, seconds: float, before: int) -> None:
        """Count a step that follows `before` steps.

        Raises FailedEverywhere if the loss or the gradient norm is not finite, or the norm
        exploded.
        """
        for name, value in (("loss", report.loss), ("gradient norm", report.grad_norm)):
            if not math.isfinite(value):
                raise _nonsense(f"the {name} is {value}", report, before)
        # the largest, not the mean: it is almost 0 when few batches have anything to learn
        largest = max(SMALL, *self.norms) if len(self.norms) >= 10 else math.inf
        if report.grad_norm > EXPLODED * largest:
            problem = (
                f"the gradient norm is {report.grad_norm:g}, and was at most {largest:g} before"
            )
            raise _nonsense(problem, report, before)
        self.norms = [*self.norms[1 - RECENT :], report.grad_norm]
        self.loss_first = report.loss if self.loss_first is None else self.loss_first
        self.loss_last, self.learning_rate = report.loss, report.learning_rate
        self.trained_tokens += report.tokens
        self.seconds += seconds

    def check_schedule(self, step: int, rate: float) -> None:
        """Raise FailedEverywhere if `step`, the last one, had another learning rate than `rate`.

        The schedule would go on from another step, or with other settings, and no loss shows it.
        """
        before = self.learning_rate  # None: the resume point is an older version's
        if before is not None and not math.isclose(rate, before, rel_tol=1e-9):
            raise FailedEverywhere(
                f"step {step} had a learning rate of {before:g}, and after the resume the schedule"
                f" says {rate:g}: it does not go on from where the job stopped. Nothing was trained"
                " with it. Run the code that the job began with, or submit a new job"
            )

    def state(self) -> dict[str, Any]:
        """Plain data for a resume point."""
        return vars(self).copy()

    def summary(self) -> dict[str, Any]:
        """Return the totals for the checkpoint's manifest."""
        totals = {name: value for name, value in vars(self).items() if value is not None}
        del totals["norms"], totals["evaluated"]
        totals.pop("learning_rate", None)
        return totals


def _nonsense(problem: str, report: StepReport, before: int) -> FailedEverywhere:
    return FailedEverywhere(
        f"{problem} after {before} whole steps (learning rate {report.learning_rate:g}): nothing"
        " was saved from there; lower the learning rate, or look at the parent's weights and the"
        " samples"
    )


def run(work: JobInputs, on_cpu: bool, rank: int, store: Any, stop: StopFlag) -> int:
    """Do one rank's share of a job; return its exit code. Raises CrayError on bad inputs.

    When asked to stop or superseded, it ends within a step or between two slices of a longer task.
    """
    join(work.spec.layout, rank, store, on_cpu)
    attempt, *points = broadcast_from_rank0((work.attempt, *work.points))
    work = work.at(attempt, *points)  # each node read them at its own time
    work = check_start(work, partial(choose_start, on_cpu=on_cpu, ledger=None))
    training = build(work, on_cpu, stop)
    finished = execute(training, work)
    code = 0 if finished or not may_publish(work) else EX_TEMPFAIL
    torch.distributed.destroy_process_group()
    return code


def join(layout: Layout, rank: int, store: Any, on_cpu: bool) -> None:
    """Set up this rank's process, and join the other ranks. Collective."""
    # such warnings would fill the log's tail, which must show the cause of a death
    warnings.filterwarnings("ignore", category=FutureWarning)
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would make a plan for each new length
    join_ranks(layout, rank, layout.world, store, on_cpu)
    check_ranks(on_cpu)


def build(work: JobInputs, on_cpu: bool, stop: StopFlag, *, loaded: bool = True) -> RankTraining:
    """Build the job's model and optimizer on this rank, with the parent's weights. Collective.

    Without `loaded` the caller puts the weights in place. Raises FailedEverywhere if these are not
    the weights that the job was made for.
    """
    spec = work.spec
    with check_parent(work.parent, spec) if loaded else nullcontext():
        training = RankTraining(
            work.model,
            spec.layout,
            spec.hyperparameters,
            work.parent,
            on_cpu,
            method=spec.method,
            recompute=spec.recompute,
            asked_to_stop=stop_check(work, stop),
            loaded=loaded,
        )
    gc.collect()
    gc.freeze()  # else a collection looks through the whole model now and then, and all ranks wait
    return training


def stop_check(work: JobInputs, stop: StopFlag) -> Callable[[], bool]:
    """Return a function: was this rank asked to stop the job?"""

    def asked_to_stop() -> bool:
        CLOCK.tick()
        return stop.set or (
            is_rank0() and (work.journal.paused or bool(work.journal.fenced(work.attempt)))
        )

    return asked_to_stop


def never(seconds: float) -> bool:
    """Return False: a job of its own waits for its next command as long as it may run."""
    return False


def execute(
    training: RankTraining,
    work: JobInputs,
    *,
    optimizer_in_memory: bool = False,
    restored: dict[str, Any] | None = None,
    leave: Callable[[float], bool] = never,
) -> bool:
    """Train the job to its end and publish it; return False if stopped before. Collective.

    `training` holds the parent's weights. With `optimizer_in_memory` it holds what
    `spec.optimizer_from` left: the weights before they were published, and the optimizer.
    `restored`, `leave`: see command_run.py.
    """
    training.microbatch = broadcast_from_rank0(work.journal.microbatch if is_rank0() else None)
    if training.packing is not None and is_rank0():
        packing = training.packing
        work.journal.event(
            "packing",
            how=packing.text,
            difference=packing.difference,
            split=list(packing.split),
            rejected=packing.rejected,
        )
    if work.spec.commands is not None:
        if restored is None:
            begin(training, work, optimizer_in_memory=optimizer_in_memory)
        return run_commands(training, work, leave, restored)
    spec, home = work.spec, work.journal.home
    begin(training, work, optimizer_in_memory=optimizer_in_memory)
    try:
        # the engine served the parent's adapters beside their base, and so they are here
        with training.as_stored(merged=base_of(work.parent) is None) as others:
            agreement, scored = compare_with_engine(training, work)
            baseline, validation = score_baselines(training, work, scored, others=others)
        totals = restore(training, work)
        versions = JobVersions(training, work, agreement)
        finished = train(training, work, baseline, validation, totals, versions)
        if finished and may_publish(work):
            training.finish()
            with hf_export.draft_of(home, spec.id, work.attempt) as draft:
                hf_export.publish(
                    training,
                    spec,
                    probe_prompts(work.samples),
                    {
                        **totals.summary(),
                        "steps": training.done,
                        **master_weights.note_moved(training, work.journal, spec.id),
                    },
                    agreement if spec.hyperparameters.dtype == "bfloat16" else None,
                    home,
                    draft,
                    home.checkpoint(spec.id),
                )
    except Stopped:
        return False
    finally:
        if training.on_cpu:
            return_free_memory()
    return finished


def compare_with_engine(
    training: RankTraining, work: JobInputs
) -> tuple[LogprobDistance | None, LogprobsBySample]:
    """Check that the engine agrees on the parent's weights; None if it sampled no tokens here.

    Return also the log-probabilities of the samples whose trained tokens were all compared.
    """
    # nodes read the registry at their own time
    parents = broadcast_from_rank0(work.parent_places)
    temperature = work.spec.hyperparameters.policy.temperature
    comparable, places = engine_agreement.select_sampled(work.samples, parents, temperature)
    logprobs, tops = training.score_with_top(comparable)
    agreement = engine_agreement.compare(comparable, logprobs, tops)
    if agreement is None:
        return None, {}
    allowed = engine_agreement.limits_of(work.spec, work.parent_agreement)
    if is_rank0():
        work.journal.event("agreement", **agreement.event(allowed))
    try:
        agreement.refuse(allowed)
    except JobError as reason:  # all ranks compared the same numbers
        raise FailedEverywhere(str(reason)) from None
    masks = work.samples.masks
    rows = zip(places, comparable.masks, logprobs, strict=True)
    scored = {i: row for i, mask, row in rows if np.array_equal(mask, masks[i])}
    return agreement.distance, scored


def score_baselines(
    training: RankTraining, work: JobInputs, scored: LogprobsBySample, *, others: bool
) -> tuple[BaselineLogprobs, BaselineLogprobs | None]:
    """Score the samples under the weights before training, except those in `scored`.

    `others`: the first step begins with other weights than these.
    """
    folder = work.journal.folder / "baselines"
    baselines = Baselines(training, work.spec, work.reference, work.teacher, folder)
    baseline = baselines.of_training(work.samples, scored, others=others)
    if work.validation is None:
        return baseline, None
    return baseline, baselines.of_validation(work.validation)


def begin(training: RankTraining, work: JobInputs, *, optimizer_in_memory: bool = False) -> None:
    """Put what a job starts with in place: another's optimizer and master weights, or new ones."""
    spec, point = work.spec, work.optimizer_from
    if not optimizer_in_memory:
        training.base = AdapterBase.of_job(spec, work.parent)
        if point is None:
            allocate_moments(training, 0)  # a session's optimizer may hold another job's
        elif why := master_weights.carry_on(training, point, work.journal.home):
            master_weights.warn(
                work.journal,
                f"the training goes on from the parent's files: what {spec.optimizer_from} learnt"
                f" beyond them is lost, because {why}",
            )
    master_weights.note_first(training)


def restore(training: RankTraining, work: JobInputs) -> JobTotals:
    """Continue from a resume point of this job, or start anew."""
    if work.resume_from is None:
        return JobTotals()
    totals = JobTotals(**resume.load(training, work.resume_from))
    totals.check_schedule(training.done, training.rate_at(training.done - 1))
    return totals


def train(
    training: RankTraining,
    work: JobInputs,
    baseline: BaselineLogprobs,
    validation: BaselineLogprobs | None,
    totals: JobTotals,
    versions: JobVersions,
) -> bool:
    """Train to the last step, saving and publishing on the way; return False if stopped before."""
    spec, steps = work.spec, work.spec.hyperparameters.steps
    saver = Saver(
        training,
        work.megatron,
        work.attempt,
        spec.keep,
        may_publish=lambda: work.journal.fenced(work.attempt) is None,
        report=lambda step, seconds: work.journal.event("saved", step=step, seconds=seconds),
        warn=partial(master_weights.warn, work.journal),
        resumed=work.resume_from,
    )

    def to_evaluate() -> bool:
        done = training.done
        due = done == steps or done % (spec.evaluate_every or steps) == 0
        return validation is not None and due and totals.evaluated < done

    first, stopped = training.done, False
    try:
        while not stopped and (training.done < steps or to_evaluate()):
            try:
                if validation is not None and to_evaluate():
                    evaluate(training, work, validation, totals)
                else:
                    versions.publish_if_due(totals.summary)
                    stopped = step(training, work, baseline, totals)
            except Stopped:
                stopped = True
            if stopped and not may_publish(work):
                return False  # do not save: another attempt took over, or the job was cancelled
            due = training.done == steps or training.done % spec.save_every == 0
            if training.done > first and (stopped or (due and not to_evaluate())):
                saver.save(totals.state())
            saver.poll()
        finish_saving(training, saver, totals)
        versions.settle()
    finally:
        saver.close()
        versions.close()
    return training.done == steps and not to_evaluate()


def finish_saving(training: RankTraining, saver: Saver, totals: JobTotals) -> None:
    """Return when the last resume point is written; on a full disk wait a while for room.

    What was trained since the point before it is in memory alone. Raises StoreError. Collective.
    """
    for _ in range(ROOM_TRIES):
        try:
            saver.finish()
        except DiskFull:
            time.sleep(ROOM_PAUSE)
            if training.ranks.on_any(training.asked_to_stop()):
                raise
            saver.save(totals.state())
        else:
            return
    saver.finish()


def step(
    training: RankTraining, work: JobInputs, baseline: BaselineLogprobs, totals: JobTotals
) -> bool:
    """Train one step and write its event; return True to stop."""
    started, before = time.perf_counter(), training.done
    report = training.step(baseline)
    seconds = time.perf_counter() - started
    totals.add(report, seconds, before)
    if is_rank0():
        write_step_event(training, work, report, seconds)
    if training.on_cpu and training.done % TIDY_STEPS == 0:
        return_free_memory()
    if training.layout.world > 1 and training.done % progress.STEPS == 0:
        name_straggler(training, work)
    return report.stop


def name_straggler(training: RankTraining, work: JobInputs) -> None:
    """Write an event if a rank's own work of the last steps took much longer. Collective."""
    mine = json.dumps([training.own_work.take(), node_name()]).encode()
    every = [json.loads(one) for one in gather_from_ranks(mine)]
    slow = progress.find_straggler([seconds for seconds, _ in every])
    if is_rank0() and slow is not None:
        rank, median = slow
        seconds, node = every[rank]
        values = {"rank": rank, "node": node, "seconds": seconds, "median": median}
        work.journal.event("straggler", **values, steps=progress.STEPS, after_step=training.done)


def write_step_event(
    training: RankTraining, work: JobInputs, report: StepReport, seconds: float
) -> None:
    """Append a step's event to the job's events."""
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
    summing = training.own_work.summing() if training.layout.world > 1 else None
    if summing is not None:
        values["communication"] = summing / seconds
    if not training.on_cpu and (peak := peak_flops(torch.cuda.get_device_name())):
        flops = flops_per_token(work.model, report.length, training.hyper.lora)
        values["mfu"] = rate * flops / (peak * training.layout.world)
    work.journal.event("step", **values)


def return_free_memory() -> None:
    """Return this process's free memory to the system, which glibc keeps: soon more than is used.

    Each step packs its sequences to another length, so what one step frees is of little use to the
    next.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def memory_gib(on_cpu: bool) -> float:
    """Return this rank's peak memory so far in GiB: of its GPU, else of its process."""
    if on_cpu:
        return limits.getrusage(limits.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.cuda.max_memory_allocated() / 2**30


def evaluate(
    training: RankTraining, work: JobInputs, validation: BaselineLogprobs, totals: JobTotals
) -> None:
    """Compute the loss on the validation split; write its event and keep it for the manifest."""
    loss, measures = training.evaluate(validation)
    totals.validation_loss, totals.evaluated = loss, training.done
    if is_rank0():
        tokens = int(validation.marks.sum())
        work.journal.event("evaluation", step=training.done, loss=loss, tokens=tokens, **measures)


def may_publish(work: JobInputs) -> bool:
    """Return True if this attempt is still the newest, as rank 0 sees it. Collective."""
    return broadcast_from_rank0(work.journal.fenced(work.attempt) if is_rank0() else None) is None
