"""Processor time of a model call: a loop's agents, 64 at a time, recorded, by process.

Each run is one call of 16 tokens. The model is random and tiny: what the other processes take is
the plumbing, whatever the model.
"""

import asyncio
import os
import statistics
from collections import defaultdict
from pathlib import Path

from bench.iteration import odd
from bench.rivals.process_tree import command_of, tree_of
from bench.rounds import ROUNDS, row
from cray_agents import Agent, Task
from cray_agents.agent.user_code import wait_for
from cray_agents.config import load_config
from cray_agents.loop.rollouts import RolloutRequest, Rollouts
from cray_agents.loop.version_gate import VersionGate
from cray_agents.server.platform_process import client, serving
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

TASKS, ATTEMPTS, AT_ONCE = 64, 8, 64
QUESTIONS = [f"Say something about the number {n * 37}." for n in range(TASKS)]
AGENT = Agent(name="talker", model="m", instructions="Talk.", max_turns=1, max_tokens=16)
NAMES = {"EngineCore": "engine core", "vllm_plugins.server": "vLLM's server", " up ": "gateway"}
TICK = os.sysconf("SC_CLK_TCK")


def processor_time(pid: int) -> dict[str, float]:
    """Seconds of processor time so far, by process: a platform's, and this one's."""
    seconds: dict[str, float] = defaultdict(float)
    for one in tree_of(pid):
        command = command_of(one).replace("\0", " ")
        name = next((name for mark, name in NAMES.items() if mark in command), "others")
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        seconds[name] += (int(fields[11]) + int(fields[12])) / TICK
    times = os.times()
    return seconds | {"loop": times.user + times.system}


async def main(home: Path) -> None:
    """Print a row of milliseconds a call by process, and one of all but the engine core."""
    await asyncio.to_thread(wait_for, measure(home))  # as `Loop.run_sync` runs a loop


async def measure(home: Path) -> None:
    """Run loops on a platform of its own, and print their rows."""
    shape = ModelShape(init_std=0.15)
    make_seed_model(home / "model", seed=0, corpus=QUESTIONS, shape=shape)
    rounds: list[dict[str, float]] = []
    with serving(load_config({"home": home / "home"}), model=home / "model", name="m") as info:
        platform = client(info)
        try:
            version = await platform.promoted("m")
            assert version is not None
            gate = VersionGate(platform)
            await gate.stage(version)
            for number in range(ROUNDS + 1):  # the first warms up
                requests = [
                    RolloutRequest(Task(input=question), f"calls{number}", attempt)
                    for question in QUESTIONS
                    for attempt in range(ATTEMPTS)
                ]
                before = processor_time(info["pid"])
                rollouts = Rollouts(
                    platform, gate, AGENT, f"calls-{number}", [odd], concurrency=AT_ONCE
                )
                await rollouts.run(requests, version, 1.0, lambda done: None)
                after = processor_time(info["pid"])
                spent = {name: after[name] - before.get(name, 0.0) for name in after}
                rounds.append({n: 1000 * s / len(requests) for n, s in spent.items()})
        finally:
            await platform.close()
    names = [*NAMES.values(), "loop", "others"]
    figures = {
        name: statistics.median(each.get(name, 0.0) for each in rounds[1:]) for name in names
    }
    split = ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items())
    row("a call of a loop's agent, 64 at a time", "by process", f"{split} ms")
    plumbing = sum(figures.values()) - figures["engine core"]
    row("a call of a loop's agent, 64 at a time", "all but the engine core", f"{plumbing:.2f} ms")
