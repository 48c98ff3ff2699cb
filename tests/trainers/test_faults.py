"""Ranks and nodes that fail: all end at once, the cause is named, and the job goes on."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus
from cray_agents.runtime.disk import journal
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.server.cluster_view import ClusterView
from cray_agents.trainers import progress
from cray_agents.trainers.checkpointing import save
from cray_agents.trainers.job import launch
from cray_agents.trainers.job.failures.failure import judge
from cray_agents.trainers.job.failures.rank_monitor import read_end
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import JobSpec
from tests.support.dead_node import parent_of, processes
from tests.support.trainers.running_session import children_of

pytestmark = pytest.mark.megatron
SILENCE = "10"  # seconds; a rank that goes on shows it in time on any machine


def until(what: Callable[[], Any], told: Callable[[], str]) -> Any:
    """Wait for something that is true of a running job; returns it."""
    deadline = time.monotonic() + 400
    while not (found := what()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.001)
    return found


def ranks_of(job: Any) -> list[int]:
    """The process ids of a job's ranks, in order."""
    return children_of(job.pid)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def points_of(job: Any, pattern: str) -> list[Path]:
    return sorted((job.journal.folder / "megatron").glob(pattern))


# ---- ranks
def test_a_dead_rank_ends_all_and_is_named(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2000})
    job = lab.start(spec)
    job.wait_for_step(2)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert job.wait() == 1
    assert "rank 1 died (signal 9); the others were ended" in job.log
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert job.journal.status() is None  # it may be started again


def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2000})
    job = lab.start(spec, RANK_SILENCE_SECONDS=SILENCE)
    job.wait_for_step(2)
    ranks = ranks_of(job)
    os.kill(ranks[1], signal.SIGSTOP)
    assert job.wait() == 1
    told = f"rank 1 no longer responds, for {SILENCE} s (it is stopped); the others were ended"
    assert told in job.log
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert job.journal.status() is None
    end = read_end(job.journal.folder)
    assert end is not None and end.rank == 1 and end.node_is_suspect
    (report,) = (job.journal.folder / "hangs").iterdir()
    assert "==== rank 1 it is stopped" in report.read_text()


def test_a_job_that_was_stopped_as_a_whole_goes_on(lab: Any, undisturbed: Any, hold: Any) -> None:
    """Suspended by a scheduler, say: the launcher's own sleep is no rank's silence."""
    lab.dataset()
    gate = hold(2)
    job = lab.start(undisturbed[1].journal.spec(), RANK_SILENCE_SECONDS=SILENCE)
    job.wait_for_step(2)
    pids = [job.pid, *ranks_of(job)]  # the launcher sees none of them stopped before it is
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + int(SILENCE) + 1, lambda: "")
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    gate.unlink()
    assert job.wait() == 0, job.log
    assert job.losses == undisturbed[1].losses


