"""Components of a running loop, wired together: gate, source of runs, judge. Made by loop.py."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cray_agents.errors import CrayError, NotFound
from cray_agents.iteration import Iteration
from cray_agents.loop.collector import Collected, Collector
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.evaluator import CandidateVerdict, HoldoutEvaluator
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.live.traffic import LiveTraffic
from cray_agents.loop.methods import scheduled_at
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import Rollouts
from cray_agents.loop.settings import LoopSettings
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import Decision, PromotionTest
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
            platform,
            gate,
            rollouts(),
            clock,
            loop.tasks,
            loop.promotion,
            sampling.seed,
            loop.hazards,
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


# ---- Canary as the judge: a loop on live traffic without held-out tasks lets live sessions decide
# A candidate is proven, and answers a share of the live sessions. The platform's canary watches
# both sides. It rolls a worse candidate back, and promotes one that is no worse after so many
# sessions. After a kill, the outcome is read from the name's history.
ENDS = ("canary_ended", "promoted")


@dataclass(frozen=True)
class Canarying:
    """Judge of one loop's candidates; `test` gives the range of rewards and the error level."""

    platform: Platform
    gate: VersionGate
    clock: PhaseTimer
    loop: str
    watch: Live
    test: PromotionTest

    async def judge(
        self, candidate: ModelVersion, incumbent: ModelVersion, number: int
    ) -> CandidateVerdict:
        """Prove a candidate, and wait until its canary has ended. Raises SwapError, BadInput."""
        who = f"loop {self.loop}"
        with self.clock.phase("canary", candidate.id):
            proof = await self.gate.stage(candidate)
            ended = await self._ended(candidate)
            while ended is None:
                await self._begin(candidate, who, number)
                await self._watch(candidate.name)
                ended = await self._ended(candidate)
        promoted = ended["kind"] == "promoted" or ended["reason"] == f"{candidate.id} is promoted"
        decision = _decision(ended, promoted)
        record: Any = {"who": who, "reason": decision.reason, "numbers": ended["numbers"]}
        if not promoted:
            await self.platform.reject(candidate, **record)
        elif ended["kind"] != "promoted":  # the platform is about to, or died before it did
            await self.gate.promote(candidate, **record)
        return CandidateVerdict(proof, decision, [])

    async def _ended(self, candidate: ModelVersion) -> dict[str, Any] | None:
        """The event that ended a candidate's canary, or promoted it; None: there is none yet."""
        events = await self.platform.history(candidate.name)
        mine = [event for event in events if event["version"] == candidate.number]
        return next((event for event in reversed(mine) if event["kind"] in ENDS), None)

    async def _begin(self, candidate: ModelVersion, who: str, number: int) -> None:
        """Start a candidate's canary, after any other one, unless it runs already."""
        while (running := await self._running(candidate.name)) is not None:
            if running["version"] == candidate.number:
                return
            self.clock.report("canary", note=f"after that of {candidate.name}@{running['version']}")
            await asyncio.sleep(self.watch.poll)
        await self.platform.canary(
            candidate,
            who=who,
            reason=f"update {number}",
            share=self.watch.canary_share,
            promote_after=self.watch.canary_sessions,
            alpha=self.test.alpha,
            low=self.test.low,
            high=self.test.high,
            givers=self.watch.givers,
        )

    async def _watch(self, name: str) -> None:
        while (running := await self._running(name)) is not None:
            seen = running["seen"]["canary"]["answered"]
            self.clock.report("canary", seen, self.watch.canary_sessions, "live sessions")
            await asyncio.sleep(self.watch.poll)

    async def _running(self, name: str) -> dict[str, Any] | None:
        try:
            return await self.platform.canary_status(name)
        except NotFound:
            return None


def _decision(ended: dict[str, Any], promoted: bool) -> Decision:
    """The canary's outcome as a Decision of the sequential test, without pairs behind it."""
    numbers = ended["numbers"]
    sides = [numbers.get(side) or {} for side in ("control", "canary")]
    theirs, ours = (side.get("reward") or 0.0 for side in sides)
    return Decision(
        verdict="promote" if promoted else "reject",
        reason=f"canary: {ended['reason']}",
        evidence=max(
            numbers.get(f"{kind}_evidence", 1.0) for kind in ("error", "reward", "finding")
        ),
        limit=numbers.get("limit", 1.0),
        tasks=0,
        planned=0,
        wins=0,
        losses=0,
        ties=0,
        incumbent=theirs,
        candidate=ours,
        difference=ours - theirs,
    )
