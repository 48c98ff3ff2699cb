"""Trackers: what jobs and loops record reaches TensorBoard once; a tracker's failure harms none."""

import asyncio
import contextlib
import json
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from cray_agents.config import Config, load_config
from cray_agents.errors import ConfigError, SetupError
from cray_agents.paths import Home
from cray_agents.records import canonical
from cray_agents.runtime.disk import checksums
from cray_agents.server.trackers import check_trackers, follow
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import JobSpec, JobStatus
from tests.support.environments.pythons import venv
from tests.support.waiting import until

SPEC = {
    "dataset": "d",
    "parent": "/m",
    "parent_sha256": "0" * 64,
    "hyperparameters": {"steps": 3, "batch_size": 1},
    "code": "0",
}
Points = dict[tuple[str, int], list[float]]


def points(folder: Path) -> Points:
    """The values by name and step in a run's event files, as TensorBoard reads them."""
    found: Points = {}
    for path in sorted(folder.glob("events.*")):
        content, place = path.read_bytes(), 0
        while place + 12 <= len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + size])
            place += 16 + size
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found


def step(journal: JobJournal, number: int, loss: float) -> None:
    journal.event("step", step=number, loss=loss, lr=0.5, tokens=7)


async def mirrored(home: Home, setting: str, enough: Callable[[], bool]) -> None:
    """A platform that runs until the tracker has enough."""
    task = asyncio.create_task(follow(home, setting, 0.01))
    try:
        await until(lambda: task.done() or enough())
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    for folder in (home.logs, home.jobs / "job-j", home.iterations("calc")):
        folder.mkdir(parents=True)
    journal = JobJournal(home, "job-j")
    journal.write_spec(JobSpec.model_validate(SPEC))
    step(journal, 1, 2.0)
    step(journal, 2, float("inf"))
    journal.event("evaluation", step=2, loss=1.75, tokens=3)
    journal.close()
    record = {"iteration": 0, "holdout_success": 0.25, "promoted": True, "seconds": {"train": 8}}
    path = home.iterations("calc") / "0.json"
    path.write_bytes(checksums.with_crc(canonical(record | {"version": "m@1"})))
    return home


async def test_jobs_and_loops_reach_tensorboard_step_by_step_and_once(home: Home) -> None:
    job, loop = (home.trackers / "tensorboard" / name for name in ("job-j", "loop-calc"))
    handed = home.trackers / "tensorboard.json"  # once it says so, nothing is written again
    await mirrored(home, "tensorboard", lambda: handed.exists() and b"loop-" in handed.read_bytes())
    assert points(job) == {
        ("train/loss", 1): [2.0],
        **{(f"train/{name}", at): [x] for name, x in (("lr", 0.5), ("tokens", 7)) for at in (1, 2)},
        ("validation/loss", 2): [1.75],
        ("validation/tokens", 2): [3],
    }
    journal = JobJournal(home, "job-j")  # goes on from an earlier step, under another platform
    journal.rewind(1)
    for number in (2, 3):
        step(journal, number, 1.0 / number)
    journal.write_status(JobStatus(id="job-j", state="succeeded", step=3, steps=3))
    await mirrored(home, "tensorboard", lambda: ("train/loss", 3) in points(job))
    after = points(job)
    assert after["train/loss", 3] == [pytest.approx(1 / 3)] and ("train/loss", 2) not in after
    assert all(len(values) == 1 for values in after.values())
    assert points(loop) == {
        ("iteration/iteration", 0): [0],
        ("iteration/holdout_success", 0): [0.25],
        ("iteration/promoted", 0): [1],
        ("iteration/seconds/train", 0): [8],
    }


@pytest.mark.slow
async def test_wandb_and_trackio_take_them_from_a_python_of_their_own(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = venv("trackers") / "bin" / "python"
    database = tmp_path / "trackio"
    for name, value in (("WANDB_MODE", "offline"), ("TRACKIO_DIR", str(database))):
        monkeypatch.setenv(name, value)
    for name in ("wandb", "trackio"):
        await mirrored(home, f"{name}:{python}", (home.trackers / f"{name}.json").exists)
    (file,) = (home.trackers / "wandb").glob("wandb/offline-run-*-job-j/run-job-j.wandb")
    assert b"train/loss" in file.read_bytes() and b"validation/loss" in file.read_bytes()
    with sqlite3.connect(database / "cray-agents.db") as rows:
        found = rows.execute("select step, metrics from metrics where run_name = 'job-j'")
        numbers = {(at, key): x for at, text in found for key, x in json.loads(text).items()}
    assert numbers[1, "train/loss"] == 2.0 and numbers[2, "validation/loss"] == 1.75


@pytest.mark.parametrize("body", ["import sys; sys.exit(1)", "print('what?')"])
async def test_a_tracker_that_fails_is_told_and_gets_what_it_missed_later(
    home: Home, tmp_path: Path, body: str
) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\n{body}\n")
    broken.chmod(0o755)
    with pytest.raises(SetupError, match=r"wandb failed, see .*tracker-wandb.log: no job needs it"):
        await follow(home, f"wandb:{broken}", 0.01)
    job = home.trackers / "tensorboard" / "job-j"
    await mirrored(home, "tensorboard", lambda: ("train/loss", 1) in points(job))


def test_unknown_and_missing_trackers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mlflow' is none of tensorboard"):
        load_config({"trackers": ["mlflow"]}, tmp_path)

    def check(**settings: Any) -> None:
        check_trackers(Config(**settings))

    check(trackers=["tensorboard", f"trackio:{sys.executable}"])
    with pytest.raises(SetupError, match=r"trackio needs the package trackio.*trackio:/opt"):
        check(trackers=["trackio"])
    with pytest.raises(SetupError, match="/no/python, the Python for wandb, cannot be run"):
        check(trackers=["wandb:/no/python"])
