"""Job process: `python -m cray_agents.trainers.job.job <home>/jobs/<id>/spec.json`.

A scheduler starts the process once per node. It claims the next attempt, checks everything that can
be checked without Megatron, forks the ranks, and records the end. Whatever kills it, the next start
goes on from the last resume point. Starting a finished job trains nothing.

    exit 0   finished (or nothing left to do)      exit 75  saved and stopped: go on later
    exit 1   failed: status.json says why; without status.json it died and may be started again

Read next: launch.py for the ranks' processes, rank.py for the work of each.
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from cray_agents.errors import BadInput, CrayError, JobError, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.durable import keep_newest
from cray_agents.runtime.registry.checkpoints import settings_in, settings_sha256
from cray_agents.trainers.checkpointing.hf_export import parent_sha256
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.job.engine_agreement import places_of_parent
from cray_agents.trainers.job.input_checks import check_samples, check_temperature, check_tokenizer
from cray_agents.trainers.job.job_inputs import JobInputs
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import (
    EX_TEMPFAIL,
    RankPlacement,
    RanksOutcome,
    find_placement,
    run_ranks,
)
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.layouts import check_layout
from cray_agents.training_jobs import JobSpec, JobStatus


def main(argv: list[str] | None = None) -> int:
    """Run the job of a spec file; return the exit code."""
    signal.signal(signal.SIGTERM, _stop_early)
    signal.signal(signal.SIGUSR1, _stop_early)
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m cray_agents.trainers.job.job <home>/jobs/<id>/spec.json")
        return 2
    path = Path(arguments[0]).resolve()
    journal = JobJournal(Home(path.parents[2]), path.parent.name)
    try:
        return run(journal)
    except JobError as death:  # a rank died: no status.json, so that it may be started again
        print(f"--- the end of the rank's log:\n{death.log_tail}\n---", flush=True)
        print(f"{death}; the last whole step was {journal.step}", flush=True)
        return 1
    except SetupError as problem:  # the machine's fault, not the job's
        print(problem, flush=True)
        return 1
    except CrayError as reason:
        return _fail(journal, str(reason))


def run(journal: JobJournal) -> int:
    """Run the job from its last resume point to its end, or until a request to stop."""
    spec = journal.spec()
    if (ended := _already_ended(journal, spec)) is not None:
        return ended
    placement = find_placement(spec.layout.world, spec.id)
    first = placement.node == 0
    attempt = journal.claim_attempt() if first else journal.attempts
    work = prepare(journal, spec, attempt)
    outcome = _train(work, placement)
    if not first:
        return outcome.code
    if why := journal.fenced(attempt):
        print(f"stopped without publishing: {why}", flush=True)
    elif outcome.refusal is not None:
        return _fail(journal, outcome.refusal)
    elif outcome.code == EX_TEMPFAIL:
        print(f"stopped after step {journal.step}; start it again to go on", flush=True)
    else:
        _succeed(journal, spec)
    return outcome.code


def prepare(journal: JobJournal, spec: JobSpec, attempt: int) -> JobInputs:
    """Read and check all inputs; write nothing. Raises BadInput, NotFound, Corrupt."""
    from cray_agents.trainers.models.lora import choose_targets

    home, hyper = journal.home, spec.hyperparameters
    parent = home.root / spec.parent
    model = read_parent(parent, hyper.init)
    check_layout(model, spec.layout)
    if hyper.lora is not None:
        choose_targets(model, hyper.lora)
    _check_weights(parent, spec.parent_sha256, hyper.init, "parent_sha256")
    settings = settings_sha256(settings_in(parent))
    if spec.parent_settings_sha256 not in (None, settings):
        raise BadInput(
            f"config, tokenizer and chat template in {parent} have hash {settings}, and the job was"
            f" made for {spec.parent_settings_sha256}: they were changed, or the path is wrong",
            param="parent_settings_sha256",
        )
    reference = _reference(spec, home, parent, model)
    samples, validation = _samples(spec, home, parent, model)
    places = places_of_parent(samples, home, spec.parent_sha256)
    return JobInputs(
        journal,
        spec,
        attempt,
        parent,
        model,
        samples,
        places,
        validation,
        reference,
    )


def _reference(spec: JobSpec, home: Home, parent: Path, model: Architecture) -> Path | None:
    """Return the checkpoint that the job compares with; None means its parent."""
    if spec.reference is None or spec.reference_sha256 is None:
        return None
    reference = home.root / spec.reference
    other = read_parent(reference)
    if replace(other, dtype=model.dtype, init_std=model.init_std) != model:
        raise BadInput(
            f"the reference {reference} is another kind of model than {parent}", param="reference"
        )
    _check_weights(reference, spec.reference_sha256, "parent", "reference_sha256")
    return reference


def _samples(
    spec: JobSpec, home: Home, parent: Path, model: Architecture
) -> tuple[Samples, Samples | None]:
    """Return the training and validation splits; None if there is no validation split."""
    folder, hyper = home.dataset(spec.dataset), spec.hyperparameters
    samples = read_samples(folder, spec.method)
    validation = read_samples(folder, spec.method, "validation")
    for split in (samples, validation) if len(validation) else (samples,):
        try:
            check_samples(split, model, hyper)
            check_tokenizer(split, folder, home, parent)
            if spec.method == "grpo":
                check_temperature(split, hyper)
        except BadInput as problem:
            of = "" if split is samples else "the validation split does not fit: "
            raise BadInput(f"{of}{problem}", param=problem.param) from problem
    if not len(validation) and spec.evaluate_every is not None:
        raise BadInput(
            f"evaluate_every={spec.evaluate_every}, but dataset {spec.dataset} has no validation"
            " split: build it with validation=0.05, or leave evaluate_every out",
            param="evaluate_every",
        )
    return samples, validation if len(validation) else None


def _check_weights(folder: Path, expected: str, init: str, param: str) -> None:
    """Raise BadInput if the weights are not the ones that the job was made for."""
    actual = parent_sha256(folder, init)
    if actual != expected:
        raise BadInput(
            f"the weights in {folder} have hash {actual}, and the job was made for"
            f" {expected}: they were changed, or the path is wrong",
            param=param,
        )


def _train(work: JobInputs, placement: RankPlacement) -> RanksOutcome:
    """Import Megatron, choose the starting point, run this node's ranks."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # keep CUDA untouched by the fork
    import torch

    from cray_agents.trainers.checkpointing import resume
    from cray_agents.trainers.job import rank
    from cray_agents.trainers.models.cpu_megatron import load_megatron

    on_cpu = load_megatron()
    if not on_cpu and len(placement.ranks) > (gpus := torch.cuda.device_count()):
        raise SetupError(
            f"{len(placement.ranks)} ranks are to run on this node, and it has {gpus} GPUs"
        )
    if placement.node == 0:
        resume.sweep(work.megatron)
        final = work.journal.home.checkpoint(work.spec.id)
        resume.sweep(final.parent, f".{final.name}.*")
        point, problems = resume.choose(work.megatron)
        step = resume.step_of(point) if point else 0
        if point is None and (source := work.spec.optimizer_from) is not None:
            point = resume.newest_point(work.journal.home.job(source) / "megatron", source)
            work = work.at(None, point)
        else:
            work = work.at(point, None)
        work.journal.rewind(-1 if work.resume_from is None else step)
        for problem in problems:
            print(f"{problem}; set aside, the one before it is used", flush=True)
            work.journal.event("corrupt", message=problem)
        work.journal.event(
            "started",
            attempt=work.attempt,
            from_step=step,
            left_out=work.samples.left_out,
            layout=work.spec.layout.model_dump(),
        )
        work.journal.close()
        print(f"attempt {work.attempt} starts at step {step}", flush=True)
    return run_ranks(placement, work.journal.folder / "logs", partial(rank.run, work, on_cpu))


