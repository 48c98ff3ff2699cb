"""Runs of an agent on many tasks: scored, stored once each, and never run again when stored.

A run's id is derived from what it is for (loop, scope, task, attempt), so a restarted loop finds
what a killed one did. Called by loop.py.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cray_agents.agent import Agent
from cray_agents.platform import Platform
from cray_agents.records import ModelVersion, Run, Split, Task, digest
from cray_agents.rewards import RewardFunction, score

RETRIES = 2  # of a run that the infrastructure failed


@dataclass(frozen=True)
class Wanted:
    """A run that should exist. `scope` keeps apart what the same task is run for."""

    task: Task
    scope: str
    attempt: int = 0
    generation: int | None = None


@dataclass
class Rollouts:
    """Carries out runs for one loop, `concurrency` at a time."""

    platform: Platform
    agent: Agent
    loop: str
    rewards: Sequence[RewardFunction]
    concurrency: int

    async def stored(
        self,
        split: Split,
        *,
        generation: int | None = None,
        version: ModelVersion | None = None,
    ) -> list[Run]:
        """The runs of this loop that are on record."""
        model = version.id if version else None
        found = self.platform.runs(loop=self.loop, generation=generation, split=split, model=model)
        return [run async for run in found]

    async def run(
        self,
        wanted: Sequence[Wanted],
        version: ModelVersion,
        temperature: float,
        on_done: Callable[[int], None],
    ) -> list[Run]:
        """All wanted runs, in order: those on record, and the others executed now.

        `on_done` is told how many are there. Raises StoreError, EngineUnavailable.
        """
        if not wanted:
            return []
        first = wanted[0]
        known = {
            run.id: run
            for run in await self.stored(
                first.task.split,
                generation=first.generation,
                version=None if first.generation is not None else version,
            )
        }
        agent = self.agent.override(
            model=version.id,
            temperature=temperature,
            engine=self.platform.engine(),
            recorder=None,
        )
        places = asyncio.Semaphore(self.concurrency)
        finished = 0

        async def one(item: Wanted) -> Run:
            nonlocal finished
            async with places:
                run = await self._one(agent, item, known)
            finished += 1
            on_done(finished)
            return run

        async with asyncio.TaskGroup() as group:
            pending = [group.create_task(one(item)) for item in wanted]
        return [task.result() for task in pending]

    async def _one(self, agent: Agent, item: Wanted, known: dict[str, Run]) -> Run:
        """A scored run. One that the infrastructure failed is kept, and tried again beside it."""
        run_id = "run_" + digest([self.loop, item.scope, item.task.id, item.attempt], 24)
        run = await self._attempt(agent, item, run_id, known)
        for retry in range(1, RETRIES + 1):
            if not failed_by_infrastructure(run):
                break
            run = await self._attempt(agent, item, f"{run_id}-retry{retry}", known)
        return run

    async def _attempt(self, agent: Agent, item: Wanted, run_id: str, known: dict[str, Run]) -> Run:
        if run_id in known:
            return known[run_id]
        run = await agent.run(
            item.task,
            run_id=run_id,
            loop=self.loop,
            generation=item.generation,
            attempt=item.attempt,
        )
        rewards, error = await score(run, self.rewards)
        run = run.model_copy(update={"rewards": rewards, "error": run.error or error})
        await self.platform.record([run])
        return run


def failed_by_infrastructure(run: Run) -> bool:
    """Whether the run says nothing about the agent: the engine or the machine let it down."""
    return run.error is not None and run.error.infrastructure


def success(runs: Sequence[Run]) -> float:
    """The mean reward over runs that were scored; an infrastructure failure does not count."""
    scored = [run.reward for run in runs if run.reward is not None]
    return sum(scored) / len(scored) if scored else 0.0


def accepted(runs: Sequence[Run], min_reward: float) -> int:
    """How many runs reach the reward."""
    return sum(run.reward is not None and run.reward >= min_reward for run in runs)


def shuffled(runs: Sequence[Run], seed: str) -> dict[str, float]:
    """The runs' rewards, permuted among them; the same for the same runs and seed."""
    scored = sorted((run.id, run.reward) for run in runs if run.reward is not None)
    values = [value for _, value in scored]
    random.Random(seed).shuffle(values)
    return {run_id: value for (run_id, _), value in zip(scored, values, strict=True)}
