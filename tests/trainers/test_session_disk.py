"""A session whose disk is full: the job waits for room, the session lives, and nothing is lost."""

import ctypes
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.trainers.job import rank as rank_module
from cray_agents.trainers.job.failures.rank_monitor import read_end
from cray_agents.training_jobs import Layout
from tests.support.trainers.running_session import RunningSession, children_of
from tests.trainers.test_session import outcome

pytestmark = pytest.mark.megatron


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "ROOM_PAUSE", 0.05)


MOUNTED = 'mount -t tmpfs -o size=$0 tmpfs "$1" && echo mounted && exec sleep infinity'


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (1, "the resume point of step 4 could not be written: "),
        (0, "the checkpoint was not written: "),
    ],
    ids=["resume points", "weights"],
)
def test_a_job_that_one_rank_cannot_write_for_leaves_its_session_alive(
    lab: Any, undisturbed_job: Any, rank: int, why: str
) -> None:
    """It goes on where there is room again, and ends as one that nothing happened to."""
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 4}, save_every=2)
    lab.dataset()
    session = RunningSession(lab.home, Layout(data=2))
    while len(ranks := children_of(session.pid)) < 2:
        session.check()
    points = lab.home.job(spec.id) / "megatron"
    undisturbed = undisturbed_job(spec).journal
    if rank == 0:  # it writes all weights of so small a model, and here no point
        shutil.copytree(undisturbed.folder / "megatron", points)
    resource.prlimit(ranks[rank], resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    job = session.start(spec)
    session.until(lambda: spec.id not in session.journal.queue())
    assert why in read_end(job.folder).how and "File too large" in read_end(job.folder).how
    assert not job.ended and not list(lab.home.root.glob("checkpoints/.*"))
    assert not list(points.glob(".*"))
    resource.prlimit(ranks[rank], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    other = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2})
    assert session.train(other).status().state == "succeeded", session.log
    session.journal.hand_over(spec.id)
    session.until(lambda: job.ended)
    assert children_of(session.pid) == ranks and session.end() == 0, session.log
    assert outcome(lab.home, job)[:2] == outcome(undisturbed.home, undisturbed)[:2]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[int]:
    """Mount a tmpfs of this size in a mount namespace; yield a process there."""
    folder.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(size), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "mounted\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def enter(pid: int) -> None:
    """Let this process, which has one thread, see the disks that another one sees."""
    for kind in ("user", "mnt"):
        handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(handle, 0) == 0, ctypes.get_errno()


def fill(home: Home) -> Path:
    """Take what room there is, to the last byte."""
    filler = home.root / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


@pytest.mark.parametrize("in_time", [True, False])
def test_on_a_disk_without_a_byte_left(
    lab: Any,
    undisturbed_job: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Any,
    in_time: bool,
) -> None:
    """From within a job on: events, logs, points and weights have no room. Then there is some.

    `in_time`: while the trained state is in memory still.
    """
    monkeypatch.setattr(rank_module, "ROOM_TRIES", 10**6 if in_time else 2)
    gate = hold(7)
    with small_disk(tmp_path / "disk", 16 << 20) as pid:
        inside = Home(tmp_path / "disk")
        home = Home(Path(f"/proc/{pid}/root{inside.root}"))
        mine = type(lab)(home, lab.models)
        mine.dataset()
        spec = mine.spec("qwen3", layout={"data": 2}, hyper={"steps": 40}, save_every=5)
        session = RunningSession(home, Layout(data=2), within=lambda: enter(pid), inside=inside)
        while len(ranks := children_of(session.pid)) < 2:
            session.check()
        job = session.start(spec)
        session.until(lambda: job.step >= 7)
        filler = fill(home)
        gate.unlink()
        if in_time:
            session.until(lambda: "point of step 40 could not be written" in job.log_tail())
            filler.unlink()
        session.until(lambda: spec.id not in session.journal.queue())
        assert job.ended == in_time, job.log_tail()
        session.journal.hand_over(spec.id)  # without a pause: this start meets the full disk, too
        for _ in range(0 if in_time else 100):
            session.check()
            time.sleep(0.01)
        filler.unlink(missing_ok=True)
        while not job.ended:
            session.journal.hand_over(spec.id)
            session.check()
            time.sleep(0.01)
        assert children_of(session.pid) == ranks and session.end() == 0, session.log
        assert (job.attempts == 1) == in_time
        undisturbed = undisturbed_job(spec).journal
        assert outcome(home, job) == outcome(undisturbed.home, undisturbed)
