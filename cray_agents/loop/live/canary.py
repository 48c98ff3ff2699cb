"""A candidate judged by live traffic, where a watching loop has no held-out tasks.

It is proven, and answers a share of the live sessions; the platform's canary watches both sides,
rolls it back when it does worse, and promotes it if it is no worse after so many sessions. Who
looks after a kill finds what became of it in the name's history. Called by loop.py.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.loop.evaluator import CandidateVerdict
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import Decision, PromotionTest
from cray_agents.records import ModelVersion

ENDS = ("canary_ended", "promoted")


@dataclass(frozen=True)
class Canarying:
    """Judges one loop's candidates; `test` gives the range of rewards and the error level."""

    platform: Platform
    gate: VersionGate
    clock: PhaseTimer
    loop: str
    watch: Watch
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
        told: Any = {"who": who, "reason": decision.reason, "numbers": ended["numbers"]}
        if not promoted:
            await self.platform.reject(candidate, **told)
        elif ended["kind"] != "promoted":  # the platform is about to, or died before it did
            await self.gate.promote(candidate, **told)
        return CandidateVerdict(proof, decision, [])

    async def _ended(self, candidate: ModelVersion) -> dict[str, Any] | None:
        """The event that ended its canary, or promoted it; None: it goes on, or never began."""
        events = await self.platform.history(candidate.name)
        mine = [event for event in events if event["version"] == candidate.number]
        return next((event for event in reversed(mine) if event["kind"] in ENDS), None)

    async def _begin(self, candidate: ModelVersion, who: str, number: int) -> None:
        """Start its canary, behind any other; or find that it runs."""
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
    """What the canary found, in the words of promotion.py; there are no pairs behind it."""
    numbers = ended["numbers"]
    sides = [numbers.get(side) or {} for side in ("control", "canary")]
    theirs, ours = (side.get("reward") or 0.0 for side in sides)
    return Decision(
        verdict="promote" if promoted else "reject",
        reason=f"canary: {ended['reason']}",
        evidence=max(numbers.get("error_evidence", 1.0), numbers.get("reward_evidence", 1.0)),
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
