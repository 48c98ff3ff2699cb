"""The trainer over real processes: jobs that are killed, cancelled, paused and resumed."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, NotFound
from cray_agents.ports import Command, CommandState, CommandStatus, Trainer
from cray_agents.runtime.scheduler.choose import SchedulerKind, open_scheduler
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.job.job_command import TRAINERS, code_version
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.training_jobs import JobStatus
from tests.support.waiting import wait_until
from tests.support.waiting_scheduler import WaitingScheduler


def wait(trainer: Trainer, job_id: str, until: Any) -> JobStatus:
    deadline = time.monotonic() + 400
    while not until(status := trainer.status(job_id)):
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def ended(status: JobStatus) -> bool:
    return status.state in ("succeeded", "failed", "cancelled")


@pytest.mark.megatron
def test_submitted_twice_it_is_trained_once_and_survives_a_kill(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # processes of its own, as users start it
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 500}, save_every=20)
    with LocalProcesses(lab.home.root / "local") as scheduler:
        trainer = MegatronTrainer(lab.home, scheduler)
        assert trainer.submit(spec).state in ("queued", "running")
        journal = JobJournal(lab.home, spec.id)
        wait_until(lambda: any(event["event"] == "saved" for event in journal.events()))
        middle = trainer.submit(spec)
        assert (middle.state, middle.attempts, middle.steps) == ("running", 1, 500)
        _kill_training(journal)
        status = wait(MegatronTrainer(lab.home, scheduler), spec.id, ended)
        assert (status.state, status.step, status.attempts) == ("succeeded", 500, 2), status
        assert (status.scheduler, status.checkpoint) == ("local", spec.id)
        starts = [e["from_step"] for e in journal.events() if e["event"] == "started"]
        assert starts[0] == 0 and starts[1] >= 20
        assert trainer.submit(spec) == trainer.cancel(spec.id) == status


def _kill_training(journal: JobJournal) -> None:
    """SIGKILL for the launcher of the newest attempt; its rank dies with it."""
    import json
    import os
    import signal

    claim = json.loads((journal.folder / "attempts" / str(journal.attempts)).read_bytes())
    os.kill(claim["pid"], signal.SIGKILL)


@pytest.mark.megatron
@pytest.mark.usefixtures("forked_jobs")
def test_a_cancelled_job_stays_cancelled(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 100000})
    with LocalProcesses(lab.home.root / "local") as scheduler:
        trainer = MegatronTrainer(lab.home, scheduler)
        trainer.submit(spec)
        wait(trainer, spec.id, lambda status: status.step >= 1)
        assert trainer.cancel(spec.id).state == "cancelled"
        wait_until(lambda: scheduler.status(spec.id).state != "running")
        assert trainer.submit(spec).state == "cancelled"
        assert scheduler.status(spec.id).state != "running"
        assert not lab.home.checkpoint(spec.id).exists()


class Deadly(WaitingScheduler):
    """A scheduler on whose machines every command dies at once; says so into its log."""

    def submit(self, command: Command) -> str:
        with Path(command.log).open("a") as log:
            log.write(f"out of memory, time {len(self.commands) + 1}\n")
        return super().submit(command)


def test_a_job_that_never_gets_further_fails_with_its_log(lab: Any) -> None:
    scheduler = Deadly(CommandStatus(state="failed", exit_code=137, reason="OOM"))
    trainer = MegatronTrainer(lab.home, scheduler)
    spec = lab.spec("qwen3")
    trainer.submit(spec)
    status = wait(trainer, spec.id, ended)
    assert status.state == "failed"
    assert len(scheduler.commands) == 4
    assert status.error is not None
    assert "exit code 137 OOM" in status.error
    assert "out of memory, time 4" in status.error
    assert trainer.submit(spec).state == "failed"
    assert len(scheduler.commands) == 4
    command = scheduler.commands[0]
    assert command.name == spec.id
    assert command.argv[1:4] == ["-P", "-m", "cray_agents.trainers.job.job"]
    with pytest.raises(NotFound, match="job-none"):
        trainer.status("job-none")


def test_the_code_version_is_of_all_sources(tmp_path: Path) -> None:
    before = code_version()
    assert before == code_version() and len(before) == 16
    copy = tmp_path / "trainers"
    shutil.copytree(TRAINERS, copy)
    assert code_version(copy) == before
    for file in ("methods/grpo.py", "models/weights.py", "training/train_step.py", "job/rank.py"):
        with (copy / file).open("a") as source:
            source.write("# changed\n")
        assert code_version(copy) != before
        before = code_version(copy)


def starts(journal: JobJournal) -> list[int]:
    return [e["from_step"] for e in journal.events() if e["event"] == "started"]


NO_SLURM = pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed")


@pytest.mark.megatron
@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(
    "kind", ["local", pytest.param("slurm", marks=[pytest.mark.slurm, NO_SLURM])]
)
def test_a_paused_job_saves_stays_paused_and_goes_on_with_the_same_curve(
    lab: Any, undisturbed_job: Any, monkeypatch: pytest.MonkeyPatch, kind: SchedulerKind
) -> None:
    if kind == "slurm":
        monkeypatch.delenv("PYTHONPATH")  # processes of its own, as users start it
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 300}, save_every=1000)
    undisturbed = undisturbed_job(spec)
    journal = JobJournal(lab.home, spec.id)
    with open_scheduler(kind, lab.home.slurm) as scheduler:
        trainer = MegatronTrainer(lab.home, scheduler)
        trainer.submit(spec)
        wait(trainer, spec.id, lambda status: status.step >= 1)
        assert trainer.pause(spec.id).state in ("running", "paused")
        paused = wait(trainer, spec.id, lambda status: status.state == "paused")
        assert 1 <= paused.step < 300
        assert scheduler.status(spec.id).state == "failed"  # exit code 75: its processes are gone
        assert [p.name for p in (journal.folder / "megatron").iterdir()] == [
            f"step-{paused.step:08d}"
        ]
    with open_scheduler(kind, lab.home.slurm) as scheduler:  # as of a restarted platform
        trainer = MegatronTrainer(lab.home, scheduler)
        for _ in range(3):
            assert trainer.status(spec.id) == trainer.submit(spec) == trainer.pause(spec.id)
        assert trainer.status(spec.id).state == "paused"
        assert journal.attempts == 1
        assert trainer.resume(spec.id).state in ("queued", "running")
        with pytest.raises(BadInput, match="not paused"):
            trainer.resume(spec.id)
        status = wait(trainer, spec.id, ended)
        assert (status.state, status.step, status.attempts) == ("succeeded", 300, 2), status
        with pytest.raises(BadInput, match="nothing left to pause"):
            trainer.pause(spec.id)
    assert starts(journal) == [0, paused.step]
    losses = [e["loss"] for e in journal.events() if e["event"] == "step"]
    assert losses == undisturbed.losses and len(losses) == 300
    ours, theirs = (x.home.checkpoint(spec.id) for x in (lab, undisturbed.journal))
    assert weights_sha256(ours) == weights_sha256(theirs)


class Waiting:
    """A scheduler whose commands wait in its queue; each can be ended, or given a machine."""

    name = "waiting"

    def __init__(self) -> None:
        self.states: list[CommandState] = []

    def submit(self, command: Command) -> str:
        if not self.states or self.states[-1] != "queued":
            self.states.append("queued")
        return str(len(self.states))

    def status(self, name: str) -> CommandStatus:
        state = self.states[-1] if self.states else "unknown"
        return CommandStatus(state=state, id=str(len(self.states)))

    def cancel(self, name: str) -> None:
        self.states[-1] = "cancelled"


def test_a_queued_job_is_paused_out_of_the_queue_and_resumed_as_often_as_one_likes(
    lab: Any,
) -> None:
    scheduler = Waiting()
    trainer = MegatronTrainer(lab.home, scheduler)
    spec = lab.spec("qwen3")
    with pytest.raises(NotFound):
        trainer.pause(spec.id)
    assert trainer.submit(spec).state == "queued"
    for times in range(1, 7):  # more often than a job that dies is started again
        assert trainer.pause(spec.id).state == "paused"
        assert scheduler.states == ["cancelled"] * times
        assert trainer.status(spec.id).state == "paused"
        assert trainer.resume(spec.id).state == "queued"
    again = JobJournal(lab.home, spec.id)
    assert not again.paused and not again.cancelled
    trainer.pause(spec.id)
    assert trainer.cancel(spec.id).state == "cancelled"
    with pytest.raises(BadInput, match="is cancelled, not paused"):
        trainer.resume(spec.id)
    assert trainer.submit(spec).state == "cancelled"
    assert scheduler.states[-1] == "cancelled"


def test_a_start_that_finds_its_job_paused_does_nothing(lab: Any) -> None:
    from cray_agents.trainers.job import job

    spec = lab.spec("qwen3")
    journal = JobJournal(lab.home, spec.id)
    journal.write_spec(spec)
    journal.pause()
    assert job.run(journal) == 75
    assert journal.attempts == 0 and journal.paused
