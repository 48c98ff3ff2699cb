"""Just in time on a private Slurm cluster of virtual nodes, beside static splits of the same nodes.

A bursty trace of traces.py, six times as fast, thinned to what scripted replicas of four slots
answer. Slurm, pool, admission, trainer and controller are real; engines and jobs are scripted
processes. `CRAY_BENCH_SPLITS`, `CRAY_BENCH_MINUTES` and `CRAY_BENCH_SEED` change it.
"""

import asyncio
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from cray_agents.runtime.scaling.decision import ScalingRules, ServingRule
from cray_agents.runtime.scaling.traces import make_trace
from tests.bench.rounds import row
from tests.support.virtual_cluster import VirtualCluster, until, virtual_cluster

NODES, SLOTS, ANSWER, FASTER = 8, 4, 2.0, 6.0
LIMIT = 10.0  # seconds of waiting after which an answer counts for nothing: 60 in the trace's time
JOBS = 14  # of a node each: the queue is never empty
MINUTES = float(os.environ.get("CRAY_BENCH_MINUTES", "6"))
SPLITS = [int(part) for part in os.environ.get("CRAY_BENCH_SPLITS", "0,4,5,6").split(",")]
SEED = int(os.environ.get("CRAY_BENCH_SEED", "1"))
RULES = ScalingRules(
    (
        ServingRule(
            "replicas", slots=SLOTS, least=1, most=NODES, spare=1,
            clear=30 / FASTER, calm=600 / FASTER, empty=1800 / FASTER,
        ),
    ),
    least_run=300 / FASTER / 2,
)  # fmt: skip


def arrivals() -> list[int]:
    """Requests in each step of the bench's own time."""
    trace = make_trace("bursty", SEED, NODES, hours=MINUTES / 60 * FASTER)
    draw, chat = random.Random(SEED), trace.serving[0]
    share = (SLOTS / ANSWER) / (chat.slots / chat.answer * FASTER) / 0.8  # chat has 0.8 of the load
    return [sum(draw.random() < share for _ in range(some)) for some in chat.arrivals]


async def play(cluster: VirtualCluster, split: int) -> dict[str, float]:
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

    step = 5.0 / FASTER
    for number, some in enumerate(arrivals()):
        await asyncio.sleep(max(0.0, begun + number * step - time.monotonic()))
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
    """Goodput and waiting, just in time and under static splits."""
    os.environ["CRAY_TEST_STEP"], os.environ["CRAY_TEST_SAVE"] = "1", "0.5"
    for split in SPLITS:
        way = f"static {split} + {NODES - split}" if split else "just in time"
        folder = home / f"scaling-{split}"
        folder.mkdir()
        async with virtual_cluster(folder, NODES) as cluster:
            figures = await play(cluster, split)
        text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        row(f"bursty, {MINUTES:g} minutes, {NODES} virtual nodes", way, text)
