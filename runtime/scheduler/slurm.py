"""Commands as Slurm jobs: a site's cluster, or a private one of this host.

`MegatronTrainer` calls it through `ports.Scheduler`; `choose.py` opens it. It speaks to Slurm by
the text interfaces that are the same in 22.05 to 26.05: sbatch, squeue, scontrol, scancel. A job
is named by its command and its shared root, so that it is found again after any crash on either
side, and never taken for the same job of another root.
Read next: batch_script.py, what a job runs; private_cluster.py.
"""

import hashlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cray_agents.errors import Corrupt, SchedulerError
from cray_agents.ports import Command, CommandState, CommandStatus
from cray_agents.runtime.scheduler.batch_script import REFUSED, batch_script
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.programs import INSTALL_LINE, clean_environment

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
SEPARATOR = "\x1f"  # in no job name
QUEUE_SECONDS = 0.3  # for so long one squeue answers for all names
HELP_SECONDS = 2.0  # between looks for drained nodes while jobs wait
CLIENT_SECONDS = 60.0  # one client may take so long
PATIENCE_SECONDS = 20.0  # a controller may be away for so long

#: Slurm's words, in ours. What is not here holds resources, so it is running.
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
FAILED = {
    "FAILED",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "TIMEOUT",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
}
UNREACHABLE = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connection reset",
    "transport endpoint",
    "broken pipe",
    "zero bytes",
    "temporarily",
    "try again",
    "munge",
)


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: int
    state: CommandState
    word: str  # Slurm's own for the state
    reason: str
    name: str


