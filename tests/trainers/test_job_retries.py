"""Ended jobs that are submitted again: which of them are tried again; kills lose nothing."""

import atexit
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus
from cray_agents.records import Manifest
from cray_agents.runtime.registry.checkpoints import Pruned, pruned_file
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.trainers.job.job_state import read_handover, read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus, Layout, Policy

#: A job's process, which fails unless logprob_limit is raised.
PROCESS = """
import sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobStatus
path = Path(sys.argv[1])
journal = JobJournal(Home(path.parents[2]), path.parent.name)
journal.claim_attempt()
if journal.spec().logprob_limit is None:
    journal.write_status(JobStatus(id=journal.job_id, state="failed", error="raise logprob_limit"))
    journal.event("failed", message="raise logprob_limit")
    sys.exit(1)
journal.write_status(JobStatus(id=journal.job_id, state="succeeded"))
"""
RENAMES = {"os.rename", "os.link"}  # what others see changes with these alone


@functools.cache
def parent() -> str:
    """The directory of one that a job can begin from; where it lies is not part of a job's name."""
    folder = Path(tempfile.mkdtemp(prefix="parent-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_seed_model(folder / "p", seed=0, corpus=["What is 1 + 1?"])
    return str(folder / "p")


def some_spec(**how: Any) -> JobSpec:
    given = {
        "dataset": "d",
        "parent": parent(),
        "parent_sha256": "0" * 64,
        "hyperparameters": Hyperparameters(steps=8, learning_rate=1e-3),
    }
    return JobSpec.model_validate(given | how)


class Tiny(LocalProcesses):
    """Processes of this host that run PROCESS in the place of a job's own program."""

    def submit(self, command: Command) -> str:
        argv = [sys.executable, "-c", PROCESS, command.argv[-1]]
        return super().submit(command.model_copy(update={"argv": argv}))


def ended(trainer: MegatronTrainer, spec: JobSpec) -> JobStatus:
    """How it ends, once its process has ended, too."""
    trainer.submit(spec)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        status = trainer.status(spec.id)
        runs = trainer.scheduler.status(spec.id).state == "running"
        if status.state in ("failed", "succeeded") and not runs:
            return status
        time.sleep(0.02)
    raise AssertionError(status)


def test_a_job_knows_how_much_the_replicas_of_its_platform_round(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with Tiny(home.slurm) as scheduler:
        trainer = MegatronTrainer(home, scheduler, engine_dtype="bfloat16")
        trainer.submit(some_spec())
        assert JobJournal(home, some_spec().id).spec().engine_dtype == "bfloat16"
        trainer.cancel(some_spec().id)
        in_fp8 = MegatronTrainer(home, scheduler, engine_dtype="fp8")
        hyper = some_spec().hyperparameters
        trusting = hyper.model_copy(update={"policy": Policy(importance_cap=None)})
        with pytest.raises(BadInput, match=r"sample in FP8.*importance_cap") as refused:
            in_fp8.submit(some_spec(method="grpo", hyperparameters=trusting))
        assert refused.value.param == "importance_cap"


@pytest.mark.slow
def test_a_failed_job_is_tried_again_only_if_it_is_to_be_run_otherwise(tmp_path: Path) -> None:
    home, first = Home(tmp_path / "home"), some_spec()
    journal = JobJournal(home, first.id)
    with Tiny(home.slurm) as scheduler:
        trainer = MegatronTrainer(home, scheduler)
        assert ended(trainer, first).error == "raise logprob_limit"
        trainer.submit(first)
        trainer.submit(some_spec(evaluate_every=None))  # a layout that is left open is no wish
        assert (trainer.status(first.id).state, journal.attempts) == ("failed", 1)
        point = journal.folder / "megatron" / "step-00000003"
        point.mkdir(parents=True)
        journal.pause()  # it failed before it saw this

        wider = some_spec(layout=Layout(data=2), save_every=7)
        assert ended(trainer, wider).state == "failed" and journal.attempts == 2
        raised = some_spec(logprob_limit=0.5, save_every=7)
        assert wider.id == raised.id == first.id
        assert ended(trainer, raised).state == "succeeded"
        assert ended(trainer, first).state == "succeeded" and journal.attempts == 3
    spec = journal.spec()
    assert (spec.logprob_limit, spec.save_every, spec.layout) == (0.5, 7, Layout())
    for number in (1, 2):
        told = JobStatus.model_validate_json((journal.folder / f"status.{number}.json").read_text())
        assert (told.state, told.error) == ("failed", "raise logprob_limit")
    once, twice = [e["changes"] for e in journal.events() if e["event"] == "retried"]
    assert "save_every: 7, was 50" in once and "logprob_limit: 0.5, was None" in twice
    assert journal.resume_points == [point] and not journal.paused


def test_what_was_cancelled_stays_so(tmp_path: Path) -> None:
    home, first = Home(tmp_path / "home"), some_spec()
    journal = JobJournal(home, first.id)
    journal.write_spec(first)
    journal.write_status(JobStatus(id=first.id, state="failed", error="why"))
    journal.cancel()
    trainer = MegatronTrainer(home, OnPaper(tmp_path))
    assert trainer.submit(some_spec(logprob_limit=0.5)).state == "cancelled"
    assert (journal.folder / "status.json").exists() and journal.spec() == first


def test_one_whose_weights_were_pruned_is_trained_again(tmp_path: Path) -> None:
    home, spec = Home(tmp_path / "home"), some_spec()
    journal, paper = JobJournal(home, spec.id), OnPaper(tmp_path)
    trainer, checkpoint = MegatronTrainer(home, paper), home.checkpoint(spec.id)
    done = JobStatus(id=spec.id, state="succeeded", checkpoint=spec.id)
    trainer.submit(spec)
    checkpoint.mkdir(parents=True)
    journal.write_status(done)
    assert trainer.submit(spec).state == "succeeded" and paper.told == [None]

    checkpoint.rmdir()
    assert trainer.submit(spec).state == "succeeded"  # not pruned: how it went is not known
    manifest = Manifest(job=spec.id, weights_sha256="0" * 64, files={})
    pruned_file(checkpoint).write_text(Pruned(manifest=manifest).model_dump_json())
    paper.tell("died")
    assert trainer.submit(spec).state == "queued"
    assert trainer.submit(spec).state == "running" and paper.told == [None, "died", None]
    [event] = [e for e in journal.events() if e["event"] == "retried"]
    assert event["changes"] == ["its weights were pruned"]
    assert (journal.folder / "status.1.json").exists()

    checkpoint.mkdir()
    journal.write_status(done)
    assert trainer.submit(spec).state == "succeeded" and paper.told == [None, "died", None]


# ---- kills
class OnPaper:
    """A scheduler that writes down with which limit a job was handed over; it runs from then on."""

    name = "paper"

    def __init__(self, folder: Path) -> None:
        self._paper = folder / "paper"

    @property
    def told(self) -> list[Any]:
        lines = self._paper.read_text().splitlines() if self._paper.exists() else []
        return [json.loads(line) for line in lines]

    def tell(self, what: object) -> None:
        with self._paper.open("a") as paper:
            print(json.dumps(what), file=paper)

    def submit(self, command: Command) -> str:
        self.tell(json.loads(Path(command.argv[-1]).read_text())["logprob_limit"])
        return str(len(self.told))

    def status(self, name: str) -> CommandStatus:
        died = self.told[-1:] in ([], ["died"])
        return CommandStatus(state="failed" if died else "running", id=str(len(self.told)))

    def cancel(self, name: str) -> None: ...


def submit_until(folder: str, spec: JobSpec, changes: int) -> None:
    """Submit it otherwise; die by SIGKILL just before the n-th file is put in its place."""
    left = changes

    def looked(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in RENAMES and folder in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = MegatronTrainer(Home(Path(folder) / "home"), OnPaper(Path(folder)))
    sys.addaudithook(looked)
    trainer.submit(spec)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_kill_at_any_moment_neither_loses_the_try_nor_repeats_the_old_one(
    tmp_path: Path, kept: bool
) -> None:
    """`kept`: somebody asks how the job stands before it is submitted again."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__])
    seen, raised = set(), some_spec(logprob_limit=0.5)
    for changes in count(1):
        folder = tmp_path / str(changes)
        folder.mkdir()
        home, paper, first = Home(folder / "home"), OnPaper(folder), some_spec()
        journal = JobJournal(home, first.id)
        MegatronTrainer(home, paper).submit(first)
        paper.tell("died")
        # as after restarts in vain
        note = read_handover(journal).model_copy(update={"restarts": 3})
        (journal.folder / "scheduler.json").write_text(note.model_dump_json())
        journal.write_status(JobStatus(id=first.id, state="failed", error="why"))

        killed = forking.Process(target=submit_until, args=(str(folder), raised, changes))
        killed.start()
        killed.join()
        if kept:
            failed = MegatronTrainer(home, paper).status(first.id).state == "failed"
            assert paper.told == [None, "died", *([] if failed else [0.5])]
            seen.add(failed)
        again = MegatronTrainer(home, paper).submit(raised)
        assert again.state != "failed" and paper.told == [None, "died", 0.5]
        assert journal.spec().logprob_limit == 0.5 and read_handover(journal).restarts <= 1
        [old] = journal.folder.glob("status.*.json")
        assert (old.name, json.loads(old.read_text())["error"]) == ("status.1.json", "why")
        assert "retried" in [event["event"] for event in journal.events()]
        if killed.exitcode == 0:
            break
        assert killed.exitcode == -signal.SIGKILL
    assert changes > 6 and (not kept or seen == {True, False})
    assert read_status(home, first.id).state == "queued"
