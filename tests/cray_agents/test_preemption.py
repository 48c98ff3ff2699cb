"""The controller takes nodes from training and gives them back, on a private Slurm cluster."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from bench.cluster.simulation import PERIOD
from cray_agents.cli.why import explain
from cray_agents.errors import Superseded
from cray_agents.runtime.accounting.ledger import read_ledger
from cray_agents.runtime.scaling.decision import ScalingRules, ServingRule
from cray_agents.runtime.scheduler.site_environment import missing_programs
from tests.support.held_requests import Decisions, simulated_decisions
from tests.support.virtual_cluster import VirtualCluster, names_of, until, virtual_cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed"),
]
SEEDS = [int(seed) for seed in os.environ.get("CRAY_TEST_SCALING", "").split(",") if seed]
#: A request under way asks for a replica of its own; those that wait count for nothing.
RULE = ServingRule("replicas", slots=2, use=0.6, most=3, clear=1e9, calm=15.0, empty=30.0)
PERIODS = 9  # of a phase: more than `empty`


async def real_decisions(
    cluster: VirtualCluster, rules: ScalingRules, levels: list[int], periods: int
) -> Decisions:
    """What the controller does in each phase, period by period of a clock that waits for it.

    Slurm admits jobs by itself, so that is seen by what runs.
    """
    now, decisions, before = 0.0, Decisions(), set[str]()
    controller = cluster.controller(rules, clock=lambda: now, look=0.0)
    for level in levels:
        decisions.append(Counter())
        for _ in range(periods):
            await cluster.hold(level)
            away = cluster.pool.away
            for action in await controller.step():
                if action.kind in ("preempt", "end"):
                    (name,) = names_of([action.name], cluster)
                    decisions[-1][action.kind, name] += action.count
                    away += action.count * (action.kind == "end")
            if started := away - cluster.pool.away:
                decisions[-1]["start", rules.serving.name] += started
            await cluster.settled()
            training = cluster.training  # once: what begins after it counts in the next period
            decisions[-1].update(("admit", name) for name in training - before)
            before, now = training, now + PERIOD
    return decisions


async def test_nodes_are_taken_and_given_back_as_in_the_simulator(tmp_path: Path) -> None:
    """One node is idle, two train: the idle one serves first, then that of the lower class."""
    rules = ScalingRules(RULE, least_run=0.0)
    levels, jobs = [1, 2, 3, 0], {"dear": 0, "cheap": -5}
    async with virtual_cluster(tmp_path, nodes=3) as cluster:
        await cluster.open(replicas=3, slots=2)
        for name, priority in jobs.items():
            cluster.submit(name, nice=-priority)
        await until(lambda: cluster.journal("dear").step and cluster.journal("cheap").step)
        await check_sleepers(cluster, rules)
        real = await real_decisions(cluster, rules, levels, PERIODS)
        assert real == simulated_decisions(rules, levels, PERIODS, 3, jobs)
        assert real[0]["preempt", "cheap"] == 0 and real[1]["preempt", "cheap"] == 1
        # told in words, in the job's record, by `why` and in the ledger; no step was lost
        cheap, dear = cluster.journal("cheap"), cluster.journal("dear")
        await until(lambda: cheap.attempts == 2 and dear.attempts == 2)
        (verdict,) = (event for event in cheap.events() if event["event"] == "verdict")
        assert verdict["cause"] == "preempted" and verdict["done"] == "started again"
        assert "serving is 1 nodes short (0 requests wait" in verdict["message"]
        assert "a job of higher priority took its nodes" in " ".join(
            explain(cluster.home, cheap.job_id)["why"]
        )
        steps = [event["step"] for event in cheap.events() if event["event"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        lines = [line for file in read_ledger(cluster.home.ledger) for line in file]
        told = [line for line in lines if line.event == "preempt"]
        assert names_of([line.holder for line in told], cluster) == ["cheap", "dear"]
        await check_priority(cluster, rules)
        await check_refusals(cluster)


async def check_sleepers(cluster: VirtualCluster, rules: ScalingRules) -> None:
    """A job on the node of a sleeping replica leaves before others; the replica waits for that."""
    controller = cluster.controller(rules)
    live = cluster.site.scheduler.live()
    node = live[cluster.jobs["dear"]].nodes
    assert controller._cluster is not None
    state = await asyncio.to_thread(controller._cluster.look, 0.0, Counter({node: 1}))
    views = {names_of([view.name], cluster)[0]: view for view in state.running}
    assert views["dear"].sleepers == 1 and not views["cheap"].sleepers
    assert state.used == {node, live[cluster.jobs["cheap"]].nodes}
    load = controller._load
    load._levels = [(node, 1), ("elsewhere", 1), ("elsewhere", 2)]
    assert load.wakeable(state.used) == (1, 1) and load.asleep == {node: 1, "elsewhere": 2}


async def check_priority(cluster: VirtualCluster, rules: ScalingRules) -> None:
    """A job that has waited for longer does not get the node that another one left."""
    for name in ("third", "fourth"):
        cluster.submit(name)
    await until(lambda: len(cluster.training) == 3)
    controller, preempted = cluster.controller(rules, look=0.0), 0
    await cluster.hold(1)
    while not cluster.pool.serving:
        preempted += sum(action.kind == "preempt" for action in await controller.step())
        await asyncio.sleep(0.2)
    assert preempted == 1 and len(cluster.training) == 2
    # nor is another one asked for it, if the job leaves between two looks
    view, scheduler = controller._cluster, cluster.site.scheduler
    assert view is not None
    rooms, running = scheduler.room("replica"), view.look(0.0).running
    job = next(job for job in running if job.name != cluster.jobs["dear"])
    kept = f"nodes={scheduler.live()[job.name].nodes} starttime=now duration=60 users=root"
    cluster.site.run(
        "scontrol", "create", "reservation=kept", "flags=maint,ignore_jobs", *kept.split()
    )
    view.preempt(job, "a replica needs its node")
    await until(lambda: not getattr(scheduler.live().get(job.name), "nodes", ""))
    scheduler.room = lambda kind: rooms  # type: ignore[method-assign]
    assert view.look(0.0).leaving == 1  # its node, looked at before, is not free


async def check_refusals(cluster: VirtualCluster) -> None:
    """A deposed controller's Slurm asks, and does nothing; a name without a folder is cancelled."""
    scheduler, job_id = cluster.site.scheduler, cluster.jobs["dear"]
    command = cluster.trainer.command_of(cluster.journal("dear").spec())

    def refuse() -> None:
        raise Superseded("term 2 has taken over")

    scheduler.guard = refuse
    for act in (
        lambda: scheduler.submit(command.model_copy(update={"name": "job-new"})),
        lambda: scheduler.cancel(job_id),
        lambda: scheduler.preempt(job_id, "it is deposed"),
    ):
        with pytest.raises(Superseded):
            await asyncio.to_thread(act)
    scheduler.guard = lambda: None
    assert scheduler.status("job-new").state == "unknown"
    assert await asyncio.to_thread(lambda: scheduler.status(job_id).state) == "running"
    assert not scheduler.preempt("job-new", "it does not run")
    name = scheduler.job_name("job-stray")
    cluster.site.run("sbatch", f"--job-name={name}", "--wrap", "sleep 600")
    scheduler.cancel("job-stray")
    await until(lambda: scheduler.status("job-stray").state == "cancelled")