def _already_ended(journal: JobJournal, spec: JobSpec) -> int | None:
    """Return the exit code if there is nothing to do, else None."""
    if journal.cancelled:
        print(f"{spec.id} was cancelled: nothing to do", flush=True)
        return 0
    status = journal.status()
    if status is not None and status.state == "failed":
        print(f"{spec.id} failed before: {status.error}", flush=True)
        return 1
    if (journal.home.checkpoint(spec.id) / "manifest.json").exists():
        if status is None:
            _succeed(journal, spec)
        print(f"{spec.id} is finished already: trained 0 steps", flush=True)
        return 0
    if journal.paused:
        print(f"{spec.id} is paused: nothing to do until it is resumed", flush=True)
        return EX_TEMPFAIL
    return None


def _succeed(journal: JobJournal, spec: JobSpec) -> None:
    """Record success from the published manifest, whichever attempt published it."""
    path = journal.home.checkpoint(spec.id) / "manifest.json"
    if not path.exists():
        raise NotFound(f"the ranks of {spec.id} ended well, but published no {path}")
    metrics = checksums.read_record(Manifest, path).metrics
    journal.write_status(
        JobStatus(
            id=spec.id,
            state="succeeded",
            step=spec.hyperparameters.steps,
            steps=spec.hyperparameters.steps,
            attempts=journal.attempts,
            loss_first=metrics["loss_first"],
            loss_last=metrics["loss_last"],
            trained_tokens=metrics["trained_tokens"],
            seconds=metrics["seconds"],
            checkpoint=spec.id,
        )
    )
    journal.event("succeeded", checkpoint=spec.id)
    keep_newest(journal.folder / "megatron", 1)  # a later job's `optimizer_from` needs no other
    print(f"finished: checkpoint {spec.id}", flush=True)


def _fail(journal: JobJournal, reason: str) -> int:
    """Record a failure that a restart would not mend; return the exit code."""
    print(f"failed: {reason}", flush=True)
    if not journal.exists:
        return 1
    steps = journal.spec().hyperparameters.steps
    journal.write_status(
        JobStatus(
            id=journal.job_id,
            state="failed",
            step=journal.step,
            steps=steps,
            attempts=journal.attempts,
            error=reason,
        )
    )
    journal.event("failed", message=reason)
    return 1


def _stop_early(number: int, frame: object) -> None:
    """Exit on a signal that comes before the ranks run: there is nothing to save."""
    sys.exit(EX_TEMPFAIL)


if __name__ == "__main__":
    sys.exit(main())
