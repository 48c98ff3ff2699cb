"""Job state: where a job stands, what its trainer does next, and how its end is recorded.

A job's state is what its folder and its scheduler's command say together: nothing else is kept, so
whoever asks gets the same answer. `TRANSITIONS` says which state may follow which:

    state      next       when                                           written to its folder
    (none)     queued     it is submitted                                spec.json, scheduler.json
    queued     running    a process of it begins                         attempts/<n>
    queued     paused     it is paused before it has a process           pauses/<n>
    running    paused     it is paused, has saved and stopped            pauses/<n>
    paused     queued     it is resumed                                  pauses/<n>.resumed
    running    queued     its process died or was preempted; restarted   scheduler.json
    running    succeeded  its checkpoint is published                    status.json
    running    failed     it was refused, or restarted in vain           status.json
    queued     failed     its training session cannot start              status.json
    failed     queued     submitted again, in a way that may go on       spec.next.json
    succeeded  queued     submitted again after its weights were pruned  spec.next.json
    the first three may also be cancelled, by a client or with the scheduler's tools: cancelled

`JobFacts` has the table of what the trainer does. Read next: megatron_trainer.py, which finds the
facts and carries it out.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cray_agents.errors import Corrupt, CrayError, NotFound
from cray_agents.paths import Home
from cray_agents.ports import CommandState, CommandStatus, Trainer
from cray_agents.records import Manifest, Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.durable import keep_newest
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.weight_offers import find_offers
from cray_agents.trainers.job.failures.rank_monitor import read_end
from cray_agents.trainers.job.journal import (
    CommandJournal,
    JobJournal,
    changes,
    distance_in,
    mean_measures,
    measures,
    tail_from,
)
from cray_agents.trainers.job.launch import EX_TEMPFAIL
from cray_agents.trainers.job.session_journal import SessionJournal, sessions
from cray_agents.training_jobs import JobSpec, JobState, JobStatus, versions_in

SIGNALLED = 128  # and the signal's number: the exit code of a process that a signal ended
EVERY = 5.0  # seconds between two rounds
RECHECK_ENDED = 12  # rounds between two looks at ended jobs: a failed one may be retried
TRANSITIONS: dict[JobState | None, frozenset[JobState]] = {
    None: frozenset({"queued"}),
    "queued": frozenset({"running", "paused", "failed", "cancelled"}),
    "running": frozenset({"queued", "paused", "succeeded", "failed", "cancelled"}),
    "paused": frozenset({"queued", "cancelled"}),
    "failed": frozenset({"queued"}),
    "succeeded": frozenset({"queued"}),
    "cancelled": frozenset(),
}
log = logging.getLogger(__name__)

#: What a trainer does about a job that it looked at; "report": nothing.
Move = Literal[
    "report",
    "withdraw",  # take the command back, which no process runs yet
    "resubmit",  # the same command, which leaves out other nodes
    "hand_over",  # a new command
    "hand_over_again",  # a new command, which counts as the last one
    "start_when_due",
    "cancel",
    "restart",  # by the rule of its failure, which may fail the job
    "restart_session",  # likewise, by the failure of its session
]


@dataclass(frozen=True)
class JobFacts:
    """What was found of a job. The first row that holds gives its state and the next move.

    fact          state          move             what it means
    cancelled     cancelled      report
    ended         of its status  report           status.json is there
    all_done      queued         report           it is driven by commands: each has its result
    command queued or running:
    nodes_changed queued         resubmit         other nodes failed lately than it leaves out
    paused        paused         withdraw         no process of it yet could see the pause
    queued        queued         report
    running       running        report
    command ended before the job:
    paused        paused         report
    resumed       queued         hand_over        it ended for a pause or a failure that is over
    not_begun     queued         hand_over_again  its session ended before it began the job
    cannot_begin  queued         restart_session  likewise, and by an error of its own
    due           queued         start_when_due   a restart waits for a pause after a failure
    by_somebody   cancelled      cancel           with the scheduler's own tools
    else          queued         restart
    """

    cancelled: bool = False
    ended: JobStatus | None = None
    all_done: bool = False
    command: CommandState = "unknown"
    nodes_changed: bool = False
    paused: bool = False
    resumed: bool = False
    not_begun: bool = False
    cannot_begin: bool = False
    due: bool = False
    by_somebody: bool = False

    @property
    def row(self) -> "Row":
        """The row that holds."""
        return next(row for row in ROWS if row.holds(self))

    def live(self, *states: CommandState) -> bool:
        """Return True if the command is in one of these states."""
        return self.command in states


@dataclass(frozen=True)
class Row:
    """A row of JobFacts' table. The state of one that has ended is that of its status."""

    holds: Callable[[JobFacts], bool]
    state: JobState
    move: Move

    @property
    def starts(self) -> bool:
        """True if the move may start a process, or ends the job."""
        return self.move not in ("report", "withdraw")


