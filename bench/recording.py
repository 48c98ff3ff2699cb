"""Cost of recording finished runs, to loop and platform together, when many end at once.

Runs that share requests (`Recording` in cray_agents/platform/transport.py) against a request for
each. Client and gateway are one process here, so that its processor time is that of both sides.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bench.rounds import side_by_side
from cray_agents import Agent, Platform, Run
from cray_agents.engines.openai_engine import run_event
from cray_agents.engines.scripted import tool_call
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator
from tests.support.scripted_gateway import served

RUNS = 2048
Record = Callable[[Run], Awaitable[object]]


async def main(home: Path) -> None:
    """A row for each number of runs that end at a time."""
    engine = ScriptedEngine([tool_call("calculator", expression="1 + 1"), "2"])
    run = await Agent(name="a", tools=[calculator], engine=engine).run("1 + 1?")
    numbers = itertools.count()
    async with served(home) as gateway:
        platform = Platform(gateway.url)

        async def together(one: Run) -> None:
            await platform.record([one])

        async def apart(one: Run) -> None:
            body = {"events": [run_event(one)]}
            await platform._http.post(f"/trajectories/{one.id}/events", body)

        for width in (1, 64):
            await side_by_side(
                f"a finished run recorded, {width} at a time",
                "ms of processor time",
                {
                    "together": partial(_cost, together, run, numbers, width),
                    "a request each": partial(_cost, apart, run, numbers, width),
                },
            )
        await platform.close()


async def _cost(record: Record, run: Run, numbers: "itertools.count[int]", width: int) -> float:
    """Milliseconds a run, of client and gateway."""

    async def several(count: int) -> None:
        for _ in range(count):
            await record(run.model_copy(update={"id": f"run-{next(numbers)}"}))

    await asyncio.gather(*(several(1) for _ in range(width)))
    each = RUNS // 64
    begun = time.process_time()
    await asyncio.gather(*(several(each) for _ in range(width)))
    return 1000 * (time.process_time() - begun) / (each * width)
