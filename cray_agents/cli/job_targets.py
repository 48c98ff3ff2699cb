"""Job targets: train a submitted job on the running platform, or with this command.

Without a platform this command runs the scheduler and the trainer itself, as `up` would. The
trainer restarts processes that died. With a scheduler of this host the job's processes end with
this command. Called by submit.py. Read next: trainers/job/megatron_trainer.py.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.cli.job_page import sentence
from cray_agents.cli.screen import line, note
from cray_agents.config import Config
from cray_agents.errors import BadInput, EngineTimeout, EngineUnavailable, SetupError
from cray_agents.paths import Home
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.journal import Tail, parse_line
from cray_agents.server.platform_process import (
    SUBMITTER,
    client,
    command,
    fetch,
    owner,
    running,
    submitter,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobSpec, JobStatus

if TYPE_CHECKING:
    from cray_agents.runtime.scheduler.local import LocalProcesses
    from cray_agents.runtime.scheduler.slurm import Slurm
    from cray_agents.trainers.job.megatron_trainer import MegatronTrainer

POLL = 0.3  # seconds between reads of a job's state
UNDER_WAY = ("queued", "running")


def train(config: Config, spec: JobSpec, *, detach: bool) -> JobStatus:
    """Submit a job, or find it, and follow it to its end or until Ctrl-C.

    Ctrl-C pauses a job that this process runs. A platform's job goes on.

    Raises SetupError, BadInput, JobError.
    """
    info = running(config.root)
    if info is not None:
        with contextlib.closing(PlatformTrainer(info)) as trainer:
            return _train_on_platform(config.root, trainer, spec, detach=detach)
    if (starting := owner(config.root)) is not None:
        raise SetupError(
            f"a platform (pid {starting['pid']}) claims {config.root.root} but does not answer:"
            f" wait until it has started, or end it with `{command('down', config.root)}`"
        )
    return _train_without_platform(config, spec, detach=detach)


def with_trainer_choices(config: Config, spec: JobSpec) -> JobSpec:
    """Return the spec with what `train` decides before it takes the job's id, so that it is known.

    Raises ConfigError.
    """
    from cray_agents.trainers.planning.cluster_resources import (
        Gpus,
        HostResources,
        Resources,
        resources_of,
    )
    from cray_agents.trainers.planning.job_layout import decide_hyperparameters

    if (info := running(config.root)) is None:
        return decide_hyperparameters(spec, config.root, resources_of(config))
    trainer = fetch(info, "/v1/platform").get("trainer", {})
    gpus = Gpus(**trainer["gpus"]) if trainer.get("gpus") else None
    host = HostResources(**trainer["host"]) if trainer.get("host") else None
    resources = Resources(trainer.get("ranks", 1), trainer.get("nodes", 1), gpus, host=host)
    return decide_hyperparameters(spec, config.root, resources)


class PlatformTrainer:
    """The trainer of a running platform, with the methods that this command calls."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._platform = client(info)
        self._runner = asyncio.Runner()

    def submit(self, spec: JobSpec) -> JobStatus:
        """Start the job, or find it."""
        return self._runner.run(self._platform.submit_spec(spec))

    def status(self, job_id: str) -> JobStatus:
        """Return the job's status. Raises SetupError when the platform is gone."""
        try:
            return self._runner.run(self._platform.job(job_id))
        except (EngineTimeout, EngineUnavailable) as error:
            raise SetupError(
                f"the platform at {self._platform.url} no longer answers; {job_id} goes on when it,"
                " or this command, is started again"
            ) from error

    def resume(self, job_id: str) -> JobStatus:
        """Let a paused job go on."""
        return self._runner.run(self._platform.resume_job(job_id))

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._platform.close())
        self._runner.close()


def _train_on_platform(
    home: Home, trainer: PlatformTrainer, spec: JobSpec, *, detach: bool
) -> JobStatus:
    following, status = _begin(home, trainer, spec)
    if detach:
        return _detach(status)
    try:
        status = following.print_until_end(trainer, (*UNDER_WAY, "paused"))
    except KeyboardInterrupt:
        note(
            f"{status.id} goes on: `cray-agents jobs logs -f {status.id}` follows it, and"
            f" `cray-agents jobs pause {status.id}` halts it"
        )
        raise
    time.sleep(POLL)  # a job records its end before its last log line
    following.print_new(last=True)
    return status


def _train_without_platform(config: Config, spec: JobSpec, *, detach: bool) -> JobStatus:
    """Train with a scheduler of this command; a scheduler of this host ends with it."""
    from cray_agents.runtime.scheduler.choose import configured_scheduler, site_cluster

    home = config.root
    claim: contextlib.AbstractContextManager[None]
    if config.scheduler != "local" and site_cluster() is not None:
        claim = contextlib.nullcontext()
    elif detach:
        raise BadInput(
            "--detach: without a platform, and without a site's Slurm, the job ends with this"
            f" command: leave it out, or start a platform with `{command('up', home)}`",
            param="detach",
        )
    else:
        claim = _claim_root(home)
    with claim, contextlib.closing(configured_scheduler(config)) as scheduler:
        trainer = _make_trainer(config, scheduler)
        with terminated_as_interrupted():
            following, status = _begin(home, trainer, spec)
            if detach:
                return _detach(status)
            try:
                status = following.print_until_end(trainer, UNDER_WAY)
            except KeyboardInterrupt:
                status = _save_and_stop(trainer, following, status.id)
        while scheduler.status(status.id).state in UNDER_WAY:
            time.sleep(POLL)  # the process has a last line to write
        following.print_new(last=True)
        return status


