"""Just in time on a private Slurm cluster of virtual nodes, beside the best static split of them.

A bursty trace of traces.py, eight times as fast, thinned to what scripted replicas of two slots
answer. Slurm, pool, admission, trainer and controller are real; engines and jobs are scripted
processes. First the simulator plays the same trace, and chooses the split. `CRAY_BENCH_WAYS` (just,
static; none: the simulator alone), `CRAY_BENCH_MINUTES` and `CRAY_BENCH_SEED` change it.
"""

import asyncio
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from bench.cluster.controller import Cluster
from bench.cluster.simulation import Controller, Simulation
from bench.cluster.static_split import StaticSplit, best_split
from bench.cluster.traces import JobTrace, ServingTrace, Trace, make_trace
from bench.rounds import row
from cray_agents.runtime.scaling.decision import ScalingRules, ServingRule
from tests.support.virtual_cluster import VirtualCluster, until, virtual_cluster

NODES, SLOTS, ANSWER, FASTER = 16, 2, 1.0, 8.0
STEP = 5.0 / FASTER / 8  # seconds: an eighth of the trace's, for a finer view of the waits
LIMIT = 60 / FASTER  # seconds of waiting after which an answer counts for nothing
START, LOAD, SAVE = 12.0, 8.0, 0.5  # seconds, in the simulator, of a replica's start and a job's
JOBS = 2 * NODES  # of a node each: the queue is never empty
MINUTES = float(os.environ.get("CRAY_BENCH_MINUTES", "24"))
WAYS = os.environ.get("CRAY_BENCH_WAYS", "just,static").split(",")
SEED = int(os.environ.get("CRAY_BENCH_SEED", "2"))
RULES = ScalingRules(
    ServingRule(
        "replicas", slots=SLOTS, least=1, most=NODES, spare=1, use=0.7,
        clear=15 / FASTER, calm=150 / FASTER, empty=1800 / FASTER,
    ),
    least_run=150 / FASTER,
)  # fmt: skip


def bench_trace() -> Trace:
    """Return the trace in the bench's own time: requests of one model, and jobs of a node each."""
    trace = make_trace("bursty", SEED, NODES, hours=MINUTES / 60 * FASTER)
    draw, chat = random.Random(SEED), trace.serving[0]
    share = (SLOTS / ANSWER) / (chat.slots / chat.answer * FASTER) / 0.8  # chat has 0.8 of the load
    parts = round(5.0 / FASTER / STEP)
    arrivals = [0] * (len(chat.arrivals) * parts)
    for number, some in enumerate(chat.arrivals):
        for _ in range(some):
            if draw.random() < share:
                arrivals[number * parts + draw.randrange(parts)] += 1
    serving = ServingTrace("replicas", arrivals, SLOTS, ANSWER, START)
    jobs = tuple(
        JobTrace(f"job-{number}", 1, 1e7, step=1.0, load=LOAD, save=SAVE) for number in range(JOBS)
    )
    return Trace("bursty", SEED, NODES, len(arrivals) * STEP, STEP, (serving,), jobs, ())


def simulate(trace: Trace, controller: Controller) -> dict[str, float]:
    """Play the trace in the simulator; return the figures of `play`."""
    result = Simulation(trace, controller, LIMIT, period=1.0).run()
    return {
        "goodput": result.goodput,
        "served": result.answered_work / result.node_seconds,
        "trained": result.trained_work / result.node_seconds,
        "p50": result.wait(0.5),
        "p99": result.wait(0.99),
        "requests": sum(trace.serving[0].arrivals),
    }


async def play(cluster: VirtualCluster, trace: Trace, split: int) -> dict[str, float]:
    """Play the trace with `split` replicas for good, or, if 0, just in time."""
    await cluster.open(NODES, SLOTS, started=split or 2, slow=ANSWER)
    for number in range(JOBS):
        cluster.submit(f"job-{number}")
    busy = NODES - (split or 2)
    await until(lambda: sum(bool(cluster.journal(name).step) for name in cluster.jobs) >= busy)
    controlling = None if split else asyncio.create_task(_control(cluster))
    before = sum(cluster.journal(name).step for name in cluster.jobs)
    begun, waits, asking = time.monotonic(), list[float](), set[asyncio.Task[None]]()
    open_since: dict[int, float] = {}

    async def ask(number: int) -> None:
        open_since[number] = time.monotonic()
        waits.append(await cluster.ask())
        del open_since[number]

    for number, some in enumerate(trace.serving[0].arrivals):
        await asyncio.sleep(max(0.0, begun + number * STEP - time.monotonic()))
        for _ in range(some):
            asking.add(asyncio.create_task(ask(len(asking))))
    seconds = time.monotonic() - begun
    if controlling is not None:
        controlling.cancel()
        with suppress(asyncio.CancelledError):
            await controlling
    in_time = sum(wait <= LIMIT for wait in waits)
    waits += [time.monotonic() - since for since in open_since.values()]
    trained = sum(cluster.journal(name).step for name in cluster.jobs) - before
    attempts = sum(cluster.journal(name).attempts for name in cluster.jobs)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    waits.sort()
    served = in_time * ANSWER / SLOTS
    return {
        "goodput": (served + trained) / NODES / seconds,
        "served": served / NODES / seconds,
        "trained": trained / NODES / seconds,
        "p50": waits[len(waits) // 2],
        "p99": waits[int(0.99 * len(waits))],
        "requests": len(waits),
        "restarts": attempts - busy if not split else 0,
    }


async def _control(cluster: VirtualCluster) -> None:
    controller = cluster.controller(RULES, look=2.0)
    while True:
        await asyncio.sleep(1.0)
        await controller.step()


async def scaling(home: Path) -> None:
    """Goodput and waiting, just in time and under the best static split; the simulator's first."""
    os.environ["CRAY_TEST_STEP"], os.environ["CRAY_TEST_SAVE"] = "1", str(SAVE)
    trace = bench_trace()
    split = best_split(trace, LIMIT)["replicas"]
    what = f"bursty, seed {SEED}, {MINUTES:g} minutes, {NODES} virtual nodes"
    ways = {"just": ("just in time", 0), "static": (f"static {split} + {NODES - split}", split)}
    row(what, "just in time, simulated", _text(simulate(trace, Cluster([RULES]))))
    row(
        what,
        ways["static"][0] + ", simulated",
        _text(simulate(trace, StaticSplit({"replicas": split}))),
    )
    for way in WAYS:
        if way not in ways:
            continue
        name, replicas = ways[way]
        folder = home / f"scaling-{way}"
        folder.mkdir()
        async with virtual_cluster(folder, NODES) as cluster:
            row(what, name, _text(await play(cluster, trace, replicas)))


def _text(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
