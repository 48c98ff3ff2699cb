"""The held-out tasks: what a version makes of them, and whether a candidate is better by them.

Both versions answer the same tasks with the same seeds, greedily; the incumbent's runs are on
record from the time when it was promoted. The candidate is proven, and answers batch by batch, in
an order that the seed decides, until the test of promotion.py has seen enough. Called by loop.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.errors import HookError
from cray_agents.generation import Generation, decisions_in
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import RolloutRequest, Rollouts, failed_by_infrastructure, success
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import (
    WHOLE,
    Decision,
    Gaps,
    Pair,
    PromotionTest,
    decide,
    measured,
    plan,
    probes,
    tag_of,
)
from cray_agents.records import ModelVersion, ProbeReport, Run, Split, Task
from cray_agents.tasks.task_set import TaskSet

OnDone = Callable[[int], None]


@dataclass(frozen=True)
class CandidateVerdict:
    """What came of a candidate. `worse`: nothing should go on from it."""

    proof: ProbeReport
    decision: Decision
    runs: list[Run]

    @property
    def promoted(self) -> bool:
        """Whether the bare name stands for it now."""
        return self.decision.verdict == "promote"

    @property
    def worse(self) -> bool:
        """Whether it did worse than the incumbent: on the whole, or where a guard watches.

        A difference within one standard error is none: else chance would throw away every second
        step of a policy that stands still for a while.
        """
        found = self.decision
        return found.difference < -found.error or any(guard.failed for guard in found.guards)

    def told(self) -> dict[str, Any]:
        """As the fields of Generation."""
        decision = self.decision
        return {
            "promoted": self.promoted,
            "holdout_success": success(self.runs),
            "holdout_tasks": len(self.runs),
            "evidence": decision.evidence,
            "wins": decision.wins,
            "losses": decision.losses,
            "ties": decision.ties,
            "unscored": decision.gaps.unscored,
            "unpaired": decision.gaps.unpaired,
            "failed_pairs": decision.gaps.failed,
            "note": decision.reason if self.promoted else f"rejected: {decision.reason}",
            "probe_max_logprob_diff": self.proof.max_logprob_diff,
        }


@dataclass(frozen=True)
class HoldoutEvaluator:
    """Evaluates versions on one loop's tasks; `seed` decides in which order."""

    platform: Platform
    gate: VersionGate
    rollouts: Rollouts
    clock: PhaseTimer
    tasks: TaskSet
    test: PromotionTest
    seed: int

    async def judge(
        self, candidate: ModelVersion, incumbent: ModelVersion, number: int
    ) -> CandidateVerdict:
        """Prove a candidate, evaluate it against the incumbent, and promote or reject it.

        While it is evaluated, rollouts of other versions wait at the gate, where there is but one
        replica. Raises SwapError if it is not proven; the pool has then put back what it held.
        """
        guarding = await self._probes()
        with self.clock.phase("evaluate holdout"):
            theirs = await self._incumbent(incumbent, guarding)
        self.clock.report("swap", note=candidate.id)
        async with self.gate.only(candidate) as proof:
            with self.clock.phase("evaluate holdout"):
                decision, runs = await self._compare(candidate, theirs, guarding, number)
            who, numbers = f"loop {self.rollouts.loop}", decision.model_dump(mode="json")
            if decision.verdict == "promote":
                with self.clock.phase("promote", candidate.id):
                    await self.gate.promote(
                        candidate, who=who, reason=decision.reason, numbers=numbers
                    )
            else:
                await self.platform.reject(
                    candidate, who=who, reason=decision.reason, numbers=numbers
                )
        return CandidateVerdict(proof, decision, runs)

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """A version's runs on the tasks that its success is told on, once per version."""
        with self.clock.phase(f"evaluate {split}"):
            return await self._answers(version, self._told_on(split), f"evaluate {split}")

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Whether `evaluate` would find all of a version's runs on record."""
        runs = await self.rollouts.stored(split, version=version)
        return {task.id for task in self._told_on(split)} <= {
            run.task.id for run in runs if run.task and run.reward is not None
        }

    def _told_on(self, split: Split) -> list[Task]:
        """All but the hidden probes, which are only a guard."""
        tasks = self.tasks.split(split)
        return measured(tasks, self.test) if split == "holdout" else list(tasks)

    async def _answers(
        self, version: ModelVersion, tasks: Sequence[Task], phase: str, there: int = 0
    ) -> list[Run]:
        wanted = [RolloutRequest(task, f"{version.id}/{task.split}") for task in tasks]

        def report(done: int) -> None:
            self.clock.report(phase, there + done, there + len(wanted), version.id)

        return await self.rollouts.run(wanted, version, 0.0, report, paired=True)

    async def _probes(self) -> list[Task]:
        """The hidden tasks of the decision that is next, by those on record."""
        records = await self.platform.generations(self.rollouts.loop)
        earlier = decisions_in([Generation.model_validate(record) for record in records])
        return probes(self.tasks.split("holdout"), earlier, self.test)

    async def _incumbent(self, version: ModelVersion, guarding: list[Task]) -> dict[str, Run]:
        """The incumbent's runs on all tasks that the decision may need, by task."""
        tasks = [*measured(self.tasks.split("holdout"), self.test), *guarding]
        return _by_task(await self._answers(version, tasks, "evaluate holdout"))

    async def _compare(
        self, candidate: ModelVersion, theirs: dict[str, Run], guarding: list[Task], number: int
    ) -> tuple[Decision, list[Run]]:
        """Whether a candidate is better, and its runs so far: all that decide, if it is."""
        order = measured(self.tasks.split("holdout"), self.test)
        random.Random(f"{self.rollouts.loop}/{self.seed}/{number}").shuffle(order)
        runs: list[Run] = []
        while True:
            batch = order[len(runs) : len(runs) + self.test.batch]
            runs += await self._answers(candidate, batch, "evaluate holdout", len(runs))
            pairs, gaps = self._pairs(order, theirs, runs)
            look: Any = {"planned": plan(order, self.test), "exhausted": len(runs) == len(order)}
            decision = decide(pairs, self.test, gaps=gaps, **look)
            if decision.verdict == "promote" and guarding:
                ours = await self._answers(candidate, guarding, "evaluate probes")
                hidden, more = self._pairs(guarding, theirs, ours)
                decision = decide(pairs, self.test, hidden=hidden, gaps=gaps + more, **look)
            if decision.verdict != "continue":
                break
        if decision.verdict == "promote":  # what comes next is compared with all of them
            rest = order[len(runs) :]
            runs += await self._answers(candidate, rest, "evaluate holdout", len(runs))
        return decision, runs

    def _pairs(
        self, tasks: Sequence[Task], theirs: dict[str, Run], runs: Sequence[Run]
    ) -> tuple[list[Pair], Gaps]:
        """Those tasks that both were tried at, as promotion.py has it."""
        ours, pairs, gaps = _by_task(runs), list[Pair](), WHOLE
        for task in tasks:
            if (mine := ours.get(task.id)) is None:
                continue
            other = theirs[task.id]
            if _let_down(mine) or _let_down(other):
                gaps += Gaps(failed=1)
            elif other.reward is None:
                gaps += Gaps(unpaired=1)
            else:
                gaps += Gaps(unscored=int(mine.reward is None))
                reward = self.test.low if mine.reward is None else mine.reward
                tag = tag_of(task, self.test)
                pair = Pair(task=task.id, incumbent=other.reward, candidate=reward, tag=tag)
                pairs.append(pair)
        return pairs, gaps


def _by_task(runs: Sequence[Run]) -> dict[str, Run]:
    return {run.task.id: run for run in runs if run.task}


def _let_down(run: Run) -> bool:
    """Whether the run says nothing of its version; a hook of ours failed on what that version did.

    As a reward function that fails does, and for the same reason it may not be the way out.
    """
    hooked = run.error is not None and run.error.type == HookError.__name__
    return failed_by_infrastructure(run) and not hooked
