"""Job end: an ended job is recognised, and success or failure is recorded once."""

from cray_agents.errors import NotFound
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.durable import keep_newest
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import EX_TEMPFAIL
from cray_agents.training_jobs import JobSpec, JobStatus


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
        )
    )
    journal.event("succeeded", checkpoint=spec.id)
    keep_newest(journal.folder / "megatron", 1)  # a later job's `optimizer_from` needs no other
    print(f"finished: checkpoint {spec.id}", flush=True)


def record_failure(journal: JobJournal, reason: str) -> int:
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
