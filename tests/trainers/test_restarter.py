"""Jobs go on although no client asks after them: over real processes, but without Megatron."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cray_agents.errors import SchedulerError
from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus, Trainer
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.trainers.job.job_state import (
    read_handover,
    read_status,
    restart_unfinished_jobs,
    unfinished_jobs,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus, Layout
from tests.support.scripted_platform import bare_model
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import until

#: A job's process; its first attempt comes to no end of its own.
PROCESS = """
import sys, time
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobStatus
path, why = Path(sys.argv[1]), sys.argv[2]
journal = JobJournal(Home(path.parents[2]), path.parent.name)
if journal.claim_attempt() == 1:
    while why == "pause" and not (journal.folder / "let_go").exists():
        time.sleep(0.01)
    while why == "platform":
        time.sleep(1)
    sys.exit(75)
journal.write_status(JobStatus(id=journal.job_id, state="succeeded"))
"""


class Tiny(LocalProcesses):
    """Processes of this host that run PROCESS in the place of a job's own program."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(directory)
        self._why = why

    def submit(self, command: Command) -> str:
        argv = [sys.executable, "-c", PROCESS, command.argv[-1], self._why]
        return super().submit(command.model_copy(update={"argv": argv}))


def some_spec(number: int = 0, parent: str = "p") -> JobSpec:
    return JobSpec(
        dataset=f"ds-{number}",
        parent=parent,
        parent_sha256="0" * 64,
        hyperparameters=Hyperparameters(steps=8, learning_rate=1e-3),
        layout=Layout(),
    )


def seeded(folder: Path) -> str:
    """The directory of a parent that a job can begin from."""
    make_seed_model(folder / "parent", seed=0, corpus=["What is 1 + 1?"])
    return str(folder / "parent")


@asynccontextmanager
async def kept_going(home: Home, trainer: Trainer) -> AsyncIterator[None]:
    """As of a platform: the task that nobody awaits."""
    task = asyncio.create_task(restart_unfinished_jobs(home, trainer, every=0.05))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["time", "pause", "platform"])
async def test_a_job_that_no_client_asks_after_goes_on(tmp_path: Path, why: str) -> None:
    """Out of time; paused and resumed before it had stopped; left by a platform that ended."""
    home, spec = Home(tmp_path / "home"), some_spec(parent=seeded(tmp_path))
    journal = JobJournal(home, spec.id)
    with Tiny(home.slurm, why) as scheduler:
        trainer = MegatronTrainer(home, scheduler)
        trainer.submit(spec)
        await until(lambda: journal.attempts == 1)
        if why == "pause":
            trainer.pause(spec.id)
            assert trainer.resume(spec.id).state == "running"
            (journal.folder / "let_go").touch()
        if why != "platform":
            await until(lambda: scheduler.status(spec.id).state == "failed")
            async with kept_going(home, trainer):
                await until(journal.status)
    if why == "platform":
        with Tiny(home.slurm, why) as scheduler:
            async with kept_going(home, MegatronTrainer(home, scheduler)):
                await until(journal.status)
    assert read_status(home, spec.id).state == "succeeded" and journal.attempts == 2


class Away(ScriptedTrainer):
    """Its scheduler does not answer for one of the jobs."""

    def __init__(self, home: Home) -> None:
        super().__init__(home, by_hand=True)
        self.away = ""
        self.asked: list[str] = []

    def status(self, job_id: str) -> JobStatus:
        self.asked.append(job_id)
        if job_id == self.away:
            raise SchedulerError("no controller answers")
        return super().status(job_id)


async def test_what_ended_is_not_asked_after_and_trouble_with_one_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path / "home")
    parent = str(bare_model(tmp_path / "model"))
    trainer = Away(home)
    done, cancelled, first, second = (trainer.submit(some_spec(n, parent)).id for n in range(4))
    trainer.advance(done)
    trainer.cancel(cancelled)
    home.job("job-being-written").mkdir()
    trainer.away = min(first, second)
    trainer.asked.clear()
    with caplog.at_level(logging.WARNING):
        async with kept_going(home, trainer):
            await until(lambda: trainer.asked.count(max(first, second)) > 3)
    assert set(trainer.asked) == {first, second}
    ours = [one.message for one in caplog.records if one.name == read_status.__module__]
    assert ours == [f"{trainer.away}: no controller answers; asked again"]


