"""`jobs script` and `jobs submit-script`: show a job's batch script, and run a script of one's own.

A script goes to the site's Slurm, or to the private one of the root's running platform. Without
either, this command runs it as a local process, which ends with it. Read next:
runtime/scheduler/script_jobs.py.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.event_stream import POLL, GrowingFile
from cray_agents.cli.job_targets import UNDER_WAY, say, terminated_as_interrupted
from cray_agents.cli.root_access import open_root
from cray_agents.cli.screen import HomeOption, JsonOption, line, when
from cray_agents.config import Config, load_config
from cray_agents.errors import BadInput, JobError, NotFound, SetupError
from cray_agents.ports import CommandStatus
from cray_agents.runtime.scheduler.script_jobs import PREFIX, ScriptJob, prepare, script_jobs

if TYPE_CHECKING:
    from cray_agents.runtime.disk.checksums import Listing
    from cray_agents.runtime.scheduler.local import LocalProcesses
    from cray_agents.runtime.scheduler.slurm import Slurm

WITHOUT_SLURM = "local processes of this command"
CANCEL_SECONDS = 120.0  # that an end may take: Slurm's KillWait, and a busy controller


def print_script(config: Config, job_id: str) -> None:
    """Print the batch script that a submission of a job, or of a script, gives to a site's Slurm.

    Raises NotFound, and SchedulerError for a job that no Slurm could run.
    """
    from cray_agents.trainers.job.journal import JobJournal
    from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
    from cray_agents.trainers.planning.cluster_resources import resources_of

    slurm = _slurm(config)
    if is_script(job_id):
        command = ScriptJob(config.root, job_id).command
    else:
        trainer = MegatronTrainer(config.root, slurm, resources_of(config))
        command = trainer.command_of(JobJournal(config.root, job_id).spec())
    print(slurm.script(command), end="")


def submit_script(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Slurm heeds its own #SBATCH lines."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="For the script, after --.")] = None,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(metavar="--NAME=VALUE", help="More for sbatch, as --slurm-option=--nodes=2."),
    ] = None,
    minutes: Annotated[int | None, typer.Option(min=1, help="A limit of its time.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is submitted.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a script on the scheduler of the jobs, and follow it to its end."""
    config = load_config({"home": home})
    open_root(config, new=True)
    slurm = slurm_of(config)
    if slurm is None and detach:
        raise BadInput(
            "--detach: where no Slurm answers, the script ends with this command: leave it out",
            param="detach",
        )
    if slurm is None and slurm_option:
        given = " ".join(slurm_option)
        raise BadInput(f"{given}: no Slurm answers here: leave it out", param="slurm_option")
    options = slurm_option or []
    job = prepare(config.root, file, arguments or [], options, minutes, slurm=slurm is not None)
    scheduler = slurm if slurm is not None else _local(config, job)
    with contextlib.closing(scheduler):
        status = job.submit(scheduler, here=slurm is None)
        reason = slurm.reason if slurm is not None else WITHOUT_SLURM
        say(f"{job.id} is {status.state}; scheduler: {reason}")
        if not detach:
            status = _follow(job, scheduler, quiet=as_json)
    if as_json:
        print(json.dumps(script_row(job, status), indent=2))
    if detach:
        say(f"`cray-agents jobs logs -f {job.id}` follows it")
    elif status.state != "succeeded":
        raise JobError(f"{job.id} {status.state}: {_how(status)}; its log is {job.log}")


def slurm_of(config: Config) -> "Slurm | None":
    """Return the Slurm that outlives this command: a site's, or that of the root's platform."""
    from cray_agents.runtime.scheduler.choose import site_cluster

    if config.scheduler == "local":
        return None
    if site := site_cluster():
        return _slurm(config, f"the Slurm cluster {site} answers")
    configuration = config.root.slurm / "slurm.conf"
    if not (config.root.slurm / "run").exists() or not configuration.exists():
        return None
    os.environ["SLURM_CONF"] = str(configuration)
    return _slurm(config, "the platform's private Slurm", here=True) if site_cluster() else None


def _slurm(config: Config, reason: str = "", *, here: bool = False) -> "Slurm":
    from cray_agents.runtime.scheduler.site_environment import on_this_host, with_shared_root
    from cray_agents.runtime.scheduler.slurm import Slurm
    from cray_agents.runtime.store.index import identity_of

    home, settings = config.root, with_shared_root(config.job, str(config.root.root))
    if here:
        return Slurm(home.slurm, settings=on_this_host(settings), reason=reason)
    options, root = config.slurm_options, identity_of(home)
    return Slurm(home.slurm, options=options, settings=settings, root=root, reason=reason)