def _make_trainer(config: Config, scheduler: "Slurm | LocalProcesses") -> "MegatronTrainer":
    from cray_agents.trainers.job.failures.failure import failure_settings
    from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
    from cray_agents.trainers.planning.cluster_resources import resources_of

    resources = resources_of(config, here=scheduler.on_this_host, host_gpus=scheduler.gpus)
    note(f"scheduler: {scheduler.reason}; trainer: {resources}")
    return MegatronTrainer(config.root, scheduler, resources, failures=failure_settings(config))


def _save_and_stop(trainer: "MegatronTrainer", following: "Following", job_id: str) -> JobStatus:
    """Let the job save a resume point and end."""
    note("saving where it stands (Ctrl-C again: end at once)")
    with contextlib.suppress(BadInput):  # the job has ended meanwhile
        trainer.pause(job_id)
    status = following.print_until_end(trainer, UNDER_WAY)
    if status.state == "paused":
        progress = f"saved after step {status.step} of {status.steps}"
        note(f"{job_id} is {progress}: the same command again goes on from there")
    return status


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that the job saves as on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _claim_root(home: Home) -> Iterator[None]:
    """Claim this host's scheduler. Raises SetupError while another command trains on the root."""
    path = home.slurm / SUBMITTER
    if submitter(home) is None:
        path.unlink(missing_ok=True)  # left by a killed command
    if not durable.create_file(path, str(os.getpid()).encode()):
        raise SetupError(
            f"another `jobs submit` trains on {home.root}: wait for its end, or start a"
            f" platform with `{command('up', home)}`, which takes many jobs"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class Following:
    """A printer of a job's new events and log lines, in the format of `jobs logs -f`."""

    def __init__(self, journal: JobJournal, steps: int) -> None:
        self.job_id, self._steps = journal.job_id, steps
        self._events, self._log = NewEvents(journal.events_file), Tail(journal.log)

    def skip_past(self) -> None:
        """Skip the events and lines written until now."""
        self._events.read()
        self._log.read(last=True)

    def print_until_end(
        self, trainer: "MegatronTrainer | PlatformTrainer", states: Sequence[str]
    ) -> JobStatus:
        """Print new events and lines until the job is in none of these states."""
        while True:
            status = trainer.status(self.job_id)  # also restarts processes that died
            self.print_new()
            if status.state not in states:
                return status
            time.sleep(POLL)

    def print_new(self, *, last: bool = False) -> None:
        """Print new events and lines; with `last`, an unfinished line too."""
        for event in self._events.read():
            line(sentence(event, self._steps))
        for text in self._log.read(last=last):
            line(f"│ {text.decode(errors='replace')}", style="dim")


def _begin(
    home: Home, trainer: "MegatronTrainer | PlatformTrainer", spec: JobSpec
) -> tuple[Following, JobStatus]:
    """Submit the job, and resume it if it was paused."""
    following = Following(JobJournal(home, spec.id), spec.hyperparameters.steps)
    following.skip_past()
    status = trainer.submit(spec)
    if status.id != spec.id:  # the platform runs other code than this command
        following = Following(JobJournal(home, status.id), spec.hyperparameters.steps)
    if status.state == "paused":
        status = trainer.resume(status.id)
    note(f"{status.id} is {status.state}")
    return following, status


def _detach(status: JobStatus) -> JobStatus:
    """Say how to follow the job, and return its status."""
    note(f"`cray-agents jobs logs -f {status.id}` follows it")
    return status


# ---- Event stream of a training job: its new events and log lines, for `jobs logs`
# Only files of the shared root are read, so any host can follow a job, with or without a platform.
# A restart replaces events.jsonl (JobJournal.rewind) and empties the logs of ranks. The readers
# notice both.


class NewEvents:
    """A reader of a job's events, each once, although a restart writes the old ones again."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Tail(path)
        self._seen: set[tuple[Any, ...]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last read, in order."""
        new = []
        for text in self._file.read():
            event: dict[str, Any] = parse_line(text, self._path)
            key = (event["time"], event["event"], event.get("step"))
            if key not in self._seen:
                self._seen.add(key)
                new.append(event)
        return new


def stream_job(
    journal: JobJournal, log: Path, tail: int, *, events: bool = True, follow: bool = False
) -> Iterator[dict[str, Any] | str]:
    """Yield the last `tail` events of a job and lines of a log; with `follow`, all later ones.

    A dict is an event, a string is a log line. Following ends when the job has ended.
    """
    new_events, new_lines = NewEvents(journal.events_file), Tail(log)
    first, ended = True, not follow
    while True:
        # a job records its end before its last log line: read once more after it
        over, ended = ended, has_ended(journal)
        fresh = new_events.read() if events else []
        lines = [text.decode(errors="replace") for text in new_lines.read(last=over)]
        yield from fresh[-tail:] if first else fresh
        yield from lines[-tail:] if first else lines
        if over:
            return
        first = False
        time.sleep(POLL)


def has_ended(journal: JobJournal) -> bool:
    """Tell whether a job succeeded, failed or was cancelled."""
    return journal.cancelled or journal.status() is not None
