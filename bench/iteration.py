"""Iterations of one GRPO step on real vLLM and Megatron: in a training session, and as own jobs.

A figure is the seconds from "dataset ready" to "candidate proven" without the training step itself,
and the iterations an hour, with 64 runs each. Both are measured on one platform.
"""

import statistics
import time
from pathlib import Path

from bench.rounds import row
from cray_agents import Agent, Task
from cray_agents.config import load_config
from cray_agents.loop.rollouts import RolloutRequest, Rollouts
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.queries import DatasetRecipe
from cray_agents.records import ModelVersion, Run
from cray_agents.server.platform_process import client, serving
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from cray_agents.training import Hyperparameters

ITERATIONS = 6  # of each kind; the first starts the session's ranks and is left out
TASKS, ATTEMPTS = 16, 4
QUESTIONS = [f"Say something about the number {n * 37}." for n in range(TASKS)]
AGENT = Agent(name="talker", model="m", instructions="Talk.", max_turns=1, max_tokens=20)
ALONE, SESSION = "jobs", "session"


def odd(run: Run) -> float:
    """Return 1 for an answer of odd length, else 0: a reward that splits the runs of a task."""
    return float(len(run.output or "") % 2)


async def iteration(
    platform: Platform, gate: VersionGate, parent: ModelVersion, number: int, kind: str
) -> tuple[ModelVersion, float, float]:
    """Run an iteration; return its version, and its seconds beside the step and in all."""
    begun = time.perf_counter()
    requests = [
        RolloutRequest(Task(input=question), f"{kind}{number}", attempt, iteration=number)
        for question in QUESTIONS
        for attempt in range(ATTEMPTS)
    ]
    loop = f"{kind}-{number}"
    rollouts = Rollouts(platform, gate, AGENT, loop, [odd], concurrency=64)
    await rollouts.run(requests, parent, 1.0, lambda done: None)
    dataset = await platform.build_dataset(DatasetRecipe(method="grpo", loop=loop))
    ready = time.perf_counter()
    job = await platform.submit_job(
        dataset=dataset["id"],
        parent=parent.id,
        method="grpo",
        hyperparameters=Hyperparameters(steps=1, batch_size=64, learning_rate=1e-4, seed=number),
        optimizer_from="parent",
        session=SESSION if kind == SESSION else None,
    )
    job = await platform.wait_for(job, lambda status: None)
    version = await platform.register("m", job.checkpoint or "")
    await gate.stage(version)
    end = time.perf_counter()
    return version, end - ready - job.seconds, end - begun


async def main(home: Path) -> None:
    """Print a row of seconds beside the step, and one of iterations an hour."""
    shape = ModelShape(init_std=0.15)  # so that tokens differ in probability
    make_seed_model(home / "model", seed=0, corpus=QUESTIONS, shape=shape)
    besides: dict[str, list[float]] = {ALONE: [], SESSION: []}
    wholes: dict[str, list[float]] = {ALONE: [], SESSION: []}
    with serving(load_config({"home": home / "home"}), model=home / "model", name="m") as info:
        platform = client(info)
        try:
            first = await platform.promoted("m")
            assert first is not None
            gate = VersionGate(platform)
            for kind in (SESSION, ALONE):  # in blocks: a job of its own would end the session
                parent = first
                await gate.stage(parent)
                for number in range(1, ITERATIONS + 1):
                    parent, beside, whole = await iteration(platform, gate, parent, number, kind)
                    if number > 1:
                        besides[kind].append(beside)
                        wholes[kind].append(whole)
        finally:
            await platform.close()
    alone, session = (statistics.median(besides[kind]) for kind in (ALONE, SESSION))
    row(
        "dataset ready to candidate proven, beside the step",
        f"{SESSION} / {ALONE}",
        f"{session:.2f} / {alone:.2f} s",
    )
    alone, session = (3600 / statistics.median(wholes[kind]) for kind in (ALONE, SESSION))
    row(
        "iterations of one step",
        f"{SESSION} / {ALONE}",
        f"{session:,.0f} / {alone:,.0f} an hour ({session / alone:.1f} times)",
    )
