"""What each rank of a job does: join, look back, restore, train, save now and then, publish.

The file reads top to bottom like that sentence. launch.py calls `run` in a forked process; every
step of it is collective, so all ranks always agree on what comes next. Read next: train.py.
"""

import os
import resource as limits
import time
import warnings
from typing import Any

import torch

from cray_agents.trainers import agreement, export, resume
from cray_agents.trainers.agree import agree, is_main
from cray_agents.trainers.baselines import Baselines
from cray_agents.trainers.data.known import Known
from cray_agents.trainers.data.probe import probe_prompts
from cray_agents.trainers.launch import EX_TEMPFAIL, StopFlag
from cray_agents.trainers.planning.arithmetic import flops_per_token
from cray_agents.trainers.planning.hardware import peak_flops
from cray_agents.trainers.progress import Progress
from cray_agents.trainers.ranks import join_ranks
from cray_agents.trainers.saving import Saver
from cray_agents.trainers.train import StepReport, Training
from cray_agents.trainers.work import Work


def run(work: Work, on_cpu: bool, rank: int, store: Any, stop: StopFlag) -> int:
    """Do one rank's part of a job; returns its exit code. Raises CrayError on bad inputs."""
    spec = work.spec
    # they would fill the end of the log, where the reason of a death is looked for
    warnings.filterwarnings("ignore", category=FutureWarning)
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu)
    attempt, *points = agree((work.attempt, work.resume_from, work.optimizer_from))
    training = Training(
        work.model,
        spec.layout,
        spec.hyperparameters,
        work.parent,
        on_cpu,
        method=spec.method,
        recompute=spec.recompute,
    )
    known, validation = look_back(training, work)
    progress = restore(training, *points)
    if not train(training, work, known, validation, attempt, progress, stop):
        return EX_TEMPFAIL
    if not may_publish(work, attempt):
        return 0
    export.publish(
        training,
        spec,
        probe_prompts(work.samples),
        {**progress.summary(), "steps": training.done},
        work.journal.home.checkpoint(f".{spec.id}.{attempt}"),
        work.journal.home.checkpoint(spec.id),
    )
    torch.distributed.destroy_process_group()
    return 0


def look_back(training: Training, work: Work) -> tuple[Known, Known | None]:
    """What the weights before training say of the samples; proves that the engine agrees."""
    found = agreement.compare(work.comparable, training.score(work.comparable))
    if found is not None:
        limit = agreement.limit_of(work.spec)
        if is_main():
            work.journal.event("agreement", **vars(found), limit=limit)
        found.refuse(limit)
    baselines = Baselines(training, work.spec, work.reference, work.journal.folder / "baselines")
    known = baselines.known(work.samples, "train")
    if work.validation is None:
        return known, None
    return known, baselines.known(work.validation, "validation")


def restore(training: Training, point: Any, optimizer_from: Any) -> Progress:
    """Go on from a resume point of this job, or with the optimizer of another, or from nothing."""
    if point is not None:
        return Progress(**resume.load(training, point))
    if optimizer_from is not None:
        resume.load(training, optimizer_from)
        training.restart()
    return Progress()


def train(
    training: Training,
    work: Work,
    known: Known,
    validation: Known | None,
    attempt: int,
    progress: Progress,
    stop: StopFlag,
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
    while training.done < steps:
        begun = time.perf_counter()
        report = training.step(known, stop.set or (is_main() and work.journal.paused))
        progress.add(report, time.perf_counter() - begun, training.done)
        if is_main():
            tell(training, work, report, time.perf_counter() - begun)
        last = training.done == steps
        if validation is not None and (last or training.done % (spec.evaluate_every or steps) == 0):
            evaluate(training, work, validation, progress)
        stopping = report.stop and not last
        if training.done % spec.save_every == 0 or last or stopping:
            saver.save(progress.state())
        saver.poll()
        if stopping:
            break
    saver.finish()
    return training.done == steps


def tell(training: Training, work: Work, report: StepReport, seconds: float) -> None:
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


def evaluate(training: Training, work: Work, validation: Known, progress: Progress) -> None:
    """The loss on the validation split, as an event and for the manifest."""
    loss, measures = training.evaluate(validation)
    progress.validation_loss = loss
    if is_main():
        tokens = int(validation.marks.sum())
        work.journal.event("evaluation", step=training.done, loss=loss, tokens=tokens, **measures)


def may_publish(work: Work, attempt: int) -> bool:
    """Whether this attempt is still the one; rank 0 looks, all ranks do as it says."""
    return agree(work.journal.fenced(attempt) if is_main() else None) is None
