"""Job status: a job's state and handover, as its folder tells them without a scheduler.

Called by megatron_trainer.py, which adds what the scheduler knows.
"""

from typing import Any

from pydantic import Field

from cray_agents.paths import Home
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry.weight_offers import find_offers
from cray_agents.trainers.job.journal import JobJournal, measures
from cray_agents.training_jobs import JobSpec, JobState, JobStatus


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
    steps = [e for e in journal.events() if e.get("event") == "step"]
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
        offered=state == "running" and bool(find_offers(journal.home.sessions, spec.id)),
    )


def session_of(journal: JobJournal, last: Handover) -> dict[str, Any]:
    """Return the fields of a JobStatus that only a job's events and handover tell."""
    taken_up = journal.taken_up if last.session else None
    fields = {"session": last.session, "taken_up": taken_up, "layers": journal.layers}
    return {**fields, "warnings": journal.warnings}


def newest_measures(journal: JobJournal) -> dict[str, Any]:
    """Return `JobStatus.metrics`, also of a job that has ended."""
    newest = journal.last_step
    return measures(newest) if newest is not None else {}


def read_handover(journal: JobJournal) -> Handover:
    """Return a job's last handover to the scheduler; an empty one if there was none."""
    path = journal.folder / "scheduler.json"
    return checksums.read_record(Handover, path) if path.exists() else Handover()


def note_handover(journal: JobJournal, handover: Handover) -> None:
    """Record a job's handover, in place of the last one."""
    text = checksums.with_crc(handover.model_dump_json().encode())
    durable.replace_file(journal.folder / "scheduler.json", text)
