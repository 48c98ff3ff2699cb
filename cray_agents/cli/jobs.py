"""`jobs`: list, show, follow, plot and control training jobs of the shared root.

Only `pause`, `resume` and `cancel` need the running platform; `submit` uses it, if there is one.
Read next: submit.py, scripts.py, event_stream.py, job_page.py, curves.py.
"""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    console,
    errors,
    line,
    root,
    show,
    when,
)
from cray_agents.cli.scripts import (
    cancel_script,
    is_script,
    print_script,
    print_script_log,
    script_of,
    script_rows,
    submit_script,
)
from cray_agents.cli.submit import submit
from cray_agents.config import load_config
from cray_agents.errors import BadInput, Corrupt, JobError, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.runtime.scheduler.script_jobs import script_jobs
from cray_agents.server.platform_process import ask, command, owner, running, submitter
from cray_agents.training_jobs import JobStatus

COLUMNS = ["id", "scheduler_job_id", "method", "state", "done", "loss_first", "loss_last", "when"]

JobId = Annotated[
    str, typer.Argument(help="As `jobs list` shows it, its first letters, or the scheduler's id.")
]

jobs = typer.Typer(
    no_args_is_help=True,
    help="Training jobs: submit, list, show, hardware, logs, plot, pause, resume, cancel; scripts.",
)
jobs.command("submit")(submit)
jobs.command("submit-script")(submit_script)


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(jobs, name="jobs")


