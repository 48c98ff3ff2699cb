"""Runs the benchmarks named on the command line, or all.

`rivals` and `bfcl` have parts of their own, `disagreement` takes a model.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import orjson

from bench import (
    affinity,
    batches,
    calls,
    crowd,
    delta,
    disagreement,
    exporting,
    gateway,
    gateways,
    iteration,
    kv,
    large_pool,
    loop_async,
    parked_sessions,
    pollers,
    recording,
    recovery,
    sandbox,
    saving,
    scaling,
    serving_plan,
    simulation,
    start,
    swap,
    training,
    trajectories,
    turns,
    waits,
)
from bench.bfcl import arms as bfcl
from bench.rivals import catalog
from bench.rounds import row, side_by_side
from cray_agents import Agent
from cray_agents.engines.scripted import tool_call
from cray_agents.paths import Home
from cray_agents.records import Event, ModelCall
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator


async def store(home: Path) -> None:
    """Durable appends of 4 KB records by 64 callers, against write + fsync of the same bytes."""
    said = {"role": "assistant", "content": "x" * 3700}
    call = ModelCall(id="c", run_id="r", model="m@1", messages=[], message=said)
    record = orjson.dumps(call.model_dump()) + b"\n"
    number = iter(range(10**9))

    async def ours(total: int = 4000) -> float:
        events = Store(Home(home / f"store{next(number)}"))

        async def one(caller: int) -> None:
            for n in range(total // 64):
                name = f"{caller}.{n}"
                body = {**call.model_dump(), "id": name, "run_id": name}
                await events.append([Event(id=name, run_id=name, kind="call", body=body)])

        begun = time.perf_counter()
        await asyncio.gather(*(one(caller) for caller in range(64)))
        seconds = time.perf_counter() - begun
        await events.close()
        return total / seconds

    async def theirs(total: int = 1000) -> float:
        with (home / "raw").open("ab", buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(total):
                file.write(record)
                os.fsync(file.fileno())
        return total / (time.perf_counter() - begun)

    await side_by_side(
        "durable 4 KB records, 64 callers", "records/s", {"store": ours, "write+fsync": theirs}
    )


async def agent(home: Path) -> None:
    """The agent's own time per turn: a scripted model, a real tool."""
    times = []
    for _ in range(200):
        engine = ScriptedEngine([tool_call("calculator", expression="1 + 1"), "2"])
        runner = Agent(name="a", tools=[calculator], engine=engine)
        begun = time.perf_counter()
        await runner.run("1 + 1?")
        times.append(1000 * (time.perf_counter() - begun) / 2)
    row("agent loop, scripted model, one tool", "per turn", f"{statistics.median(times):.2f} ms")


ALL = {
    "agent": agent,
    "calls": calls.main,
    "turns": turns.main,
    "crowd": crowd.main,
    "recording": recording.main,
    "store": store,
    "scripted": gateway.alone,
    "scaling": scaling.scaling,
    "simulation": simulation.simulation,
    "serving_plan": serving_plan.main,
    "gateways": gateways.at_one_port,
    "pool": large_pool.main,
    "memory": gateway.memory,
    "waits": waits.main,
    "batches": batches.main,
    "writers": trajectories.writers,
    "listing": trajectories.listing,
    "exports": trajectories.exporting,
    "sandbox": sandbox.main,
    "saving": saving.main,
    "recovery": recovery.main,
    "exporting": exporting.main,
    "delta": delta.main,
    "training": training.main,
    "iteration": iteration.main,
    "kv": kv.main,
    "affinity": affinity.main,
    "parked": parked_sessions.main,
    "pollers": pollers.main,
    "start": start.main,
    "swap": swap.main,
    "loop": loop_async.main,
}


async def main(names: list[str]) -> None:
    """Those of these names, or all; after `rivals` and `bfcl` their parts."""
    if names[:1] == ["disagreement"]:
        disagreement.main(names[1:])
        return
    if names[:1] == ["rivals"]:
        await catalog.main(names[1:])
        return
    if names[:1] == ["bfcl"]:
        await asyncio.to_thread(bfcl.main, names[1:])
        return
    if unknown := set(names) - ALL.keys():
        known = ", ".join(("rivals", "bfcl", "disagreement", *ALL))
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {known}")
    print("| what | of | median | ratio |\n|---|---|---|---|", flush=True)
    for name in names or ALL:
        with tempfile.TemporaryDirectory() as folder:
            await ALL[name](Path(folder))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
