"""Sessions that cannot start, and sessions that make room for others."""

from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.ports import CommandStatus
from cray_agents.trainers.job.failures.failure import FailureSettings
from cray_agents.trainers.job.failures.rank_monitor import BadEnd, note_end
from cray_agents.trainers.job.job_state import note_handover, read_handover
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.trainers.job.megatron_trainer import MAX_RESTARTS, MegatronTrainer
from cray_agents.trainers.job.session_journal import SessionJournal, sessions
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_commands import CommandResult, Save
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.waiting_scheduler import WaitingScheduler


def some_spec(root: Path, **how: Any) -> JobSpec:
    make_seed_model(root / "parent", seed=0, corpus=["What is 1 + 1?"])
    given = {
        "dataset": "d",
        "parent": str(root / "parent"),
        "parent_sha256": "0" * 64,
        "hyperparameters": Hyperparameters(steps=8, learning_rate=1e-3),
        "layout": Layout(),
    }
    return JobSpec.model_validate(given | how)


def test_a_session_that_cannot_start_fails_its_job_with_its_own_log(tmp_path: Path) -> None:
    at_once = FailureSettings(back_off=())
    trainer = MegatronTrainer(
        Home(tmp_path),
        WaitingScheduler(CommandStatus(state="failed", exit_code=1)),
        Resources(ranks=1),
        failures=at_once,
    )
    status = trainer.submit(some_spec(tmp_path, session="loop"))
    [session] = sessions(trainer.home)
    session.log.parent.mkdir(parents=True, exist_ok=True)
    session.log.write_text("no room for its ranks")
    for _ in range(9):
        status = trainer.status(status.id)
    assert status.state == "failed" and "no room for its ranks" in (status.error or "")
    assert len(trainer.scheduler.commands) == 1 + MAX_RESTARTS  # type: ignore[attr-defined]


def test_a_job_that_a_session_could_not_write_for_starts_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    """After a pause each time, and not for ever; another submission begins anew."""
    rules = FailureSettings(back_off=(1000.0,))
    trainer = MegatronTrainer(
        Home(tmp_path),
        WaitingScheduler(CommandStatus(state="running")),
        Resources(ranks=1),
        failures=rules,
    )
    spec = some_spec(tmp_path, session="loop")
    journal, starts = JobJournal(trainer.home, trainer.submit(spec).id), []
    [session] = sessions(trainer.home)

    def leave() -> None:
        assert session.queue() == [spec.id]
        starts.append(journal.claim_attempt())
        end = "the checkpoint was not written: No space left on device"
        note_end(journal.folder, BadEnd(rank=-1, how=end))
        session.withdraw(spec.id)

    for _ in range(MAX_RESTARTS):
        leave()
        status = trainer.status(spec.id)
        assert status.state == "queued" and "starts again in" in status.reason
        assert "No space left on device" in status.reason
        assert trainer.status(spec.id).state == "queued" and session.queue() == []
        paused = read_handover(journal)
        note_handover(journal, paused.model_copy(update={"due": 1.0}))
        assert trainer.status(spec.id).state == "queued"
    leave()
    failed = trainer.status(spec.id)
    assert failed.state == "failed" and "look at its free space" in (failed.error or "")
    assert starts == [1, 2, 3, 4] and session.queue() == []
    assert trainer.submit(spec).state == "queued" and session.queue() == [spec.id]
    assert read_handover(journal).restarts == 0
    [retried] = [event for event in journal.events() if event["event"] == "retried"]
    assert retried["changes"] == ["the disk may have room again"]


def test_a_session_that_waits_for_its_client_makes_room(tmp_path: Path) -> None:
    trainer = MegatronTrainer(Home(tmp_path / "home"), WaitingScheduler(), Resources(ranks=1))
    spec = some_spec(tmp_path, dataset="", commands="own", session="commands")
    job = trainer.submit(spec).id
    [idle] = sessions(trainer.home)
    idle.note_current(job)
    commands = CommandJournal(trainer.home.job(job))
    commands.append(1, Save())
    other = trainer.submit(spec.model_copy(update={"commands": "other", "session": "loop"}))
    CommandJournal(trainer.home.job(other.id)).append(1, Save())
    trainer.status(other.id)
    assert not idle.asked_to_end  # it has a command to carry out
    commands.write_result(CommandResult(sequence=1))
    trainer.status(other.id)
    assert idle.asked_to_end
    mine = SessionJournal(trainer.home, other.session)
    assert not mine.asked_to_end
