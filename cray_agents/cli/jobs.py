"""`jobs`: submit, list, show, follow and control training jobs of the shared root.

Only `pause`, `resume` and `cancel` need the running platform; `submit` uses it, if there is one.
Read next: submit.py, job_targets.py, job_page.py.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from cray_agents.cli.job_page import job_report, print_hardware, print_page, read_hardware, sentence
from cray_agents.cli.job_targets import has_ended, stream_job
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import line, note, print_json, root, say, settings, show, when
from cray_agents.cli.submit import submit
from cray_agents.config import Config
from cray_agents.errors import BadInput, JobError, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.runtime.disk.checksums import list_whole
from cray_agents.runtime.scheduler.site_environment import with_shared_root
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.runtime.store.index import identity_of
from cray_agents.server.platform_process import ask_once, client, command, owner, running, submitter
from cray_agents.trainers.job.job_state import read_handover, read_status
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.training_jobs import JobStatus

COLUMNS = ["id", "scheduler_job_id", "method", "state", "done", "loss_last", "when"]
POINTS = 600  # of a series of `jobs show --hardware --json`, at most

JobId = Annotated[
    str,
    typer.Argument(help="The job as `jobs list` shows it, its first letters, or Slurm's number."),
]

commands = Commands("jobs", help="Training jobs: submit, list, show, logs, pause, resume, cancel.")
commands.command("submit")(submit)


@commands.command("list")
def list_jobs() -> None:
    """List training jobs, oldest first."""
    home = root()
    rows = list_whole(job_ids(home), lambda name: job_row(home, name))
    show(rows.rows, COLUMNS, damaged=rows.damaged)


@commands.command("show")
def show_job(
    job_id: JobId,
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            help="Show its GPUs and network ports by node, its slowest rank and why it waits.",
        ),
    ] = False,
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Print the batch script that a submission gives to a site's Slurm."
        ),
    ] = False,
) -> None:
    """Show what a job was asked, how far it is and when it will be done, and what it left."""
    home = root()
    name = named_job(home, job_id)
    if hardware and script:
        raise BadInput("give --hardware or --script, not both", param="script")
    if script:
        print_script(settings(), name)
    elif hardware:
        hardware_facts = read_hardware(home, name, POINTS)
        print_json(hardware_facts) if given().json else print_hardware(hardware_facts)
    else:
        report = job_report(home, name)
        print_json(report) if given().json else print_page(report)


def print_script(config: Config, job_id: str) -> None:
    """Print the batch script that a submission of a job gives to a site's Slurm.

    Raises NotFound, and SchedulerError for a job that no Slurm could run.
    """
    from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
    from cray_agents.trainers.planning.cluster_resources import resources_of

    home = config.root
    slurm = Slurm(
        home.slurm,
        options=config.slurm_options,
        settings=with_shared_root(config.job, str(home.root)),
        root=identity_of(home),
    )
    trainer = MegatronTrainer(home, slurm, resources_of(config))
    print(slurm.script(trainer.command_of(JobJournal(home, job_id).spec())), end="")


@commands.command("logs")
def job_logs(
    job_id: JobId,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Go on until the job ends; exit with 1 if it does not succeed."
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Print only the log of this rank.")
    ] = None,
    tail: Annotated[
        int, typer.Option(min=1, help="The number of newest events and lines to begin with.")
    ] = 100,
) -> None:
    """Print the events of a job, such as its steps, and (behind a bar) its log.

    With --json the events alone, one a line.
    """
    home = root()
    journal = JobJournal(home, named_job(home, job_id))
    spec = journal.spec()
    log = journal.log if rank is None else journal.folder / "logs" / f"rank-{rank}.txt"
    if rank is not None and given().json:
        raise BadInput("a rank's log has no events: leave out --rank or --json", param="rank")
    if rank is not None and rank >= spec.layout.world:
        ranks = f"its ranks are 0 to {spec.layout.world - 1}"
        raise BadInput(f"{journal.job_id} has no rank {rank}; {ranks}", param="rank")
    if follow and not has_ended(journal) and not restarts_jobs(home):
        note(f"no platform runs on {home.root}: a job that dies is not started again")
    for item in stream_job(journal, log, tail, events=rank is None, follow=follow):
        if isinstance(item, str):
            if not given().json:
                line(item if rank is not None else f"│ {item}", style="dim")
        elif given().json:
            print(json.dumps(item), flush=True)
        else:
            line(sentence(item, spec.hyperparameters.steps))
    if follow:
        report_end(home, journal.job_id)


@commands.command("pause", takes="")
def pause_job(job_id: JobId) -> None:
    """Let a job save where it stands and end its processes; it stays so until `jobs resume`."""
    print_state(call_platform(job_id, Platform.pause_job))


@commands.command("resume", takes="")
def resume_job(job_id: JobId) -> None:
    """Let a paused job go on from where it was paused."""
    print_state(call_platform(job_id, Platform.resume_job))


@commands.command("cancel", takes="")
def cancel_job(job_id: JobId) -> None:
    """End a job for good; one that has ended stays what it is."""
    print_state(call_platform(job_id, Platform.cancel_job))


def call_platform(
    job_id: str, method: Callable[[Platform, str], Awaitable[JobStatus]]
) -> JobStatus:
    """Call a job method of the root's platform. Raises NotFound, BadInput, SetupError."""
    home = root()
    full_id = named_job(home, job_id)
    if (info := running(home)) is None:
        raise SetupError(f"no platform runs on {home.root}: {_without_platform(home, full_id)}")
    return ask_once(client(info), lambda platform: method(platform, full_id))