def _local(config: Config, job: ScriptJob) -> "LocalProcesses":
    from cray_agents.runtime.scheduler.choose import check_local_container
    from cray_agents.runtime.scheduler.local import LocalProcesses
    from cray_agents.runtime.scheduler.site_environment import on_this_host, with_shared_root

    check_local_container(config.job)
    settings = on_this_host(with_shared_root(config.job, str(config.root.root)))
    return LocalProcesses(job.folder / "processes", settings=settings)


def _follow(
    job: ScriptJob, scheduler: "Slurm | LocalProcesses", *, quiet: bool = False
) -> CommandStatus:
    """Print a script's log until its end. Ctrl-C ends a script of this command."""
    with terminated_as_interrupted():
        try:
            return _print_until_end(job, scheduler, quiet=quiet)
        except KeyboardInterrupt:
            if scheduler.name == "slurm":
                say(f"{job.id} goes on: `cray-agents jobs cancel {job.id}` ends it")
                raise
            scheduler.cancel(job.id)
    return _print_until_end(job, scheduler, quiet=quiet)


def _print_until_end(
    job: ScriptJob, scheduler: "Slurm | LocalProcesses | None", *, quiet: bool = False
) -> CommandStatus:
    log, last = GrowingFile(job.log), False
    while True:
        status = job.status(scheduler)
        for text in log.read(last=last):
            if not quiet:
                line(text.decode(errors="replace"))
        if last:
            return status
        last = status.state not in UNDER_WAY  # then once more: its last lines
        time.sleep(POLL)


# ---- other commands of the group `jobs`, about a script
def is_script(job_id: str) -> bool:
    """Tell whether an id is a script's."""
    return job_id.startswith(PREFIX)


def script_of(config: Config, job_id: str) -> ScriptJob:
    """Find a script job. Raises NotFound."""
    job = ScriptJob(config.root, job_id)
    if not job.folder.is_dir():
        ids = ", ".join(each.id for each in script_jobs(config.root)[-10:]) or "none yet"
        raise NotFound(f"no script {job_id!r}; there is {ids}", param="job_id")
    return job


def script_rows(config: Config, jobs: Iterable[ScriptJob]) -> "Listing[dict[str, Any]]":
    """Return a row of `jobs list` for each script. Slurm is asked if one has not ended there."""
    from cray_agents.runtime.disk.checksums import list_whole

    slurm = cache(lambda: slurm_of(config))

    def row(name: str) -> dict[str, Any]:
        job = ScriptJob(config.root, name)
        scheduler = slurm() if not job.ended and _is_slurms(job) else None
        return script_row(job, job.status(scheduler))

    return list_whole([job.id for job in jobs], row)


def script_row(job: ScriptJob, status: CommandStatus) -> dict[str, Any]:
    """Return a script's row of `jobs list`."""
    submission = job.submission
    return {
        "id": job.id,
        "scheduler_job_id": status.id,
        "method": "script",
        "state": status.state,
        "done": None,
        "loss_first": None,
        "loss_last": None,
        "when": when(submission.time) if submission is not None else None,
        "scheduler": submission.scheduler if submission is not None else "",
        "exit_code": status.exit_code,
        "reason": status.reason,
        "argv": job.command.argv,
        "log": str(job.log),
    }


def print_script_log(config: Config, job_id: str, *, tail: int, follow: bool) -> None:
    """Print the end of a script's log, and go on to its end. Raises JobError if it fails."""
    job = script_of(config, job_id)
    scheduler = slurm_of(config) if _is_slurms(job) else None
    if not follow:
        for text in GrowingFile(job.log).read(last=True)[-tail:]:
            line(text.decode(errors="replace"))
        return
    status = _print_until_end(job, scheduler)
    if status.state != "succeeded":
        raise JobError(f"{job.id} {status.state}: {_how(status)}")


def cancel_script(config: Config, job_id: str) -> CommandStatus:
    """End a script, and return how it stands then. Raises NotFound, SetupError."""
    job = script_of(config, job_id)
    scheduler = slurm_of(config) if _is_slurms(job) else None
    status, submission = job.status(scheduler), job.submission
    if status.state not in UNDER_WAY or submission is None:
        return status
    if scheduler is not None:
        scheduler.cancel(job.id)
    elif not submission.pid:
        raise SetupError(f"no Slurm answers here, and it runs {job.id}: ask where one does")
    elif submission.host != os.uname().nodename:
        raise SetupError(f"{job.id} runs on {submission.host}: cancel it there")
    else:
        os.kill(submission.pid, signal.SIGTERM)
    deadline = time.monotonic() + CANCEL_SECONDS
    while (status := job.status(scheduler)).state in UNDER_WAY and time.monotonic() < deadline:
        time.sleep(POLL)
    return status


def _is_slurms(job: ScriptJob) -> bool:
    return job.submission is not None and not job.submission.pid


def _how(status: CommandStatus) -> str:
    code = f"exit code {status.exit_code}" if status.exit_code is not None else ""
    return ", ".join(filter(None, (code, status.reason))) or "no reason is known"