ROWS = (
    Row(lambda facts: facts.cancelled, "cancelled", "report"),
    Row(lambda facts: facts.ended is not None, "succeeded", "report"),
    Row(lambda facts: facts.all_done, "queued", "report"),
    Row(lambda f: f.live("queued") and f.nodes_changed and not f.paused, "queued", "resubmit"),
    Row(lambda facts: facts.live("queued") and facts.paused, "paused", "withdraw"),
    Row(lambda facts: facts.live("queued"), "queued", "report"),
    Row(lambda facts: facts.live("running"), "running", "report"),
    Row(lambda facts: facts.paused, "paused", "report"),
    Row(lambda facts: facts.resumed, "queued", "hand_over"),
    Row(lambda facts: facts.cannot_begin, "queued", "restart_session"),
    Row(lambda facts: facts.not_begun, "queued", "hand_over_again"),
    Row(lambda facts: facts.due, "queued", "start_when_due"),
    Row(lambda facts: facts.by_somebody, "cancelled", "cancel"),
    Row(lambda facts: True, "queued", "restart"),
)


def should_retry(journal: JobJournal, spec: JobSpec) -> bool:
    """Return True if the job's weights were pruned, or it failed and `spec` runs it differently.

    A failed job by commands is tried again as it is: its client has mended the cause, such as a
    full disk. So is a job that failed for its disk. Raises Corrupt.
    """
    ended = None if journal.cancelled else journal.status()
    if ended is not None and ended.checkpoint is not None:
        return checkpoints.read_pruned(journal.home.checkpoint(ended.checkpoint)) is not None
    if ended is None or ended.state != "failed":
        return False
    mended = spec.commands is not None or journal.failed_for == "storage"
    return mended or bool(changes(journal.spec(), spec))


# ---- the status, by the folder alone
class Handover(Record):
    """The last command given to the scheduler. `restarts` counts restarts in a row at `step`.

    `attempts` and `log_bytes` are what the job had then: later ones are that command's. `due`: unix
    seconds of a restart that a pause delays, `why` its reason.

    `resumed`: the command ended for a pause or a retry, which is neither a cancellation nor a
    death. `session`: the id of the training session that the job was handed to. `left_out`: the
    nodes that it leaves out while it waits.
    """

    id: str = ""
    step: int = 0
    restarts: int = 0
    resumed: bool = False
    session: str = ""
    attempts: int = 0
    log_bytes: int = 0
    due: float = 0.0
    why: str = ""
    left_out: list[str] = Field(default_factory=list)


def read_status(home: Home, job_id: str) -> JobStatus:
    """Return a job's status from its folder alone, without a scheduler. Raises NotFound."""
    journal = JobJournal(home, job_id)
    spec = journal.spec()
    if (ended := journal.status()) is not None:
        last = read_handover(journal)
        added = {"scheduler_job_id": last.id, **session_of(journal, last)}
        return ended.model_copy(update={**added, "metrics": newest_measures(journal)})
    waits = journal.wait_reason
    state: JobState = "running" if journal.attempts and waits is None else "queued"
    state = "paused" if journal.paused else state
    status = describe(journal, spec, "cancelled" if journal.cancelled else state)
    return status if status.state != "queued" else status.model_copy(update={"reason": waits or ""})