def test_the_files_of_what_ended_are_looked_at_once(tmp_path: Path) -> None:
    home, ended = Home(tmp_path / "home"), set[str]()
    assert unfinished_jobs(home, ended) == []
    trainer = ScriptedTrainer(home, by_hand=True)
    parent = str(bare_model(tmp_path / "model"))
    done, other = (trainer.submit(some_spec(n, parent)).id for n in range(2))
    trainer.advance(done)
    assert unfinished_jobs(home, ended) == [other] and ended == {done}
    (home.job(done) / "status.json").unlink()
    assert unfinished_jobs(home, ended) == [other]


class Listed:
    """A scheduler whose commands are in the states of `jobs`."""

    name = "listed"

    def __init__(self) -> None:
        self.jobs: dict[str, CommandStatus] = {}
        self.submitted: list[str] = []

    def submit(self, command: Command) -> str:
        self.jobs[command.name] = CommandStatus(state="queued", id="1", reason="Priority")
        self.submitted.append(command.name)
        return "1"

    def status(self, name: str) -> CommandStatus:
        return self.jobs[name]

    def cancel(self, name: str) -> None: ...


class Asked(MegatronTrainer):
    """Notes the jobs whose files are looked at, and counts the rounds."""

    rounds = 0

    def unchanged(self) -> set[str]:
        self.rounds += 1
        return super().unchanged()

    def status(self, job_id: str) -> JobStatus:
        self.asked = [*getattr(self, "asked", []), job_id]
        return super().status(job_id)


async def test_jobs_that_wait_or_run_as_before_are_not_looked_at(tmp_path: Path) -> None:
    home, scheduler = Home(tmp_path / "home"), Listed()
    trainer, parent = Asked(home, scheduler), seeded(tmp_path)
    ids = [trainer.submit(some_spec(n, parent)).id for n in range(3)]
    trainer.asked = []

    async def rounds(count: int) -> None:
        last = trainer.rounds + count
        await until(lambda: trainer.rounds >= last)

    async with kept_going(home, trainer):
        await rounds(4)
        assert trainer.asked == []
        scheduler.jobs[ids[0]] = CommandStatus(state="queued", id="1", reason="Resources")
        scheduler.jobs[ids[1]] = CommandStatus(state="running", id="1")
        await rounds(4)
        assert sorted(trainer.asked) == sorted(ids[:2])
        assert read_status(home, ids[0]).reason == "Resources"
        scheduler.jobs[ids[2]] = CommandStatus(state="failed", id="1", reason="NODE_FAIL")
        await until(lambda: scheduler.submitted.count(ids[2]) == 2)
        JobJournal(home, ids[1]).write_status(JobStatus(id=ids[1], state="succeeded"))
        scheduler.jobs[ids[1]] = CommandStatus(state="succeeded", id="1")
        await until(lambda: ids[1] not in trainer.unchanged())
        await rounds(4)
    restarted = MegatronTrainer(home, scheduler)
    assert restarted.unchanged() == set()  # of what it has not seen it says nothing


class Slow:
    """A scheduler that takes a moment to answer, so that all ask before one has acted."""

    name = "slow"

    def __init__(self) -> None:
        self.submitted = 0
        self.runs = False

    def submit(self, command: Command) -> str:
        self.submitted += not self.runs
        self.runs = True
        return str(self.submitted)

    def status(self, name: str) -> CommandStatus:
        state = CommandStatus(state="running" if self.runs else "failed")
        time.sleep(0.05)
        return state

    def cancel(self, name: str) -> None: ...


def test_several_who_ask_at_once_start_a_dead_job_once(tmp_path: Path) -> None:
    home, spec, scheduler = Home(tmp_path), some_spec(parent=seeded(tmp_path)), Slow()
    trainer = MegatronTrainer(home, scheduler)
    trainer.submit(spec)
    scheduler.runs = False
    askers = [threading.Thread(target=trainer.status, args=(spec.id,)) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert scheduler.submitted == 2
    assert read_handover(JobJournal(home, spec.id)).restarts == 1
