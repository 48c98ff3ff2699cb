"""A Slurm job that holds a spare node goes on without another wait when one of its nodes dies."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cray_agents.config.job_section import JobSettings
from cray_agents.errors import BadInput, SchedulerError, Superseded
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.runtime.controller_lease import unguarded
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.scheduler import private_cluster
from cray_agents.runtime.scheduler.batch_script import batch_script
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm, step_nodes
from cray_agents.trainers.job.failures.failure import FailureSettings
from cray_agents.trainers.job.job_command import check_submitted
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.job.spare_nodes import HeldNodes, RoundDecision
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import JobSpec
from tests.support.campaign import Campaign, kills
from tests.support.dead_node import kill_node, on, parent_of, processes, revive_node
from tests.support.waiting import wait_until
from tests.trainers.test_faults import flip

NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
KILLS = kills(1)
STEPS = 250  # so that none ends before the test has stopped its ranks
needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=f"lacks {missing_programs()}")


@dataclass
class HeldJob:
    """A job that holds a spare node, and all nodes of its Slurm. Its ranks are held at a step."""

    lab: Any
    cluster: PrivateCluster
    scheduler: Slurm
    trainer: MegatronTrainer
    journal: JobJournal

    @property
    def slurm_jobs(self) -> int:
        """How often the job was queued and started."""
        ledger = self.cluster.directory / "ledger" / self.journal.job_id
        return len(list(ledger.glob("*.started")))

    @property
    def counts(self) -> tuple[int, int]:
        """Its attempts, and Slurm's jobs."""
        return self.journal.attempts, self.slurm_jobs

    def down(self) -> set[str]:
        """The nodes that Slurm holds to be down, while the trainer watches."""
        self.ended()
        time.sleep(0.3)  # each look is a process
        argv = ["sinfo", "-h", "-N", "-t", "down", "-o", "%N"]
        done = subprocess.run(argv, env=self.cluster.environment, capture_output=True, text=True)
        return set(done.stdout.split())

    @property
    def losses(self) -> list[float]:
        return [e["loss"] for e in self.journal.events() if e["event"] == "step"]

    @property
    def points(self) -> list[Path]:
        return durable.resume_points(self.journal.folder / "megatron")

    def ended(self) -> bool:
        return self.trainer.status(self.journal.job_id).state not in ("queued", "running")

    def hold(self, steps: int) -> None:
        """Stop the ranks once this attempt has done so many steps, or a few more.

        The host may be too busy for the test to keep up with them.
        """

        def done() -> int:
            events = self.journal.events()
            begun = [number for number, e in enumerate(events) if e["event"] == "started"]
            if not begun or events[begun[-1]]["attempt"] != self.journal.attempts:
                return 0
            return sum(e["event"] == "step" for e in events[begun[-1] :])

        wait_until(lambda: done() >= steps and self.points, self.journal.log_tail, 400)
        for pid in self._ranks():
            os.kill(pid, signal.SIGSTOP)
        assert self.journal.step < self.journal.spec().hyperparameters.steps

    def await_spares(self) -> None:
        waits, all_of_them = "waits as a spare node", self.journal.spec().spare_nodes
        self.wait(lambda: self.journal.log.read_text().count(waits) == all_of_them, waits)

    def release(self) -> None:
        """Let the ranks that live go on."""
        for pid in self._ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self, *nodes: str) -> None:
        """Kill nodes, while the ranks are held."""
        for node in nodes:
            kill_node(self.cluster, node)
        self.release()

    def reach(self, step: int) -> bool:
        """Wait for a step, with the trainer watching; return False if the job has ended first."""
        self.wait(lambda: self.journal.step >= step or self.ended(), f"step {step}")
        return not self.ended()

    def wait(self, what: Callable[[], Any], why: str) -> None:
        wait_until(what, lambda: f"{why}\n{self.journal.log_tail()}", 400)

    def launchers(self) -> dict[str, int]:
        """The launchers' processes by node."""
        mine = self._pythons()
        return {node: pid for pid, node in mine.items() if parent_of(pid) not in mine}

    def _ranks(self) -> list[int]:
        mine = self._pythons()
        return [pid for pid in mine if parent_of(pid) in mine]

    def _pythons(self) -> dict[int, str]:
        """The nodes of the launchers and ranks, by process."""
        return {
            pid: next(node for node in NODES if on(node, variables))
            for pid, words, variables in processes(self.cluster)
            if str(self.journal.folder) in words and not words.startswith("srun")
        }

    def check(self, undisturbed: list[float]) -> None:
        status = self.trainer.status(self.journal.job_id)
        assert status.state == "succeeded", self.journal.log_tail()
        assert self.losses == undisturbed
        self.wait(lambda: self.journal.job_id not in self.scheduler.live(), "its Slurm job's end")