def describe(journal: JobJournal, spec: JobSpec, state: JobState) -> JobStatus:
    """Return the status of a job without a status.json, from its events."""
    events = journal.events()
    steps = [e for e in events if e.get("event") == "step"]
    return JobStatus(
        id=spec.id,
        state=state,
        scheduler_job_id=read_handover(journal).id,
        step=steps[-1]["step"] if steps else 0,
        steps=spec.hyperparameters.steps,
        attempts=journal.attempts,
        loss_first=steps[0]["loss"] if steps else None,
        session=read_handover(journal).session,
        loss_last=steps[-1]["loss"] if steps else None,
        trained_tokens=sum(e["tokens"] for e in steps),
        seconds=sum(e["seconds"] for e in steps),
        metrics=measures(steps[-1]) if steps else {},
        taken_up=journal.taken_up,
        layers=journal.layers,
        warnings=journal.warnings,
        versions=versions_in(events),
        offered=state == "running" and bool(find_offers(journal.home.sessions, spec.id)),
        **_disagreement(events),
    )


def _disagreement(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `agreement`, `differences` and `mean_metrics` of a JobStatus."""
    last = ([event for event in events if event["event"] == "agreement"] or [{}])[-1]
    return {
        "agreement": (found := distance_in(last)),
        "differences": last.get("largest", []) if found else [],
        "mean_metrics": mean_measures(events),
    }


def session_of(journal: JobJournal, last: Handover) -> dict[str, Any]:
    """Return the fields of a JobStatus that only a job's events and handover have."""
    taken_up = journal.taken_up if last.session else None
    fields = {"session": last.session, "taken_up": taken_up, "layers": journal.layers}
    return {**fields, "warnings": journal.warnings, "versions": journal.versions}


def newest_measures(journal: JobJournal) -> dict[str, Any]:
    """Return `JobStatus.metrics`, also of a job that has ended."""
    newest = journal.last_step
    return measures(newest) if newest is not None else {}


def read_handover(journal: JobJournal) -> Handover:
    """Return a job's last handover to the scheduler; an empty one if there was none."""
    return checksums.find_record(Handover, journal.folder / "scheduler.json") or Handover()


def note_handover(journal: JobJournal, handover: Handover) -> None:
    """Record a job's handover, in place of the last one."""
    durable.replace_file(journal.folder / "scheduler.json", checksums.record_text(handover))


# ---- jobs by commands and in sessions
def progress_of(spec: JobSpec, journal: JobJournal) -> int:
    """Return the number of a job's newest step, or of its newest command that has a result."""
    return journal.step if spec.commands is None else CommandJournal(journal.folder).done


def waits_for_commands(spec: JobSpec, journal: JobJournal) -> bool:
    """Return True for a job by commands that all have results: no process needs to run it."""
    return spec.commands is not None and CommandJournal(journal.folder).idle


def handed_to(journal: JobJournal) -> SessionJournal | None:
    """Return the session that a job was handed to last; None if it has its own processes."""
    session = read_handover(journal).session
    return SessionJournal(journal.home, session) if session else None


def free_idle_sessions(home: Home, keep: str) -> None:
    """Ask the sessions that have nothing to do to end, so that a queued command finds room."""
    for session in sessions(home):
        jobs = (JobJournal(home, job_id) for job_id in session.queue())
        idle = all(waits_for_commands(journal.spec(), journal) for journal in jobs)
        if session.session_id != keep and idle:
            session.ask_to_end()


def slurm_cancelled(journal: JobJournal, last: Handover) -> bool:
    """Return True if Slurm cancelled a job itself, as a site's PreemptMode=REQUEUE does."""
    text = tail_from(journal.log, last.log_bytes)
    return any(f"DUE TO {why}" in text for why in ("PREEMPTION", "NODE FAILURE", "TIME LIMIT"))


def died_at_start(session: SessionJournal, command: CommandStatus) -> bool:
    """Return True if a session ended by an error of its own before it began any job."""
    current = session.current
    took_one = current is not None and not JobJournal(session.home, current).ended
    return (
        not took_one
        and command.exit_code in range(1, SIGNALLED)
        and (command.exit_code != EX_TEMPFAIL)
    )


def session_view(
    session: SessionJournal, journal: JobJournal, command: CommandStatus
) -> CommandStatus:
    """Return a running session's command as one of its jobs sees it.

    The job is queued while another one is trained. A job that the session let go of unfinished, for
    a pause that is over since, is handed over again. One that it could not write for has died.
    """
    if session.current == journal.job_id:
        return command
    if left(journal):
        return command.model_copy(update={"state": "failed"})
    if not journal.ended and not journal.paused:
        session.hand_over(journal.job_id)
    waits = journal.job_id in session.queue()
    return command.model_copy(update={"state": "queued" if waits else "unknown"})


def left(journal: JobJournal) -> bool:
    """Return True if the job's session went on without it, for a disk that took no more."""
    return read_handover(journal).session != "" and read_end(journal.folder) is not None


# ---- the end
def already_ended(journal: JobJournal, spec: JobSpec) -> int | None:
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
            record_success(journal, spec)
        print(f"{spec.id} is finished already: trained 0 steps", flush=True)
        return 0
    if journal.paused:
        print(f"{spec.id} is paused: nothing to do until it is resumed", flush=True)
        return EX_TEMPFAIL
    return None


def record_success(journal: JobJournal, spec: JobSpec) -> None:
    """Record success from the published manifest, whichever attempt published it."""
    path = journal.home.checkpoint(spec.id) / "manifest.json"
    if not path.exists():
        raise NotFound(f"the ranks of {spec.id} ended well, but published no {path}")
    metrics = checksums.read_record(Manifest, path).metrics
    try:
        disagreement = _disagreement(journal.events())
    except Corrupt as problem:  # a damaged line must not hide that the job is done
        print(problem, flush=True)
        disagreement = {}
    journal.event("succeeded", checkpoint=spec.id)  # before the status: who sees that reads all
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
            changed_share=metrics.get("changed_share"),
            update_ratio=metrics.get("update_ratio"),
            checkpoint=spec.id,
            **disagreement,
        )
    )
    keep_newest(journal.folder / "megatron", 1)  # a later job's `optimizer_from` needs no other
    print(f"finished: checkpoint {spec.id}", flush=True)