def _without_platform(home: Home, job_id: str) -> str:
    """Say how a job stands without a platform, and how to pause, resume or end it."""
    from cray_agents.runtime.scheduler.choose import site_cluster

    status = read_status(home, job_id)
    if status.state in ("succeeded", "failed", "cancelled"):
        return f"{job_id} has {status.state} already"
    if (pid := submitter(home)) is not None:
        return (
            f"`jobs submit` (pid {pid}) trains there. Ctrl-C in it, or kill -INT {pid}, saves the "
            "job and ends it; the same command goes on from there"
        )
    if site_cluster() is not None and (scheduled := read_handover(JobJournal(home, job_id)).id):
        return (
            f"{job_id} is Slurm's job {scheduled}, which goes on without one: scancel {scheduled} "
            f"ends it for now; start `{command('up', home)}` to pause, resume or cancel it for good"
        )
    return (
        f"nothing trains {job_id} now, it stands at step {status.step} of {status.steps}. "
        f"`{command('up', home)}` goes on with it, and then pauses, resumes or cancels it"
    )


def restarts_jobs(home: Home) -> bool:
    """Tell whether a platform restarts jobs that die; an unreachable platform counts as one."""
    try:
        return owner(home) is not None
    except SetupError:
        return True


def print_state(job: JobStatus) -> None:
    """Print the state of a job; pausing takes as long as the present step and a save."""
    say(f"{job.id} is {job.state} at step {job.step} of {job.steps}")


def report_end(home: Home, job_id: str) -> None:
    """Say on stderr how a job ended. Raises JobError unless it succeeded."""
    status = read_status(home, job_id)
    if status.state != "succeeded":
        why = f": {status.error}" if status.error else f" at step {status.step}"
        raise JobError(f"{job_id} {status.state}{why}")
    trained = f"{status.steps} steps, {status.trained_tokens:,} tokens"
    note(f"{job_id} succeeded: {trained}, checkpoint {status.checkpoint}")


def named_job(home: Home, given: str) -> str:
    """Find the id of a job by its first letters, with or without `job-`, or by the scheduler's id.

    Raises NotFound, and BadInput when several jobs match.
    """
    ids = job_ids(home)
    if given in ids:
        return given
    if same := [job for job in ids if read_handover(JobJournal(home, job)).id == given]:
        if len(same) > 1:  # a scheduler may count from 1 again
            note(f"{len(same)} jobs had the number {given}: this is the last, {same[-1]}")
        return same[-1]
    matches = [job for job in ids if given and job.startswith((given, f"job-{given}"))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise BadInput(f"{given!r} is short for {', '.join(matches)}: give more", param="job_id")
    known = ", ".join(ids[-10:]) or "none yet"
    look = command("jobs list", home)
    raise NotFound(f"no job {given!r}; there is {known} (`{look}`)", param="job_id")


def job_ids(home: Home) -> list[str]:
    """Return the ids of a root's jobs, oldest first."""
    specs = [(path.stat().st_mtime, path.parent.name) for path in home.jobs.glob("*/spec.json")]
    return [name for _, name in sorted(specs)]


def job_row(home: Home, name: str) -> dict[str, Any]:
    """Return a job's status, method, dataset, parent and submission time. Raises Corrupt."""
    status, journal = read_status(home, name), JobJournal(home, name)
    spec = journal.spec()
    by_commands = spec.commands is not None
    commands = CommandJournal(journal.folder).last if by_commands else 0
    details = {
        "method": "commands" if by_commands else spec.method,
        "dataset": spec.dataset,
        "parent": spec.parent,
        "done": str(commands) if by_commands else f"{status.step}/{status.steps}",
        "when": when((journal.folder / "spec.json").stat().st_mtime),
    }
    return status.model_dump() | details