if SEEDS:  # in `make soak`

    @pytest.mark.parametrize("seed", SEEDS)
    async def test_random_traces_are_decided_as_in_the_simulator(seed: int, tmp_path: Path) -> None:
        """Slurm chooses which of the waiting jobs begins, so names are not compared."""
        draw = random.Random(seed)
        nodes = draw.choice([2, 3, 4])
        jobs = {f"job-{n}": -n for n in range(draw.randint(1, nodes))}
        levels = [draw.randint(0, nodes) for _ in range(6)]
        rules = ScalingRules(RULE, least_run=0.0, training_nodes=draw.choice([0, 0, 1]))
        async with virtual_cluster(tmp_path, nodes) as cluster:
            await cluster.open(replicas=3, slots=2)
            for name, priority in jobs.items():
                cluster.submit(name, nice=-priority)
            await until(lambda: all(cluster.journal(name).step for name in jobs))
            real = await real_decisions(cluster, rules, levels, PERIODS)
        simulated = simulated_decisions(rules, levels, PERIODS, nodes, jobs)
        assert kinds_of(real) == kinds_of(simulated), (nodes, levels, rules.training_nodes)


def kinds_of(decisions: Decisions) -> list[dict[str, int]]:
    """The decisions of each phase by kind, without those that Slurm takes by itself."""
    return [
        {
            kind: sum(count for (each, _), count in phase.items() if each == kind)
            for kind in ("start", "end", "preempt")
        }
        for phase in decisions
    ]
