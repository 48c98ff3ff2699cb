"""`jobs submit`: start a training job, or find it, and follow it to its end.

A platform that runs on the root trains the job. Without one this command runs the scheduler and
the trainer itself, as `up` would. It restarts processes that died, and ends the job's processes
when it ends. The same command again names the same job. A failed job is tried again if the new
command runs it otherwise. Read next: spec_options.py, job_targets.py.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.job_targets import has_ended, train, with_trainer_choices
from cray_agents.cli.options import given
from cray_agents.cli.screen import note, open_root, print_json, say, settings
from cray_agents.cli.spec_options import build_spec, layout_of, read_fields
from cray_agents.config import Config
from cray_agents.errors import BadInput, JobError
from cray_agents.paths import Home
from cray_agents.runtime.registry.checkpoints import ADAPTER, base_of
from cray_agents.runtime.registry.registry import NAME, Registry
from cray_agents.trainers.job.job_state import read_status, should_retry
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobSpec, JobStatus, explain_learning_rate

STAYS = (
    "the same again stays failed; run otherwise it goes on from its newest resume point: another"
    " layout, recompute, save_every, keep, evaluate_every or logprob_limit; and what else is"
    " changed is another job"
)


def submit(
    parent: Annotated[
        str | None,
        typer.Option(
            help="NAME, NAME@N, a Hugging Face directory, a GGUF file, or OWNER/NAME of the hub."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Its id, of `dataset list`.")] = None,
    method: Annotated[
        str | None, typer.Option(help="sft, dpo, kto, grpo, distill; the dataset's if left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data, not steps \\[default: 1].", min=1e-6)
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A hyperparameter such as learning_rate=2e-5, policy.kl=0.01, lora.alpha=32, or"
            " how the job is run: evaluate_every=50, spare_nodes=1; repeatable.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A JobSpec as .json; options override it."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="data=2,tensor=2; the trainer's choice if left out.")
    ] = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe", help="Run it, even if it takes more cores or memory than there are."
        ),
    ] = False,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="--NAME=VALUE",
            help="An sbatch option for this job, as --slurm-option=--partition=long; repeatable.",
        ),
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train adapters of this rank.")] = None,
    init: Annotated[
        str | None, typer.Option(help="random: from scratch, by the parent's config.json alone.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="What dpo, kto and a policy.kl compare with, if not the parent."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="distill: the model that judges each token; like --parent.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Register the result as the next version of this name.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is submitted.")] = False,
) -> None:
    """Train a model: start a job, or find it, and follow it to its end. Ctrl-C ends the wait."""
    config = settings()
    open_root(config, new=True)
    _check_name(name, detach=detach)
    options = {
        "parent": parent,
        "dataset": dataset,
        "method": method,
        "steps": steps,
        "layout": layout_of(layout) if layout is not None else None,
        "oversubscribe": oversubscribe or None,
        "slurm_options": slurm_option or None,
        "lora.rank": lora_rank,
        "init": init,
        "reference": reference,
        "teacher": teacher,
    }
    with contextlib.redirect_stdout(sys.stderr) if given().json else contextlib.nullcontext():
        fields = read_fields(spec, options, setting or [])
        job = build_spec(config.root, fields, epochs)
        job = with_trainer_choices(config, job)
        status = _train_unless_ended(config, job, detach=detach)
        if status.state == "succeeded":
            _report_result(config.root, status, name, fields["parent"])
    if given().json:
        print_json(status)
    if status.state in ("failed", "cancelled"):
        raise JobError(f"{status.id} {status.state}: {status.error or 'for good'}")
    if status.state == "paused":
        raise typer.Exit(130)


def _train_unless_ended(config: Config, spec: JobSpec, *, detach: bool) -> JobStatus:
    """Train the job and return its status; an ended job is trained again only if `should_retry`."""
    journal = JobJournal(config.root, spec.id)
    if journal.exists and has_ended(journal) and not should_retry(journal, spec):
        status = read_status(config.root, spec.id)
        note(f"{status.id} {status.state} before: trained 0 steps")
        if status.state == "failed":
            note(STAYS)
        return status
    _print_spec(spec)
    return train(config, spec, detach=detach)


# ---- messages
def _print_spec(spec: JobSpec) -> None:
    from cray_agents.trainers.models.architecture import read_architecture

    hyper = spec.hyperparameters
    start = "from scratch, by the config of" if hyper.init == "random" else "from"
    lora = f", LoRA of rank {hyper.lora.rank}" if hyper.lora is not None else ""
    width = read_architecture(Path(spec.parent), hyper.backend).hidden
    size = f"{hyper.dtype}{lora}, micro-batches of {hyper.max_tokens_per_microbatch:,} tokens"
    note(f"{spec.method} on {spec.dataset} {start} {spec.parent}")
    note(f"{hyper.steps} steps of {hyper.batch_size}, {size}")
    note(f"learning rate: {explain_learning_rate(width, spec.method, hyper)}")


def _report_result(home: Home, status: JobStatus, name: str | None, parent: str) -> None:
    """Print the result's folder; register it, with its parent's prompts, without promoting it."""
    folder = home.checkpoint(status.checkpoint or status.id)
    say(str(folder))
    if (base := base_of(folder)) is not None:
        note(f"an adapter over {base.name}; `cray-agents models export` makes one model of the two")
    elif (folder / ADAPTER).is_dir():
        note(f"merged weights; the adapter alone is in {folder / ADAPTER}")
    if name is not None:
        registry = Registry(home)
        prompts = {} if Path(parent).expanduser().exists() else registry.prompts_of(parent)
        version = registry.register(name, *registry.import_checkpoint(folder), prompts)
        note(f"registered as {version.id}")


def _check_name(name: str | None, *, detach: bool) -> None:
    if name is not None and not NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a model: use letters, digits, '.', '_' and '-'", param="name"
        )
    if name is not None and detach:
        raise BadInput("--name with --detach: nobody would wait to register it", param="name")