def record_failure(journal: JobJournal, reason: str) -> int:
    """Record a failure that a restart would not mend; return the exit code."""
    print(f"failed: {reason}", flush=True)
    if not journal.exists:
        return 1
    steps = journal.spec().hyperparameters.steps
    journal.event("failed", message=reason)
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
    return 1


# ---- jobs that no client asks for
async def restart_unfinished_jobs(home: Home, trainer: Trainer, every: float = EVERY) -> None:
    """Ask for the status of every unfinished job, until cancelled; log each new error once."""
    ended: set[str] = set()
    troubles: dict[str, str] = {}
    for number in itertools.count():
        if number % RECHECK_ENDED == 0:
            ended.clear()
        jobs: list[str] = []
        with _noting("the jobs", troubles):
            unchanged = await asyncio.to_thread(trainer.unchanged)
            jobs = await asyncio.to_thread(unfinished_jobs, home, ended, unchanged)
        for job_id in jobs:
            with _noting(job_id, troubles):
                await asyncio.to_thread(trainer.status, job_id)
        await asyncio.sleep(every)


@contextmanager
def _noting(what: str, troubles: dict[str, str]) -> Iterator[None]:
    """Log an error unless it is the last one of the same thing."""
    try:
        yield
    except Exception as error:
        if troubles.get(what) != str(error):
            known = isinstance(error, CrayError | OSError)
            log.warning("%s: %s; asked again", what, error, exc_info=not known)
        troubles[what] = str(error)
    else:
        troubles.pop(what, None)


def unfinished_jobs(home: Home, ended: set[str], unchanged: Set[str] = frozenset()) -> list[str]:
    """Return the names of the jobs that have not ended, without the `unchanged` ones.

    Jobs that have ended are added to `ended`. The files of a job in either set are not looked at.
    """
    names = durable.names_in(home.jobs)
    ended &= names
    unfinished = []
    for name in sorted(names - ended - unchanged):
        journal = JobJournal(home, name)
        if journal.ended:
            ended.add(name)
        elif journal.exists:
            unfinished.append(name)
    return unfinished
