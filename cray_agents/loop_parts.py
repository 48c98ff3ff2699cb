"""The parts of a loop that live while it runs, wired together. Called by loop.py."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cray_agents.collecting import Collector
from cray_agents.gate import Gate
from cray_agents.judging import Judge
from cray_agents.rollouts import Rollouts
from cray_agents.timing import Clock

if TYPE_CHECKING:
    from cray_agents.loop import Loop


@dataclass(frozen=True)
class Parts:
    """What collects and what judges, behind one gate; all of one event loop."""

    event_loop: asyncio.AbstractEventLoop
    gate: Gate
    collector: Collector
    judge: Judge

    @classmethod
    def of(cls, loop: "Loop", clock: Clock) -> "Parts":
        """New ones, for the event loop that runs now."""
        gate = Gate(loop.where)

        def rollouts() -> Rollouts:  # one each: what waits at the gate must not take all places
            return Rollouts(loop.where, gate, loop.agent, loop.name, loop.rewards, loop.concurrency)

        collector = Collector(
            rollouts(),
            clock,
            loop.tasks,
            loop.stages,
            loop.curriculum,
            loop.temperature,
            loop.seed,
            loop.resample,
            loop.staleness,
            loop.close_at,
            shuffle=str(loop.seed) if loop.control == "shuffled-rewards" else None,
        )
        judge = Judge(loop.where, gate, rollouts(), clock, loop.tasks, loop.promotion, loop.seed)
        return cls(asyncio.get_running_loop(), gate, collector, judge)

    async def stop(self) -> None:
        """Cancel what goes on in the background."""
        await self.collector.stop()
        await self.collector.rollouts.stop()
