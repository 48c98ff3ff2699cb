"""Script jobs: a person's scripts on the platform's scheduler, with their logs and ends.

    <home>/scripts/<id>/script         the script, as it was submitted
                       /command.json   the scheduler's command
                       /submitted.json when, by which process, and the scheduler's id of it
                       /log.txt        its output
                       /ended.json     its end, written once

A site's Slurm runs a script for itself, and anybody who asks `status` records its end. Without one,
the process that submits a script runs it, and ends with it. Called by cli/scripts.py.
"""

import os
import shlex
import time
from pathlib import Path

from cray_agents.config.job_section import SLURM_OWN, check_slurm_options
from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.processes import alive
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable

PREFIX = "script-"
#: Resources, which a script's own lines may ask for.
RESOURCES = ("cpus-per-task", "gpus-per-node", "nodes", "ntasks", "ntasks-per-node", "time")
ENDED = ("succeeded", "failed", "cancelled")


class Submission(Record):
    """A script's handover to a scheduler. `pid`: the process that runs it; 0 if Slurm does."""

    scheduler: str
    id: str = ""
    time: float
    pid: int = 0
    host: str = ""


class ScriptJob:
    """A submitted script: its folder, and what became of it."""

    def __init__(self, home: Home, script_id: str) -> None:
        self.id = script_id
        self.folder = home.scripts / script_id
        self.log = self.folder / "log.txt"

    @property
    def command(self) -> Command:
        """The scheduler's command. Raises NotFound."""
        try:
            return checksums.read_record(Command, self.folder / "command.json")
        except FileNotFoundError:
            raise NotFound(f"no script {self.id!r} in {self.folder.parent}", param="job") from None

    @property
    def submission(self) -> Submission | None:
        """The handover; None if the submitting process was killed before it."""
        file = self.folder / "submitted.json"
        return checksums.read_record(Submission, file) if file.exists() else None

    @property
    def ended(self) -> bool:
        """True once its end is recorded."""
        return (self.folder / "ended.json").exists()

    def submit(self, scheduler: Scheduler, *, here: bool) -> CommandStatus:
        """Hand the script over; `here`: this process runs it. Raises SchedulerError."""
        submission = Submission(
            scheduler=scheduler.name,
            time=time.time(),
            pid=os.getpid() if here else 0,
            host=os.uname().nodename,
        )
        _write(self.folder / "submitted.json", submission)  # first: a kill loses no script
        scheduler_id = scheduler.submit(self.command)
        submission = submission.model_copy(update={"id": scheduler_id})
        _write(self.folder / "submitted.json", submission)
        return self.status(scheduler)

    def status(self, scheduler: Scheduler | None = None) -> CommandStatus:
        """Return the script's status, as its scheduler tells it, and record its end.

        Without a scheduler it is what the shared root tells. Raises SchedulerError.
        """
        ended = self.folder / "ended.json"
        if self.ended:
            return checksums.read_record(CommandStatus, ended)
        if (submission := self.submission) is None:
            return CommandStatus(state="unknown", reason="it was not handed to a scheduler")
        if scheduler is None:
            return self._status_by_files(submission)
        status = scheduler.status(self.id)
        if status.state in ENDED:
            _write(ended, status)
        return status

    def _status_by_files(self, submission: Submission) -> CommandStatus:
        if submission.pid and submission.host == os.uname().nodename and not alive(submission.pid):
            reason = "the process that ran it was killed"
            return CommandStatus(state="failed", id=submission.id, reason=reason)
        started = self.log.exists() or submission.pid
        return CommandStatus(state="running" if started else "queued", id=submission.id)


def prepare(
    home: Home,
    file: Path,
    arguments: list[str],
    options: list[str],
    minutes: int | None,
    *,
    slurm: bool,
) -> ScriptJob:
    """Make the folder of a new script job, with a copy of the script.

    `options` are sbatch's, and come after those of the script's `#SBATCH` lines, which are comments
    if no Slurm runs it. Raises BadInput.
    """
    text = file.read_bytes()
    lines = sbatch_lines(text, file) if slurm else []
    options = [*lines, *check_script_options(options, "slurm-option")]
    home.scripts.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name.removeprefix(PREFIX)) for path in home.scripts.glob(f"{PREFIX}*")]
    number = max(numbers, default=0) + 1
    while True:
        job = ScriptJob(home, f"{PREFIX}{number}")
        try:
            job.folder.mkdir()
            break
        except FileExistsError:  # another submission took the number
            number += 1
    copy = job.folder / "script"
    durable.replace_file(copy, text)
    first = text.split(b"\n", 1)[0].decode(errors="replace")
    interpreter = shlex.split(first[2:]) if first.startswith("#!") else ["/bin/bash"]
    command = Command(
        name=job.id,
        argv=[*interpreter, str(copy), *arguments],
        directory=str(Path.cwd()),
        log=str(job.log),
        minutes=minutes,
        kind="script",
        slurm_options=options,
    )
    _write(job.folder / "command.json", command)
    return job


def sbatch_lines(text: bytes, file: Path) -> list[str]:
    """Return the options of a script's `#SBATCH` lines, which come before its first command."""
    options: list[str] = []
    for line in text.decode(errors="replace").split("\n"):
        if line.startswith("#SBATCH"):
            words = shlex.split(line[len("#SBATCH") :], comments=True)
            options += check_script_options(words, str(file))
        elif line.strip() and not line.startswith("#"):
            break
    return options


def check_script_options(options: list[str], source: str) -> list[str]:
    """Return options for sbatch. Raises BadInput for those that the platform needs for itself."""
    try:
        return [
            option
            for option in options
            if option.removeprefix("--").partition("=")[0] in RESOURCES
            or check_slurm_options([option])
        ]
    except ValueError as error:
        own = ", ".join(f"--{name}" for name in SLURM_OWN if name not in RESOURCES)
        message = f"{source}: {str(error).partition(':')[0]}. Not for a script: {own}"
        raise BadInput(message, param="script") from error


def script_jobs(home: Home) -> list[ScriptJob]:
    """Return a root's script jobs, oldest first."""
    names = [path.parent.name for path in home.scripts.glob(f"{PREFIX}*/command.json")]
    return [ScriptJob(home, name) for name in sorted(names, key=lambda name: int(name[7:]))]


def _write(file: Path, record: Record) -> None:
    durable.replace_file(file, checksums.with_crc(record.model_dump_json().encode()))