def test_a_hang_in_a_loss_is_found_with_all_stacks_and_named(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter runs, and the other rank only waits for it in a collective."""
    usual = METHODS["sft"]

    def loss_that_sleeps(tokens: Any, hyper: Any) -> Any:
        if torch.distributed.get_rank() == 1 and (lab.home.root / "sleep").exists():
            time.sleep(600)
        return usual(tokens, hyper)

    monkeypatch.setitem(METHODS, "sft", loss_that_sleeps)
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2000})
    job = lab.start(spec, RANK_SILENCE_SECONDS=SILENCE, TORCH_FR_BUFFER_SIZE="200")
    job.wait_for_step(2)
    (lab.home.root / "sleep").touch()
    assert job.wait() == 1
    end = read_end(job.journal.folder)
    assert end is not None and end.rank == 1 and not end.node_is_suspect, job.log
    assert f"has not moved for {SILENCE} s: it is in loss_that_sleeps (test_faults.py:" in end.how
    assert "rank 0 waits in all" in end.how  # all_reduce, its number and group
    (report,) = (job.journal.folder / "hangs").iterdir()
    text = report.read_text()
    assert "==== rank 0" in text and "loss_that_sleeps" in text.partition("==== rank 1")[2]
    failed = CommandStatus(state="failed", exit_code=1)
    verdict = judge(failed, end, "", started=True, on_cpu=True)
    assert (verdict.kind, verdict.rule) == ("hang", "back_off")


def test_a_slow_rank_is_named_among_the_events(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = METHODS["sft"]

    def slow_loss(tokens: Any, hyper: Any) -> Any:
        time.sleep(1.0 * torch.distributed.get_rank())  # more than a step on a busy machine
        return usual(tokens, hyper)

    monkeypatch.setitem(METHODS, "sft", slow_loss)
    monkeypatch.setattr(progress, "STEPS", 5)
    lab.dataset()
    job = lab.run(lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 6}))
    (event,) = [e for e in job.journal.events() if e["event"] == "straggler"]
    assert (event["rank"], event["steps"], event["after_step"]) == (1, 5, 5)
    assert event["seconds"] > 1.0 and event["seconds"] > 1.5 * event["median"]
    steps = [e for e in job.journal.events() if e["event"] == "step"]
    assert all(0 < step["communication"] < 1 for step in steps)
    # the first rank waits for the slow one where gradients are added up
    assert max(step["communication"] * step["seconds"] for step in steps) > 0.05
    (file,) = job.journal.folder.glob("hardware.*.jsonl")
    node, *samples = journal.read(file)
    assert node["event"] == "node" and "host.load" in samples[-1]
    assert "host.rank_cores" not in samples[-1]  # the ranks have ended
    assert progress.find_straggler([1.0, 1.4, 1.2]) is None
    assert progress.find_straggler([1.0, 1.1, 1.9, 1.2]) == (2, 1.1)


def test_smaller_micro_batches_change_a_jobs_numbers_by_rounding_alone(
    lab: Any, undisturbed: Any
) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec()
    journal = JobJournal(lab.home, spec.id)
    journal.folder.mkdir(parents=True)
    journal.note_microbatch(32)  # of sequences of up to 40 tokens
    job = lab.run(spec)
    assert job.journal.job_id == spec.id
    np.testing.assert_allclose(job.losses, undisturbed[1].losses, rtol=1e-5)
    assert job.losses != undisturbed[1].losses  # they were summed otherwise


# ---- resume points in flight
def test_points_in_flight_at_a_signal_and_at_a_kill(
    lab: Any, undisturbed: Any, hold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to stop, the job writes what is due; killed, it loses the point that it was writing."""
    whole, write = undisturbed[1].losses, save._write_hashed

    def write_late(path: Path, blocks: Any) -> str:
        while (tmp_path / path.parent.name).exists():
            time.sleep(0.002)
        return write(path, blocks)

    def writing(step: int, attempt: int) -> tuple[Any, list[Path]]:
        """The job, held while it writes the point of a step; what is to be removed to let it go."""
        draft = tmp_path / f".step-{step:08d}.{attempt}"
        draft.touch()
        gates, job = [hold(step), draft], lab.start(spec)
        until(lambda: job.journal.step == step and points_of(job, draft.name), lambda: job.log)
        return job, gates

    monkeypatch.setattr(save, "_write_hashed", write_late)
    lab.dataset()
    spec = lab.spec("qwen3", save_every=1)
    job, (_, draft) = writing(2, 1)
    os.kill(job.pid, signal.SIGTERM)
    draft.unlink()
    assert job.wait() == 75
    step = job.journal.step
    assert points_of(job, "step-*")[-1].name == f"step-{step:08d}"
    assert not points_of(job, ".step-*")
    assert job.losses == whole[:step]

    again, (gate, _) = writing(6, 2)
    (rank,) = ranks_of(again)
    os.kill(rank, signal.SIGKILL)
    assert again.wait() == 1
    gate.unlink()
    (half,) = points_of(again, ".step-*")
    assert not (half / "SEALED.json").exists()

    last = lab.run(spec)
    starts = [e["from_step"] for e in last.journal.events() if e["event"] == "started"]
    assert starts == [0, step, 5] and 2 <= step < 5
    assert last.losses == whole
    assert not points_of(last, ".step-*")


def test_an_older_attempt_publishes_nothing(lab: Any, hold: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 60}, save_every=1000)
    hold(1)
    job = lab.start(spec)
    job.wait_for_step(1)
    assert job.journal.claim_attempt() == 2
    assert job.wait() == 0
    assert "attempt 2 took over from attempt 1" in job.log
    assert not lab.home.checkpoint(spec.id).exists()
    assert not points_of(job, "*step-*")


# ---- nodes
def on_two_nodes(lab: Any, spec: JobSpec, folder: Path, **variables: str) -> list[Any]:
    """A launcher on each of two nodes that are this host, as srun would start them."""
    slurm = {"SLURM_NNODES": "2", "RANKS_START": folder.name, **variables}
    names = [
        {"SLURM_NODEID": str(node), "SLURMD_NODENAME": f"127.0.0.{node + 1}"} for node in (0, 1)
    ]
    return [lab.start(spec, **slurm, **name) for name in names]


needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=f"lacks {missing_programs()}")


def test_two_nodes_share_a_job(lab: Any, undisturbed: Any, tmp_path: Path) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2})
    nodes = on_two_nodes(lab, spec, tmp_path)
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].log
    np.testing.assert_allclose(nodes[0].losses, undisturbed[1].losses, rtol=1e-5)
    assert nodes[0].journal.attempts == 1
    assert nodes[0].journal.status().state == "succeeded"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launcher wait long for the other one's report, which the machine may hold up."""
    monkeypatch.setattr(launch, "PATIENCE", 120.0)