@contextmanager
def held_job(
    lab: Any, folder: Path, spec: JobSpec, silence: float = 600, site: JobSettings | None = None
) -> Iterator[HeldJob]:
    nodes = spec.layout.world
    cluster = PrivateCluster(folder / "slurm", nodes=nodes + spec.spare_nodes, cpus=1)
    cluster.start()
    with Slurm(folder / "slurm", cluster, settings=site) as scheduler:
        patient = FailureSettings(hang_seconds=silence)  # the machine may be slow
        trainer = MegatronTrainer(lab.home, scheduler, Resources(nodes=nodes), failures=patient)
        trainer.submit(spec)
        job = HeldJob(lab, cluster, scheduler, trainer, JobJournal(lab.home, spec.id))
        job.hold(12)
        yield job


def spec_of(lab: Any, nodes: int = 2, spares: int = 1) -> JobSpec:
    lab.dataset()
    hyper = {"steps": STEPS - (nodes == 1)}  # a layout is not part of the id
    spec: JobSpec = lab.spec(
        "qwen3", layout={"data": nodes}, hyper=hyper, save_every=5, spare_nodes=spares
    )
    return spec


@pytest.fixture
def losses(shared_lab: Any, undisturbed_job: Any) -> list[float]:
    """Of the same job with nothing lost, on one node."""
    found: list[float] = undisturbed_job(spec_of(shared_lab)).losses
    return found


# ---- on Slurm
@pytest.mark.slurm
@pytest.mark.megatron
@needs_slurm
def test_spare_nodes_take_the_places_of_lost_ones(
    lab: Any, tmp_path: Path, losses: list[float]
) -> None:
    """Of one after the other: the second one is the batch script's."""
    (scratch := tmp_path / "scratch").mkdir()
    site = JobSettings(scratch=str(scratch))
    with held_job(lab, tmp_path, spec_of(lab, spares=2), site=site) as job:
        job.await_spares()
        newest = job.points[0]
        (own,) = scratch.glob(f"*/*/{NODES[0]}/*/rank-00000/local{newest.name[4:]}.1/rank-*.bin")
        flip(newest / own.name)  # the node that stays has its own
        before = job.launchers()
        assert sorted(before) == NODES
        for attempt, node in enumerate((NODES[1], NODES[0]), 2):
            kill_node(job.cluster, node)
            if node == NODES[0]:  # held until then: they would publish a newer point
                job.release()
            job.wait(lambda: job.journal.attempts == attempt or job.ended(), "the next one")  # noqa: B023
            job.hold(3)
            del before[node]
            assert job.launchers() == before  # they keep their processes
        job.release()
        job.wait(job.ended, "the end")
        job.check(losses)
        assert job.counts == (3, 1)
        begun = [e["from_step"] for e in job.journal.events() if e["event"] == "started"]
        assert newest.name == f"step-{begun[1]:08d}"
        verdicts = [e for e in job.journal.events() if e["event"] == "verdict"]
        assert [v["node"] for v in verdicts] == [NODES[1], NODES[0]]
        assert {v["cause"] for v in verdicts} == {"node"}
        nodes = [v["done"].removeprefix("went on at once on ").split(", ") for v in verdicts]
        assert nodes[0] in ([NODES[0], spare] for spare in NODES[2:])
        assert sorted(nodes[1]) == NODES[2:]


@pytest.mark.slurm
@pytest.mark.megatron
@needs_slurm
def test_a_spare_node_goes_on_alone_where_the_only_one_that_trains_is_lost(
    lab: Any, tmp_path: Path, shared_lab: Any, undisturbed_job: Any
) -> None:
    """The batch script is lost with it, so nobody tells the spare node."""
    undisturbed = undisturbed_job(spec_of(shared_lab, nodes=1)).losses
    with held_job(lab, tmp_path, spec_of(lab, nodes=1), silence=60) as job:
        job.kill(NODES[0])
        job.wait(job.ended, "the end")
        job.check(undisturbed)
        assert job.counts == (2, 1)
        (verdict,) = (e for e in job.journal.events() if e["event"] == "verdict")
        assert (verdict["cause"], verdict["node"]) == ("node", NODES[0])
        assert verdict["done"] == f"went on at once on {NODES[1]}"


