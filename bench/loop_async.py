"""The asynchronous loop against the synchronous one, with tools whose latency has a heavy tail.

Latencies are lognormal with p99 = 30 x median, the same for the same run in both. Both do the same
work: the same iterations of the same tasks and attempts, jobs of the same length. The engine is
scripted and answers in a fixed time, any number of requests at once.
"""

import asyncio
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench.rounds import row
from cray_agents import GRPO, Agent, Loop, PromotionTest, RunContext, tool
from cray_agents.agent.hooks import Hooks
from cray_agents.engines.scripted import tool_call
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.testing import ScriptedEngine
from tests.support.killable_loop import echo, signed, site_loop, some_tasks
from tests.support.scripted_platform import platform
from tests.support.timed_trainer import TimedTrainer

MEDIAN = 0.3  # seconds that a tool takes
SPREAD = math.log(30) / 2.3263  # of the logarithm: the 99th percentile is 30 times the median
ANSWER = 0.02  # seconds that the engine takes
TRAINING = 6.0  # seconds that a job takes
ITERATIONS = 6
ROUNDS = 3
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "max_staleness 1": {"max_staleness": 1},
    "max_staleness 1, straggler_quantile 0.9": {"max_staleness": 1, "straggler_quantile": 0.9},
}


@tool(timeout=60)
async def look_up(context: RunContext) -> str:
    """Takes its time: drawn by the run's name."""
    drawn = random.Random(f"{context.task and context.task.id}/{context.run_id}")
    await asyncio.sleep(MEDIAN * math.exp(SPREAD * drawn.gauss(0, 1)))
    return "found"


def looks_up(request: dict[str, Any]) -> Any:
    """A tool call first, then the answer."""
    return tool_call("look_up") if request["messages"][-1]["role"] == "user" else echo(request)


def loop_of(**mode: Any) -> Loop:
    """The loop that is measured."""
    agent = Agent(name="a", model="m", tools=[look_up], hooks=[Hooks(before_model=signed)])
    return site_loop(
        agent=agent,
        tasks=some_tasks(400, 16, 0),
        method=GRPO,
        group_size=4,
        tasks_per_iteration=12,
        evaluate_every=ITERATIONS,
        promotion=PromotionTest(hidden=0),
        concurrency=48,
        **mode,
    )


def once(home: Path, mode: dict[str, Any]) -> tuple[float, list[Iteration]]:
    """Seconds from the first iteration's begin to the last one's end, and the iterations."""
    trainer = TimedTrainer(Home(home), TRAINING)
    with platform(home, ScriptedEngine(looks_up, delay=ANSWER), trainer=trainer) as where:
        steps = loop_of(platform=where, **mode).run_sync(ITERATIONS)
        next(steps)
        begun = time.perf_counter()
        done = list(steps)
        return time.perf_counter() - begun, done


async def main(home: Path) -> None:
    """Rounds of all modes in turn; medians, and the ratio to the synchronous one."""
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    idle: dict[str, list[float]] = {name: [] for name in MODES}
    for turn in range(ROUNDS):
        for name, mode in MODES.items():
            spent, done = await asyncio.to_thread(once, home / f"{turn}-{name}", mode)
            seconds[name].append(spent)
            shares = [(g.idle_share, g.wall) for g in done if g.idle_share is not None]
            if shares:
                whole = sum(wall for _, wall in shares)
                idle[name].append(sum(share * wall for share, wall in shares) / whole)
    what = f"{ITERATIONS} iterations, tools p99 = 30 x median"
    for name in MODES:
        times = statistics.median(
            s / o for s, o in zip(seconds["synchronous"], seconds[name], strict=True)
        )
        stood = f"{statistics.median(idle[name]):.0%} idle" if idle[name] else "idle not told"
        row(what, name, f"{statistics.median(seconds[name]):.1f} s, {stood}; {times:.2f} x as fast")