@jobs.command("list")
def list_jobs(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List training jobs, oldest first, then scripts."""
    config = load_config({"home": home})
    from cray_agents.runtime.disk.checksums import list_whole

    place = root(home)
    rows = list_whole(job_ids(place), lambda name: job_row(place, name))
    scripts = script_rows(config, script_jobs(place))
    damaged = [*rows.damaged, *scripts.damaged]
    show([*rows.rows, *scripts.rows], COLUMNS, as_json=as_json, damaged=damaged)


@jobs.command("show")
def show_job(job_id: JobId, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what a job was asked, how far it is and when it will be done, and what it left."""
    from cray_agents.cli.job_page import job_report, print_page

    if is_script(job_id):
        job = script_of(config := load_config({"home": home}), job_id)
        listing = script_rows(config, [job])
        if listing.damaged:
            raise Corrupt(listing.damaged[0]["reason"])
        show(listing.rows, [*listing.rows[0]], as_json=as_json)
        return
    root_home = root(home)
    report = job_report(root_home, named_job(root_home, job_id))
    print(json.dumps(report, indent=2)) if as_json else print_page(report)


@jobs.command("hardware")
def show_hardware(
    job_id: JobId,
    points: Annotated[int, typer.Option(min=3, help="With --json: of a series, at most.")] = 600,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job's GPUs and network ports, node by node, its slowest rank and why it waits."""
    from cray_agents.cli.job_hardware import print_hardware, read_hardware

    root_home = root(home)
    hardware = read_hardware(root_home, named_job(root_home, job_id), points)
    print(hardware.model_dump_json(indent=2)) if as_json else print_hardware(hardware)


@jobs.command("logs")
def job_logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it ends; exit 1 if it fails.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's own log.")] = None,
    tail: Annotated[int, typer.Option(min=1, help="The last so many events and lines.")] = 100,
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The events as JSON lines.")] = False,
) -> None:
    """Print what a job tells: its steps and other events, and (behind a bar) its log."""
    from cray_agents.cli.event_stream import has_ended, stream_job
    from cray_agents.cli.job_page import sentence
    from cray_agents.trainers.job.journal import JobJournal

    if is_script(job_id):
        if rank is not None or as_json:
            raise BadInput("a script has no ranks and no events: leave --rank and --json out")
        print_script_log(load_config({"home": home}), job_id, tail=tail, follow=follow)
        return
    root_home = root(home)
    journal = JobJournal(root_home, named_job(root_home, job_id))
    spec = journal.spec()
    log = journal.log if rank is None else journal.folder / "logs" / f"rank-{rank}.txt"
    if rank is not None and as_json:
        raise BadInput("a rank's log has no events: leave out --rank or --json", param="rank")
    if rank is not None and rank >= spec.layout.world:
        ranks = f"its ranks are 0 to {spec.layout.world - 1}"
        raise BadInput(f"{journal.job_id} has no rank {rank}; {ranks}", param="rank")
    if follow and not has_ended(journal) and not restarts_jobs(root_home):
        errors.print(f"no platform runs on {root_home.root}: a job that dies is not started again")
    for item in stream_job(journal, log, tail, events=rank is None, follow=follow):
        if isinstance(item, str):
            if not as_json:
                line(item if rank is not None else f"│ {item}", style="dim")
        elif as_json:
            print(json.dumps(item), flush=True)
        else:
            line(sentence(item, spec.hyperparameters.steps))
    if follow:
        report_end(root_home, journal.job_id)


@jobs.command("script")
def job_script(job_id: JobId, home: HomeOption = None) -> None:
    """Print the batch script that a submission of the job gives to a site's Slurm."""
    config = load_config({"home": home})
    print_script(config, job_id if is_script(job_id) else named_job(config.root, job_id))


@jobs.command("plot")
def plot_jobs(
    job_ids: Annotated[
        list[str], typer.Argument(help="Jobs as in `jobs show`; several are laid over each other.")
    ],
    what: Annotated[
        str | None,
        typer.Option(help="Such as loss,grad_norm,lr. Without: the loss, and what a method has."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a picture instead.")
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="One job after the other, as a loop trained them.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Draw a job's curves: loss, evaluation loss, learning rate, whatever its steps measure."""
    from cray_agents.cli.curves import draw_panel, make_panels, write_png
    from cray_agents.trainers.job.journal import JobJournal

    root_home = root(home)
    ids = [named_job(root_home, job_id) for job_id in job_ids]
    wanted = [name.strip() for name in what.split(",")] if what is not None else []
    events = {name: JobJournal(root_home, name).events() for name in ids}
    panels = make_panels(events, wanted, join=join)
    if png is not None:
        write_png(panels, png)
        console.print(f"wrote {png}", soft_wrap=True)
        return
    for panel in panels:
        console.print(draw_panel(panel, console.width), soft_wrap=True)


@jobs.command("pause")
def pause_job(job_id: JobId, home: HomeOption = None) -> None:
    """Let a job save where it stands and end its processes; it stays so until `jobs resume`."""
    print_state(call_platform(root(home), job_id, Platform.pause_job))


@jobs.command("resume")
def resume_job(job_id: JobId, home: HomeOption = None) -> None:
    """Let a paused job go on from where it was paused."""
    print_state(call_platform(root(home), job_id, Platform.resume_job))


@jobs.command("cancel")
def cancel_job(job_id: JobId, home: HomeOption = None) -> None:
    """End a job for good; one that has ended stays what it is."""
    if is_script(job_id):
        status = cancel_script(load_config({"home": home}), job_id)
        console.print(f"{job_id} is {status.state}")
        return
    print_state(call_platform(root(home), job_id, Platform.cancel_job))


def call_platform(
    home: Home, job_id: str, method: Callable[[Platform, str], Awaitable[JobStatus]]
) -> JobStatus:
    """Call a job method of a root's platform. Raises NotFound, BadInput, SetupError."""
    full_id = named_job(home, job_id)
    info = running(home)
    if info is None:
        raise SetupError(f"no platform runs on {home.root}: {_without_platform(home, full_id)}")
    return ask(info, lambda platform: method(platform, full_id))


def _without_platform(home: Home, job_id: str) -> str:
    """Say how a job stands without a platform, and how to pause, resume or end it."""
    from cray_agents.runtime.scheduler.choose import site_cluster
    from cray_agents.trainers.job.job_status import read_handover, read_status
    from cray_agents.trainers.job.journal import JobJournal

    status = read_status(home, job_id)
    if status.state in ("succeeded", "failed", "cancelled"):
        return f"{job_id} has {status.state} already"
    at = f"it stands at step {status.step} of {status.steps}"
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
        f"nothing trains {job_id} now, {at}. `{command('up', home)}` goes on with it, and then "
        "pauses, resumes or cancels it"
    )


def restarts_jobs(home: Home) -> bool:
    """Tell whether a platform restarts jobs that die; an unreachable platform counts as one."""
    try:
        return owner(home) is not None
    except SetupError:
        return True


def print_state(job: JobStatus) -> None:
    """Print the state of a job; pausing takes as long as the present step and a save."""
    console.print(f"{job.id} is {job.state} at step {job.step} of {job.steps}")


def report_end(home: Home, job_id: str) -> None:
    """Say on stderr how a job ended. Raises JobError unless it succeeded."""
    from cray_agents.trainers.job.job_status import read_status

    status = read_status(home, job_id)
    if status.state != "succeeded":
        why = f": {status.error}" if status.error else f" at step {status.step}"
        raise JobError(f"{job_id} {status.state}{why}")
    trained = f"{status.steps} steps, {status.trained_tokens:,} tokens"
    errors.print(f"{job_id} succeeded: {trained}, checkpoint {status.checkpoint}", highlight=False)


def named_job(home: Home, given: str) -> str:
    """Find the id of a job by its first letters, with or without `job-`, or by the scheduler's id.

    Raises NotFound, and BadInput when several jobs match.
    """
    from cray_agents.trainers.job.job_status import read_handover
    from cray_agents.trainers.job.journal import JobJournal

    ids = job_ids(home)
    if given in ids:
        return given
    if same := [job for job in ids if read_handover(JobJournal(home, job)).id == given]:
        return same[-1]  # a scheduler may count from 1 again
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
    from cray_agents.trainers.job.job_status import read_status
    from cray_agents.trainers.job.journal import JobJournal
    from cray_agents.trainers.session.command_journal import CommandJournal

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
