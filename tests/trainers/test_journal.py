"""A job's events: what is written is read again, whole, whatever died in between."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from cray_agents.errors import NewerFormat
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance, Manifest
from cray_agents.trainers.job import job
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import TAIL_BYTES, JobJournal, mean_measures, measures
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus


@pytest.fixture
def journal(tmp_path: Path) -> JobJournal:
    hyper = Hyperparameters(steps=100)
    spec = JobSpec(dataset="d", parent="p", parent_sha256="0" * 64, hyperparameters=hyper)
    found = JobJournal(Home(tmp_path), spec.id)
    found.write_spec(spec)
    return found


def step(journal: JobJournal, number: int, **more: object) -> None:
    values = {"loss": 1.0 / number, "tokens": 10, "seconds": 0.5} | more
    journal.event("step", step=number, **values)


def kinds(journal: JobJournal) -> list[str]:
    return [f"{e['event']} {e.get('step', '')}".strip() for e in journal.events()]


def test_a_restart_drops_all_that_is_told_of_later_steps(journal: JobJournal) -> None:
    journal.event("started", attempt=1, from_step=0)
    journal.event("agreement", tokens=5, max_difference=0.1)
    for number in range(1, 6):
        step(journal, number)
        if number in (2, 4):
            journal.event("evaluation", step=number, loss=0.5, tokens=3)
            journal.event("saved", step=number, seconds=0.1)
    JobJournal(journal.home, journal.job_id).rewind(3)
    step(journal, 5)  # the superseded attempt's file is nobody's any more
    expected = ["started", "agreement", "step 1", "step 2", "evaluation 2", "saved 2", "step 3"]
    assert kinds(journal) == expected and journal.step == 3


def test_a_jobs_measures_are_means_over_its_tokens(journal: JobJournal) -> None:
    step(journal, 1, clip_fraction=0.25, engine_kl=math.nan)
    step(journal, 2, clip_fraction=0.5, engine_kl=1e-3, tokens=30, lr=1e-6)
    assert mean_measures(journal.events()) == {"clip_fraction": 0.4375, "engine_kl": 1e-3}
    journal.event("agreement", tokens=5, max_difference=0.1, mean_difference=0.01,
                  p99_difference=0.05, kl=1e-4, run_id="run", place=7, ours=-1.0,
                  theirs=-1.5, largest=[("run", 7, -1.0, -1.5)])  # fmt: skip
    status = read_status(journal.home, journal.job_id)
    assert status.mean_metrics["clip_fraction"] == 0.4375
    found = LogprobDistance(tokens=5, mean=0.01, p99=0.05, max=0.1, kl=1e-4)
    worst = ("run", 7, -1.0, -1.5)
    assert status.agreement == found.model_copy(update={"worst": worst})
    assert status.differences == [worst]


def test_numbers_that_are_not_finite_are_null_and_named(journal: JobJournal) -> None:
    step(journal, 1, kl=math.nan, ratio=-math.inf, entropy=np.float64(0.5))
    journal.rewind(1)
    [event] = [json.loads(line, parse_constant=pytest.fail)
               for line in journal.events_file.read_text().splitlines()]  # fmt: skip
    assert len(event.pop("crc")) == 8 and event.pop("format") == 1
    assert (event["kl"], event["ratio"], event["entropy"]) == (None, None, 0.5)
    assert event["not_finite"] == {"kl": "nan", "ratio": "-inf"}
    assert measures(event).keys() == {"loss", "tokens", "seconds", "kl", "ratio", "entropy"}


@pytest.mark.parametrize("padding", [0, 100, TAIL_BYTES - 40, TAIL_BYTES, 5 * TAIL_BYTES])
def test_the_newest_step_is_found_behind_anything(journal: JobJournal, padding: int) -> None:
    assert (journal.step, journal.last_step) == (0, None)
    for number in (1, 2):
        step(journal, number, note="x" * padding)
    journal.event("evaluation", step=2, loss=0.5, tokens=3)
    journal.event("corrupt", message='not {"event":"step","step":7} at all ' + "y" * padding)
    assert journal.step == 2
    assert journal.last_step is not None and journal.last_step["loss"] == 0.5
    with journal.events_file.open("ab") as file:
        file.write(b'{"event":"step","step":9,' + b"z" * padding)
    assert journal.step == 2


def test_a_line_that_a_kill_tore_is_not_gone_on_with(journal: JobJournal) -> None:
    step(journal, 1)
    with journal.events_file.open("ab") as file:
        file.write(b'{"event":"st')
    JobJournal(journal.home, journal.job_id).event("failed", message="no memory")
    assert kinds(journal) == ["step 1", "failed"]


def test_the_status_has_the_newest_steps_measures(journal: JobJournal) -> None:
    home, name = journal.home, journal.job_id
    assert (read_status(home, name).metrics, read_status(home, name).loss_last) == ({}, None)
    for number in (1, 2):
        step(journal, number, kl=number / 10)
    journal.event("evaluation", step=2, loss=7.0, tokens=3)
    expected = {"loss": 0.5, "tokens": 10, "seconds": 0.5, "kl": 0.2}
    running = read_status(home, name)
    assert (running.step, running.metrics, running.trained_tokens) == (2, expected, 20)
    journal.write_status(JobStatus(id=name, state="failed", step=2, error="why"))
    assert read_status(home, name).metrics == expected


def test_a_job_that_succeeds_keeps_its_newest_resume_point(journal: JobJournal) -> None:
    for name in ("step-00000050", "step-00000100"):
        (journal.folder / "megatron" / name).mkdir(parents=True)
        (journal.folder / "megatron" / name / "rank-00000.bin").write_bytes(b"moments")
    metrics = {"loss_first": 2.0, "loss_last": 1.0, "trained_tokens": 5, "seconds": 1.0}
    told = Manifest(files={}, weights_sha256="0" * 64, metrics=metrics)
    folder = journal.home.checkpoint(journal.job_id)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(told.model_dump_json())
    assert job.run(journal) == 0
    assert journal.ended and read_status(journal.home, journal.job_id).state == "succeeded"
    assert [path.name for path in (journal.folder / "megatron").iterdir()] == ["step-00000100"]


def test_a_newer_folder_is_refused_and_one_without_a_number_is_read(journal: JobJournal) -> None:
    spec, path = journal.spec(), journal.folder / "spec.json"
    session = SessionJournal(journal.home, SessionSpec(name="s").id)
    session.write_spec(SessionSpec(name="s"))
    for file, read in ((path, journal.spec), (session.folder / "spec.json", session.spec)):
        written = json.loads(file.read_text())
        assert written.pop("format") == 1
        del written["crc"]
        before = read()
        file.write_text(json.dumps(written))  # as they were before there were numbers
        assert read() == before
        file.write_text(json.dumps({**written, "format": 2}))
        with pytest.raises(NewerFormat, match="reads formats up to 1"):
            read()
    with pytest.raises(NewerFormat):
        read_status(journal.home, spec.id)


@pytest.mark.parametrize(
    ("way", "backend", "job_id"),
    [
        ("native", "megatron", "job-6dfcba49cb4ab26a"),
        ("universal", "transformers", "job-6d5e58ae25b44ebe"),
        ("bridge", "megatron-bridge", "job-2a1415b9736cc3e0"),
    ],
)
def test_an_older_record_names_its_backend_and_the_job_keeps_its_id(
    tmp_path: Path, way: str, backend: str, job_id: str
) -> None:
    """One that names none has another id: that of before there were backends."""
    hyper = Hyperparameters.model_validate({"steps": 1, "backend": backend})
    spec = JobSpec(dataset="ds", parent="p", parent_sha256="1", hyperparameters=hyper)
    assert spec.id == job_id
    plain = spec.model_copy(update={"hyperparameters": Hyperparameters(steps=1)})
    assert plain.id == "job-143162c5544f6288"
    record = spec.model_dump(mode="json")
    record["hyperparameters"]["way"] = way
    del record["hyperparameters"]["backend"]
    job = JobJournal(Home(tmp_path), job_id)
    job.folder.mkdir(parents=True)
    (job.folder / "spec.json").write_text(json.dumps(record))
    assert job.spec() == spec
    for name in ("backend", "way"):  # of a user, not of a record
        with pytest.raises(ValidationError, match=f"'{way}' is called '{backend}' now"):
            Hyperparameters.model_validate({"steps": 1, name: way})
