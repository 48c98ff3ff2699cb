"""Components of a running loop, wired together: gate, source of runs, judge. Made by loop.py."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cray_agents.errors import CrayError
from cray_agents.iteration import Iteration
from cray_agents.loop.collector import Collected, Collector
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.evaluator import CandidateVerdict, HoldoutEvaluator
from cray_agents.loop.live.canary import Canarying
from cray_agents.loop.live.traffic import LiveTraffic
from cray_agents.loop.methods import scheduled_at
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import Rollouts
from cray_agents.loop.settings import LoopSettings
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.records import ModelVersion

log = logging.getLogger(__name__)


class RunSource(Protocol):
    """The source of an iteration's runs: the loop itself (Collector), or live traffic."""

    async def begin(self, done: list[Iteration]) -> list[Iteration]:
        """The iterations to go on from, once the next one may begin."""

    async def next(self, done: Sequence[Iteration], last: int) -> Collected:
        """The runs of the iteration after the `done` ones; `last` is the call's last one."""

    async def givers(self, number: int) -> list[str] | None:
        """The givers whose rewards count in an iteration's training set; None: all."""


class Judge(Protocol):
    """The judge of a candidate: held-out tasks (HoldoutEvaluator), or a canary."""

    async def judge(
        self, candidate: ModelVersion, incumbent: ModelVersion, number: int
    ) -> CandidateVerdict:
        """Prove a candidate, evaluate it, promote or reject it. Raises SwapError."""


@dataclass(frozen=True)
class LoopComponents:
    """Gate, source of runs, and judge of one event loop. `collector` has the loop's own runs."""

    event_loop: asyncio.AbstractEventLoop
    gate: VersionGate
    collector: Collector
    evaluator: HoldoutEvaluator
    source: RunSource
    judge: Judge

    @classmethod
    def of(cls, loop: LoopSettings, platform: Platform, clock: PhaseTimer) -> "LoopComponents":
        """New components, for the event loop that runs now."""
        sampling = loop.sampling
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

        curriculum = loop.data.curriculum.over(loop.promotion.low, loop.promotion.high)
        collector = Collector(
            rollouts(), clock, loop.tasks, loop.schedule, curriculum, sampling, loop.shuffle
        )
        evaluator = HoldoutEvaluator(
            platform, gate, rollouts(), clock, loop.tasks, loop.promotion, sampling.seed
        )
        source: RunSource = collector
        judge: Judge = evaluator
        if loop.live is not None:
            judged = bool(loop.tasks.split("holdout"))

            def both_sides_of(number: int) -> float | None:
                method = scheduled_at(loop.schedule, number).method
                return min_reward_for(loop.data, method) if method.name == "kto" else None

            source = LiveTraffic(rollouts(), clock, loop.live, judged, both_sides_of)
            if not judged:
                judge = Canarying(platform, gate, clock, loop.name, loop.live, loop.promotion)
        return cls(asyncio.get_running_loop(), gate, collector, evaluator, source, judge)

    async def stop(self) -> None:
        """Cancel what goes on in the background."""
        await self.collector.stop()
        await self.collector.rollouts.stop()
        await self.gate.stop()

    async def leave(self, model: str) -> None:
        """Let the pool serve the promoted version, not the last candidate."""
        try:
            platform = self.evaluator.platform
            version = await platform.promoted(model)
            if version is not None:
                await platform.stage(version, holder=f"loop {self.evaluator.rollouts.loop}")
        except CrayError as error:
            log.warning("the promoted version of %s may not be served now: %s", model, error)
