"""Components of a running loop, wired together: gate, collector, evaluator. Made by loop.py."""

import asyncio
import logging
from dataclasses import dataclass

from cray_agents.errors import CrayError
from cray_agents.generation import Generation
from cray_agents.loop.collector import Collected, Collector
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.evaluator import CandidateVerdict, HoldoutEvaluator
from cray_agents.loop.live.canary import Canarying
from cray_agents.loop.live.traffic import LiveTraffic
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import Rollouts
from cray_agents.loop.settings import LoopSettings
from cray_agents.loop.stages import stage_of
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.records import ModelVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopComponents:
    """Collector and evaluator behind one gate, all of one event loop.

    On live traffic `live` collects. Without held-out tasks `canarying` judges.
    """

    event_loop: asyncio.AbstractEventLoop
    gate: VersionGate
    collector: Collector
    judge: HoldoutEvaluator
    live: LiveTraffic | None = None
    canarying: Canarying | None = None

    @classmethod
    def of(cls, loop: LoopSettings, platform: Platform, clock: PhaseTimer) -> "LoopComponents":
        """New components, for the event loop that runs now."""
        sampling, asynchrony = loop.sampling, loop.asynchrony
        gate = VersionGate(
            platform, lambda why: clock.report("swap", note=f"waits: {why}"), f"loop {loop.name}"
        )

        def rollouts() -> Rollouts:  # one each: what waits at the gate must not take all places
            return Rollouts(
                platform,
                gate,
                loop.agent,
                loop.name,
                loop.rewards,
                sampling.concurrency,
                sampling.seeded,
            )

        collector = Collector(
            rollouts(),
            clock,
            loop.tasks,
            loop.stages,
            sampling.curriculum.over(loop.promotion.low, loop.promotion.high),
            sampling.temperature,
            sampling.seed,
            sampling.resample,
            asynchrony.staleness,
            asynchrony.close_at,
            shuffle=sampling.shuffle,
        )
        judge = HoldoutEvaluator(
            platform, gate, rollouts(), clock, loop.tasks, loop.promotion, sampling.seed
        )
        event_loop, watch = asyncio.get_running_loop(), loop.watch
        if watch is None:
            return cls(event_loop, gate, collector, judge)
        judged = bool(loop.tasks.split("holdout"))

        def both_sides_of(number: int) -> float | None:
            stage = stage_of(loop.stages, number)
            return min_reward_for(loop.data, stage) if stage.method == "kto" else None

        live = LiveTraffic(rollouts(), clock, watch, judged, both_sides_of)
        if judged:
            return cls(event_loop, gate, collector, judge, live)
        canarying = Canarying(platform, gate, clock, loop.name, watch, loop.promotion)
        return cls(event_loop, gate, collector, judge, live, canarying)

    async def begin(self, done: list[Generation]) -> list[Generation]:
        """The generations to go on from; on live traffic, once there are enough rewarded runs."""
        return await self.live.take(done) if self.live is not None else done

    async def givers(self, number: int) -> list[str] | None:
        """The givers whose rewards count in a generation's training set; None: all."""
        return await self.live.givers(number) if self.live is not None else None

    async def collect(self, done: list[Generation], last: int) -> Collected:
        """Collect the next generation's runs, and begin those ahead that the schedule has.

        See Collector.next.
        """
        if self.live is not None:
            return await self.live.collected(len(done))
        end = self.collector.stages[-1].last
        return await self.collector.next(done, last if end is None else min(last, end))

    async def decide(
        self, candidate: ModelVersion, incumbent: ModelVersion, number: int
    ) -> CandidateVerdict:
        """Prove a candidate, evaluate it, promote or reject it. Raises SwapError."""
        judge = self.judge if self.canarying is None else self.canarying
        return await judge.judge(candidate, incumbent, number)

    async def stop(self) -> None:
        """Cancel what goes on in the background."""
        await self.collector.stop()
        await self.collector.rollouts.stop()
        await self.gate.stop()

    async def leave(self, model: str) -> None:
        """Let the pool serve the promoted version, not the last candidate."""
        try:
            version = await self.judge.platform.promoted(model)
            if version is not None:
                await self.judge.platform.stage(version, holder=f"loop {self.judge.rollouts.loop}")
        except CrayError as error:
            log.warning("the promoted version of %s may not be served now: %s", model, error)