class Slurm:
    """A Scheduler over a Slurm cluster; `close` stops the cluster too if it is a private one.

    directory: on the shared root, for claims and exit codes. options: what the site asks for,
    such as `("--partition=gpu", "--account=me")`. root: the shared root's id, where others may have
    jobs of the same names.
    """

    name = "slurm"

    def __init__(
        self,
        directory: Path,
        cluster: PrivateCluster | None = None,
        *,
        options: Sequence[str] = (),
        root: str = "",
        reason: str = "",
    ) -> None:
        self.reason = reason
        self.cluster = cluster
        self._ledger = directory.resolve() / "ledger"
        self._options = options
        self._suffix = f".{hashlib.sha256(root.encode()).hexdigest()[:8]}" if root else ""
        self._closed = False
        self._next_help = 0.0
        self._lock = threading.RLock()
        self._queue: dict[str, list[Job]] = {}
        self._queue_time = float("-inf")
        self._exits: dict[tuple[int, str], int | None] = {}

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def here(self) -> bool:
        """Whether all commands run on this host; a site's Slurm knows its own nodes."""
        return self.cluster is not None

    def close(self) -> None:
        """Stop a private cluster and its jobs; a site's jobs go on. Safe to call twice."""
        self._closed = True
        if self.cluster:
            self.cluster.close()

    def submit(self, command: Command) -> str:
        """Queue a command, or find its live job. Raises SchedulerError."""
        if not NAME.fullmatch(command.name):
            raise SchedulerError(f"{command.name!r} is no job's name: it must match {NAME.pattern}")
        ledger = self._ledger / command.name
        lock = self.cluster.directory / "run" / f"{command.name}.lock" if self.cluster else None
        named = command.model_copy(update={"name": self.job_name(command.name)})
        script = batch_script(named, ledger, lock)
        with self._lock:
            ledger.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                # Also after an unclear failure: it may have been accepted.
                if live := self._live(command.name):
                    return str(live[-1].id)
                try:
                    printed = self._run("sbatch", "--parsable", *self._options, script=script)
                    break
                except Unreachable as error:
                    self._recover(deadline, error)
            self._queue_time = float("-inf")
            job_id = int(printed.strip().split(";")[0])  # "id" or "id;cluster"
            if self.cluster:
                self.cluster.told(job_id)
            return str(job_id)

    def status(self, name: str) -> CommandStatus:
        """The newest job of that name. Raises SchedulerError if no controller answers."""
        jobs = self._jobs().get(self.job_name(name))
        if not jobs:
            return self._from_ledger(name)
        job = max(jobs, key=lambda job: job.id)
        if job.state in ("queued", "running"):
            return CommandStatus(state=job.state, id=str(job.id), reason=job.reason)
        code = self._exit_code(job)
        if job.state == "cancelled" and self.cluster and not self._we_cancelled(name, job):
            # A controller killed before it saved a job's start cancels it when it is back.
            lost = self._from_ledger(name)
            if lost.id == str(job.id) and lost.exit_code == 0:
                return lost
            reason = "its controller was killed, and did not know it any more"
            return CommandStatus(state="failed", id=str(job.id), exit_code=code, reason=reason)
        if job.state == "succeeded":
            return CommandStatus(state="succeeded", id=str(job.id), exit_code=code)
        reason = f"{job.word}: {job.reason}" if job.reason else job.word
        if code == REFUSED:
            reason = "this start was refused, see the log"
        return CommandStatus(state=job.state, id=str(job.id), exit_code=code, reason=reason)

    def cancel(self, name: str) -> None:
        """SIGTERM all processes of the name's job, and SIGKILL after the cluster's KillWait."""
        with self._lock:
            if ids := [str(job.id) for job in self._live(name)]:
                for job_id in ids:
                    (self._ledger / name / f"{job_id}.cancelled").touch()
                self._call("scancel", *ids)
                self._queue_time = float("-inf")

    def job_name(self, name: str) -> str:
        """What Slurm knows a command by."""
        return name + self._suffix

    def _live(self, name: str) -> list[Job]:
        """The pending and running jobs of a name, as of now."""
        jobs = self._jobs(fresh=True).get(self.job_name(name), [])
        return sorted((job for job in jobs if not ended(job)), key=lambda job: job.id)

    def _jobs(self, *, fresh: bool = False) -> dict[str, list[Job]]:
        """All jobs of this user by Slurm's name: one squeue for all who ask within a moment."""
        with self._lock:
            if fresh or time.monotonic() - self._queue_time > QUEUE_SECONDS:
                columns = SEPARATOR.join(("%A", "%T", "%r", "%j"))
                me = f"--user={os.getuid()}"
                listing = self._call("squeue", "-h", "-a", "-t", "all", me, "-o", columns)
                self._queue = {}
                for line in listing.splitlines():
                    job = read_job(line)
                    self._queue.setdefault(job.name, []).append(job)
                self._queue_time = time.monotonic()
                self._help_waiting()
            return self._queue

    def _help_waiting(self) -> None:
        """On a private cluster, see now and then that jobs do not wait for a drained node."""
        waiting = any(job.state == "queued" for jobs in self._queue.values() for job in jobs)
        if self.cluster and waiting and time.monotonic() > self._next_help:
            self.cluster.return_drained()
            self._next_help = time.monotonic() + HELP_SECONDS

    def _exit_code(self, job: Job) -> int | None:
        """An ended job's exit code; 128 + n if signal n ended it. Asked of Slurm once."""
        key = (job.id, job.word)
        if key not in self._exits:
            shown = self._call("scontrol", "-o", "show", "job", str(job.id))
            match = re.search(r"\bExitCode=(\d+):(\d+)", shown)
            code = int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0) if match else None
            self._exits[key] = None if code == 0 and job.state != "succeeded" else code
        return self._exits[key]

    def _we_cancelled(self, name: str, job: Job) -> bool:
        return (self._ledger / name / f"{job.id}.cancelled").exists()

    def _from_ledger(self, name: str) -> CommandStatus:
        """What the jobs' own files say of a name that Slurm has forgotten."""
        files = list((self._ledger / name).glob("*.ended"))
        if not files:
            return CommandStatus(state="unknown", reason="Slurm has no job of this name")
        newest = max(files, key=lambda path: [int(part) for part in path.name.split(".")[:2]])
        try:
            code = int(newest.read_text())
        except ValueError as error:
            raise Corrupt(f"{newest} is damaged: it holds no exit code") from error
        return CommandStatus(
            state="failed" if code else "succeeded", id=newest.name.split(".")[0], exit_code=code
        )

    def _call(self, *argv: str) -> str:
        """Run a client, also while the controller is away for a moment."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._run(*argv)
            except Unreachable as error:
                self._recover(deadline, error)

    def _recover(self, deadline: float, error: "Unreachable") -> None:
        """Wait before another try."""
        if time.monotonic() > deadline or self._closed:
            raise error
        time.sleep(0.2)

    def _run(self, *argv: str, script: str | None = None) -> str:
        if self._closed:
            raise SchedulerError("this scheduler is closed")
        if self.cluster and not self.cluster.alive:
            self.cluster.start()  # its supervisor was killed; asking nobody takes long
        environment = self.cluster.environment if self.cluster else clean_environment()
        environment |= {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
        if argv[0] == "sbatch":
            argv = (*argv, "--export=ALL")  # of this small environment, whatever the site's default
        try:
            process = subprocess.Popen(
                argv, env=environment, stdin=-1, stdout=-1, stderr=-1, text=True
            )
        except FileNotFoundError as error:
            raise SchedulerError(f"{argv[0]} is not installed; as root: {INSTALL_LINE}") from error
        with process:
            printed, complaint = self._await(process, script)
        if process.returncode == 0:
            return printed
        said = f"{argv[0]} ended with {process.returncode}: {complaint.strip()}"
        if any(sign in said.lower() for sign in UNREACHABLE):
            raise Unreachable(said)
        raise SchedulerError(said)

    def _await(self, process: "subprocess.Popen[str]", script: str | None) -> tuple[str, str]:
        """A client's output. It may hang for a minute where its cluster was just killed."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            try:
                return process.communicate(script, timeout=0.5)
            except subprocess.TimeoutExpired as error:
                gone = self.cluster is not None and not self.cluster.alive
                if gone or time.monotonic() > deadline:
                    process.kill()
                    raise Unreachable("no Slurm controller answers") from error


class Unreachable(SchedulerError):
    """No controller answered: it is starting, restarting or gone."""


def ended(job: Job) -> bool:
    """Whether it will never run again."""
    return job.state not in ("queued", "running")


def read_job(line: str) -> Job:
    """A line of squeue's output."""
    number, word, reason, name = line.split(SEPARATOR)
    word = word.split()[0]
    state: CommandState = "running"
    if word in QUEUED:
        state = "queued"
    elif word in FAILED:
        state = "failed"
    elif word == "COMPLETED":
        state = "succeeded"
    elif word.startswith("CANCELLED"):
        state = "cancelled"
    return Job(int(number), state, word, "" if reason == "None" else reason, name)