@pytest.mark.slurm
@pytest.mark.megatron
@needs_slurm
def test_where_the_spare_node_is_dead_too_the_job_is_queued_again(
    lab: Any, tmp_path: Path, losses: list[float]
) -> None:
    with held_job(lab, tmp_path, spec_of(lab)) as job:
        job.await_spares()
        job.kill(NODES[2], NODES[1])
        told = "127.0.0.2 was lost, and no spare node is left in its place"
        job.wait(lambda: job.ended() or told in job.journal.log.read_text(), "that it is told")
        for node in (NODES[2], NODES[1]):
            revive_node(job.cluster, node)
        job.wait(job.ended, "the end")
        job.check(losses)
        assert (job.journal.attempts, job.slurm_jobs) == (2, 2)
        (verdict,) = (e for e in job.journal.events() if e["event"] == "verdict")
        assert (verdict["cause"], verdict["node"]) == ("node", NODES[1])


@pytest.mark.slurm
@pytest.mark.megatron
@needs_slurm
def test_nodes_killed_again_and_again_change_no_loss(
    lab: Any, tmp_path: Path, losses: list[float]
) -> None:
    @contextmanager
    def begin(folder: Path, chance: random.Random) -> Iterator[HeldJob]:
        own = type(lab)(Home(folder / "home"), lab.models)
        with held_job(own, folder, spec_of(own)) as job:
            job.await_spares()
            yield job

    def disturb(job: HeldJob, chance: random.Random, most: int) -> Counter[str]:
        hits = Counter[str]()
        while hits.total() < most and not job.ended():
            node, step, was = chance.choice(job.cluster.nodes), job.journal.step, job.counts
            job.kill(node)  # the first one while the ranks are held
            job.wait(lambda: node in job.down(), "a node that is down")  # noqa: B023
            revive_node(job.cluster, node)
            job.reach(step + chance.randrange(3, 33))
            attempts, queued = (now - then for now, then in zip(job.counts, was, strict=True))
            hits["queued again" if queued else "went on" if attempts else "no rank there"] += 1
        job.wait(job.ended, "the end")
        return hits

    Campaign(begin, disturb, lambda job: job.check(losses)).run(tmp_path, KILLS)