@pytest.mark.usefixtures("patient")
def test_both_nodes_name_the_rank_that_died_first(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2000})
    nodes = on_two_nodes(lab, spec, tmp_path, SLURM_JOB_ID="7")
    nodes[0].wait_for_step(2)
    (rank,) = ranks_of(nodes[1])
    os.kill(rank, signal.SIGKILL)
    assert [node.wait() for node in nodes] == [1, 1]
    assert nodes[0].journal.log.read_text().count("rank 1 on node 1 of 2") == 2
    assert "rank 0 on" not in nodes[0].journal.log.read_text()
    assert nodes[0].journal.status() is None


@needs_slurm
@pytest.mark.usefixtures("patient")
def test_a_hang_on_one_node_is_named_by_both(lab: Any, tmp_path: Path) -> None:
    """The ranks of the other node only wait: their node asks whether the first one's move."""
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 20_000})
    limits = {"SLURM_JOB_ID": "8", "RANK_SILENCE_SECONDS": SILENCE}
    nodes = on_two_nodes(lab, spec, tmp_path, **limits)
    logs = nodes[0].journal.folder / "logs"

    def clock() -> int:
        """The looks of the second node's launcher at which its rank had moved."""
        return max((int(path.read_text()) for path in logs.glob("clock-*-1")), default=0)

    until(lambda: clock() >= 4, nodes[0].journal.log_tail)  # its first step is done, and told
    (rank,) = ranks_of(nodes[1])
    os.kill(rank, signal.SIGSTOP)
    assert [node.wait() for node in nodes] == [1, 1]
    log = nodes[0].journal.log.read_text()
    told = f"no longer responds, for {SILENCE} s (it is stopped); the others were ended"
    assert log.count(told) == 2
    end = read_end(nodes[0].journal.folder)
    assert end is not None and (end.rank, end.node_is_suspect) == (1, True), log


@pytest.mark.slurm
@needs_slurm
def test_a_job_on_two_nodes_survives_a_killed_rank(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 400}, save_every=10)
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=2)
    cluster.start()
    with Slurm(tmp_path / "slurm", cluster) as scheduler:
        trainer = MegatronTrainer(Home(lab.home.root), scheduler, Resources(nodes=2))
        trainer.submit(spec)
        journal = JobJournal(lab.home, spec.id)
        until(
            lambda: any(e["event"] == "saved" and e["step"] >= 10 for e in journal.events()),
            journal.log_tail,
        )
        os.kill(rank_on_node(cluster, 1, journal.folder), signal.SIGKILL)
        until(lambda: trainer.status(spec.id).state not in ("queued", "running"), journal.log_tail)
    status = trainer.status(spec.id)
    assert (status.state, status.step, status.attempts) == ("succeeded", 400, 2), journal.log_tail()
    starts = [e["from_step"] for e in journal.events() if e["event"] == "started"]
    assert starts[0] == 0 and starts[1] >= 10
    assert "rank 1 on node 1 of 2" in journal.log.read_text()
    assert [e["step"] for e in journal.events() if e["event"] == "step"] == list(range(1, 401))


@pytest.mark.slurm
@needs_slurm
def test_a_job_gives_its_nodes_to_a_replica_and_loses_no_step(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 400}, save_every=1000)
    cluster, resources = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=1), Resources(nodes=2)
    cluster.start()
    home = Home(lab.home.root)
    with Slurm(tmp_path / "slurm", cluster) as scheduler:
        trainer = MegatronTrainer(home, scheduler, resources)
        trainer.submit(spec)
        journal = JobJournal(lab.home, spec.id)
        until(lambda: journal.step >= 3, journal.log_tail)
        replica = Command(name="replica", argv=[], directory="", log="", kind="replica")
        view = ClusterView(home, scheduler, resources, replica)
        state = view.look(time.monotonic())
        (running,) = state.running
        assert (running.name, running.nodes, state.nodes, state.free) == (spec.id, 2, 2, 0)
        assert view.preempt(running, "serving is 1 nodes short")
        until(lambda: trainer.status(spec.id).state not in ("queued", "running"), journal.log_tail)
        view.close()
    status = trainer.status(spec.id)
    assert (status.state, status.step, status.attempts) == ("succeeded", 400, 2), journal.log_tail()
    first, second = (e["from_step"] for e in journal.events() if e["event"] == "started")
    steps = [e["step"] for e in journal.events() if e["event"] == "step"]
    assert first == 0 and 3 <= second < 400 and steps == list(range(1, 401))
    (verdict,) = (e for e in journal.events() if e["event"] == "verdict")
    assert verdict["cause"] == "preempted" and "serving is 1 nodes short" in verdict["message"]


def rank_on_node(cluster: PrivateCluster, node: int, folder: Path) -> int:
    """The process of a node's rank: a trainer whose parent is one too."""
    mine = {
        pid for pid, words, variables in processes(cluster)
        if str(folder) in words and f"SLURM_NODEID={node}" in variables
    }  # fmt: skip
    (rank,) = [pid for pid in mine if parent_of(pid) in mine]
    return rank
