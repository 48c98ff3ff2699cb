"""Sessions that cannot start, and sessions that make room for others."""

from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.ports import CommandStatus
from cray_agents.trainers.job.failures.failure import FailureSettings
from cray_agents.trainers.job.megatron_trainer import MAX_RESTARTS, MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.trainers.session.command_journal import CommandJournal
from cray_agents.trainers.session.session_journal import SessionJournal, sessions
from cray_agents.training_commands import CommandResult, Save
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.waiting_scheduler import WaitingScheduler


def some_spec(root: Path, **how: Any) -> JobSpec:
    make_seed_model(root / "parent", seed=0, corpus=["What is 1 + 1?"])
    given = {
        "dataset": "d",
        "parent": str(root / "parent"),
        "parent_sha256": "0" * 64,
        "hyperparameters": Hyperparameters(steps=8),
        "layout": Layout(),
    }
    return JobSpec.model_validate(given | how)


class CannotStart(WaitingScheduler):
    """Commands that end at once with exit code 1."""

    def status(self, name: str) -> CommandStatus:
        return CommandStatus(state="failed", id=str(len(self.commands)), exit_code=1)


def test_a_session_that_cannot_start_fails_its_job_with_its_own_log(tmp_path: Path) -> None:
    at_once = FailureSettings(back_off=())
    trainer = MegatronTrainer(Home(tmp_path), CannotStart(), Resources(ranks=1), failures=at_once)
    status = trainer.submit(some_spec(tmp_path, session="loop"))
    [session] = sessions(trainer.home)
    session.log.parent.mkdir(parents=True, exist_ok=True)
    session.log.write_text("no room for its ranks")
    for _ in range(9):
        status = trainer.status(status.id)
    assert status.state == "failed" and "no room for its ranks" in (status.error or "")
    assert len(trainer.scheduler.commands) == 1 + MAX_RESTARTS  # type: ignore[attr-defined]


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
