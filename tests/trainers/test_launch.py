"""The launcher: CUDA before the ranks, and ranks that are new Pythons if an import opened it."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config.job_section import JobSettings
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home, host_cache
from cray_agents.ports import Command
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.job.job_inputs import read_inputs
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import (
    MEETING_SECONDS,
    RankPlacement,
    Rendezvous,
    find_placement,
    listen_for_ranks,
    load_for_ranks,
    loading_seconds,
    meet,
)
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.training_jobs import Layout

# the launcher sees two GPUs, and its ranks the machine as it is
SEES_GPUS = """
import os
if os.environ.pop("SEES_GPUS", ""):
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
"""


@pytest.mark.megatron
def test_ranks_of_gpus_are_spawned_which_changes_no_bit(lab: Any, tmp_path: Path) -> None:
    """The launcher has not opened CUDA: where MIG or NVML make torch do so, no one may notice."""
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2})
    forked = lab.run(spec)

    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(SEES_GPUS)
    home = Home(tmp_path / "other")
    home.dataset("ds").parent.mkdir(parents=True)
    home.dataset("ds").symlink_to(lab.home.dataset("ds"))
    journal = JobJournal(home, spec.id)
    journal.write_spec(spec)
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "cray_agents.trainers.job.job", str(journal.folder / "spec.json")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "SEES_GPUS": "1",
            "PYTHONPROFILEIMPORTTIME": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = journal.events()
    assert [e["loss"] for e in events if e["event"] == "step"] == forked.losses
    ours, theirs = home.checkpoint(spec.id), lab.home.checkpoint(spec.id)
    assert weights_sha256(ours) == weights_sha256(theirs)
    for log in (journal.folder / "logs").glob("rank-*.txt"):  # a fork imports nothing anew
        imported = {line.rpartition("|")[2].strip() for line in log.read_text().split("\n")}
        assert "megatron.core.optimizer" in imported
        # 0.6 s in each rank, for a compiler that compiles nothing
        assert "torch._dynamo" not in imported


@pytest.mark.megatron
@pytest.mark.parametrize(("tensor", "connections"), [(1, None), (2, "1")])
def test_cuda_keeps_the_order_that_tensor_parallel_layers_need(
    monkeypatch: pytest.MonkeyPatch, tensor: int, connections: str | None
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # restored afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    load_for_ranks(find_placement(tensor, "job"), Layout(tensor=tensor), ipc=tensor == 1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(host_cache())), "not a job's own"
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    grows = os.environ["PYTORCH_ALLOC_CONF"].endswith("expandable_segments:True")
    assert grows == (tensor == 2), "memory that other processes open lies in fixed segments"


def test_launchers_find_their_ranks_by_slurms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "RANKS_START", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    node = find_placement(8, "job-1")
    assert (node.ranks, node.host, node.start) == (range(4, 8), "n7", "job-1-0-0-0")
    assert node.node_phrase.startswith(" on node 1 of 2")
    with pytest.raises(BadInput, match="3 ranks cannot be spread evenly over 2 nodes"):
        find_placement(3, "job-1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("RANKS_START", "7.0.123")
    task = find_placement(8, "job-1")
    assert (task.ranks, task.start) == (range(5, 6), "job-1-7.0.123")
    assert task.node_phrase.startswith(" on task 5 of 8")
    monkeypatch.setenv("SLURM_NNODES", "1")
    assert find_placement(8, "job-1").host == "127.0.0.1"


def test_launchers_meet_at_a_free_port_of_their_own_start(tmp_path: Path) -> None:
    first = RankPlacement(0, 2, 2, "127.0.0.1", 0, "job-1-7", attempt=4)
    second = replace(first, node=1, host="127.0.0.2", attempt=3)  # read before the first's claim
    stale = Rendezvous(host="elsewhere", port=1, attempt=2)
    text = checksums.with_crc(stale.model_dump_json().encode())
    (tmp_path / "job-1-7.rendezvous.json").write_bytes(text)  # of a start that was killed
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(meet, second, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        place, listener = meet(first, tmp_path)
        assert listener is not None
        with listener, listen_for_ranks(first) as other:
            assert other.getsockname()[1] != place.port != 0  # a taken port is never asked for
            came, none = waiting.result(60)
            assert (came.host, came.port, none) == ("127.0.0.1", place.port, None)
    impatient = replace(second, start="job-1-8", patience=0.2)
    with pytest.raises(SetupError, match="the first node did not say within 0 s"):
        meet(impatient, tmp_path)


def test_ranks_wait_longer_for_what_takes_longer_to_load(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(840 * 10**9)  # a hole: 70 billion parameters with their moments
    assert loading_seconds(None) == MEETING_SECONDS
    assert loading_seconds(tmp_path, tmp_path / "none") == MEETING_SECONDS + 4200


def test_ranks_wait_for_a_host_that_hashes_and_copies_the_dataset(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3")
    work = read_inputs(JobJournal(lab.home, spec.id), spec, 1)
    before = loading_seconds(*work.folders)
    with (lab.home.dataset("ds") / "train-00009.parquet").open("wb") as file:
        file.truncate(60 * 10**9)  # a hole
    assert loading_seconds(*work.folders) == pytest.approx(before + 600)


RANK_OF_A_TASK = """
import sys
from pathlib import Path
from cray_agents.trainers.job.launch import find_placement, run_ranks
place = find_placement(2, "tasks")
def main(rank, store, stop):
    store.set(str(rank), f"launcher {place.node}")
    print(store.get(str(1 - rank)).decode())
    store.set(f"{rank} has read", "")
    if rank == 0:  # it has the store
        store.get("1 has read")
    return 0
run_ranks(place, Path(sys.argv[1]), main)
"""


@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs()), reason=f"lacks {missing_programs()}")
def test_a_task_for_each_rank_on_a_real_slurm(tmp_path: Path) -> None:
    cluster = PrivateCluster(tmp_path / "slurm", cpus=2)
    cluster.start()
    command = Command(
        name="tasks",
        argv=[sys.executable, "-c", RANK_OF_A_TASK, str(tmp_path / "logs")],
        directory=str(tmp_path),
        log=str(tmp_path / "log.txt"),
        ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
    )
    with Slurm(tmp_path / "slurm", cluster, settings=JobSettings(tasks="rank")) as scheduler:
        scheduler.submit(command)
        while scheduler.status("tasks").state in ("queued", "running"):
            time.sleep(0.1)
        assert scheduler.status("tasks").state == "succeeded", Path(command.log).read_text()
    texts = [(tmp_path / "logs" / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert texts == ["launcher 1\n", "launcher 0\n"]
    assert not list((tmp_path / "logs").glob("*.json"))


def test_a_sessions_rank_in_a_new_python_runs_what_a_forked_one_does(tmp_path: Path) -> None:
    from cray_agents.trainers.session import resident, session_process

    session = SessionJournal(Home(tmp_path), "s")
    session.write_spec(SessionSpec(name="s"))
    made: Any = session_process.rank_main(True, str(session.home.root), "s", 3)
    assert made.func is resident.run and made.args[0].spec() == session.spec()
    assert made.args[1:] == (3, True)