@pytest.mark.slurm
@needs_slurm
def test_an_allocation_that_lost_its_script_is_ended_by_the_controller_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Slurm has a step of its own on each node, as at sites with pam_slurm_adopt."""
    settings = f"{private_cluster.FIXED_SETTINGS}PrologFlags=Contain\n"
    monkeypatch.setattr(private_cluster, "FIXED_SETTINGS", settings)
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=1)
    cluster.start()
    argv = ["sh", "-c", "echo begun; exec sleep 6000"]  # each step says so by its srun
    held = {"nodes": 1, "ranks": 1, "argv": argv, "directory": str(tmp_path)}

    def sleepers() -> dict[str, int]:
        on_nodes = [(node, one) for one in processes(cluster) for node in NODES if on(node, one[2])]
        return {node: one[0] for node, one in on_nodes if one[1].startswith("sleep 6000 ")}

    with Slurm(tmp_path / "slurm", cluster) as scheduler:
        log = tmp_path / "log"
        scheduler.submit(COMMAND.model_copy(update={**held, "log": str(log)}))
        wait_until(lambda: log.exists() and log.read_text().count("begun") == 2)
        wait_until(lambda: len(sleepers()) == 2, seconds=120)
        kill_node(cluster, NODES[0])
        wait_until(lambda: scheduler.live()["job"].lost_script, seconds=120)
        assert scheduler.status("job").state == "running"
        os.kill(sleepers()[NODES[1]], signal.SIGKILL)

        def deposed() -> None:
            raise Superseded("another host controls this root")

        scheduler.guard = deposed
        with pytest.raises(Superseded):
            wait_until(lambda: scheduler.status("job").state != "running", seconds=120)
        assert "job" in scheduler.live()
        scheduler.guard = unguarded
        assert scheduler.status("job").reason.startswith("NODE_FAIL: 127.0.0.1")
        wait_until(lambda: "job" not in scheduler.live(), seconds=120)


# ---- without Slurm
def test_a_step_that_slurm_itself_makes_holds_no_node() -> None:
    assert step_nodes("7.0 n[1-2]\n7.batch n3\n7.extern n[1-4]\n") == {"n1", "n2"}


def launchers(folder: Path, answering: list[str], left: list[str]) -> dict[str, RoundDecision]:
    """What launchers on n1 and n2, and the spare ones on s1 and s2, decide after a round."""
    folder.mkdir()
    for node in left:
        (folder / f"left-{node}").touch()
    found = {}

    def answer(node: str) -> None:
        found[node] = HeldNodes(folder, ["n1", "n2", "s1", "s2"], 2, node).agree()

    with ThreadPoolExecutor() as pool:
        list(pool.map(answer, answering))
    return found


def test_launchers_agree_on_who_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launchers(tmp_path / "lost", ["n1", "s1", "s2"], ["n2"])
    assert list(map(str, found.values())) == 3 * [str(found["n1"])]
    went_on = found["n1"]
    assert went_on.lost == ["n2"] and went_on.nodes[0] == "n1" and went_on.nodes[1] in ("s1", "s2")
    assert {*went_on.nodes, *went_on.spares} == {"n1", "s1", "s2"}
    unharmed = launchers(tmp_path / "unharmed", ["n1", "n2"], [])
    assert {d.code for d in unharmed.values()} == {1} and not unharmed["n1"].lost
    monkeypatch.setenv("RANK_SILENCE_SECONDS", "4")
    none_left = launchers(tmp_path / "silent", ["n1"], [])["n1"]
    assert (none_left.nodes, none_left.lost, none_left.code) == ([], ["n2"], 1)


def test_a_busy_launcher_that_shows_it_lives_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_SILENCE_SECONDS", "16")  # 2 for an answer
    found = {}

    def answer(node: str, busy: float) -> None:
        held = HeldNodes(tmp_path, ["n1", "n2", "s1"], 1, node)
        held.show_life()
        time.sleep(busy)
        found[node] = held.agree()

    with ThreadPoolExecutor() as pool:  # a rank died on n1; n2 reads its inputs
        list(pool.map(answer, ["n1", "n2", "s1"], [0.0, 6.0, 0.0]))
    assert {(*decision.lost, decision.code) for decision in found.values()} == {(1,)}


def launcher(lab: Any, folder: Path, node: str) -> tuple[int, str]:
    """Run the launcher on a node of a job that holds n1, n2 and the spare s1: its code and log."""
    held = {"RANKS_NODES": "n1 n2 s1", "RANKS_SPARES": "1", "RANKS_FOLDER": str(folder)}
    job = lab.start(spec_of(lab), **held, SLURMD_NODENAME=node)
    return job.wait(), job.log


@pytest.mark.megatron
def test_a_launcher_that_the_others_went_on_without_ends(lab: Any, tmp_path: Path) -> None:
    decision = RoundDecision(nodes=["n1", "n2"], lost=["n3"])
    durable.create_file(tmp_path / "1.json", checksums.record_text(decision))
    code, log = launcher(lab, tmp_path, "s1")
    assert (code, (tmp_path / "ended-s1").read_text()) == (1, "1"), log
    assert "s1 answered too late: the others go on without it" in log


@pytest.mark.megatron
def test_a_launcher_that_is_on_none_of_the_nodes_says_so(lab: Any, tmp_path: Path) -> None:
    code, log = launcher(lab, tmp_path, "n1.site.org")
    assert code == 1
    assert "called n1.site.org, and the job's nodes are n1, n2, s1: let its container" in log


COMMAND = Command(
    name="job", argv=["launch"], directory="/", log="/log", nodes=2, ranks=2, spare_nodes=1
)


def test_the_script_starts_each_node_alone_and_notes_who_left(tmp_path: Path) -> None:
    """srun says 0 of a node that was lost; a launcher that ends well leaves its code."""
    programs = {
        "scontrol": "echo n1; echo n2; echo n3",
        "srun": 'case "$1" in *n2) exit 0;; esac; echo 0 > "$RANKS_FOLDER/ended-${1#*=}"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = batch_script(COMMAND, tmp_path, settings=JobSettings(inherit=[]))
    for line in ("--nodes=3", "--ntasks=3", "--no-kill"):
        assert f"#SBATCH {line}\n" in text
    environment = {"SLURM_JOB_ID": "5", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["/bin/bash", "-c", text], env=environment, check=True)
    names = {file.name for file in (tmp_path / "5.0.nodes").iterdir()}
    assert names == {"ended-n1", "left-n2", "ended-n3"}


def test_where_no_spare_node_can_be_held_it_is_refused(lab: Any, tmp_path: Path) -> None:
    told = "one launcher a node: leave them out, or set tasks"
    with pytest.raises(SchedulerError, match=f"{told} = 'node'"):
        batch_script(COMMAND, Path("/l"), settings=JobSettings(tasks="rank"))
    slurm = Slurm(tmp_path / "slurm", settings=JobSettings(tasks="rank"))
    trainer = MegatronTrainer(lab.home, slurm, Resources(nodes=2))
    spec = spec_of(lab)
    with pytest.raises(BadInput, match=told):
        trainer.submit(spec)
    assert not JobJournal(lab.home, spec.id).exists  # so that it may come without them
    with pytest.raises(BadInput, match="one node: leave spare_nodes out"):
        check_submitted(spec_of(lab), lab.home, "local", turns=False)
    for wrong in ({"session": "s", "spare_nodes": 1}, {"spare_nodes": -1}):
        with pytest.raises(ValidationError, match=r"leave session out|greater than"):
            lab.spec("qwen3", **wrong)
