"""Evaluator on held-out tasks: measures versions, and decides whether a candidate is better.

Both versions answer the same tasks with the same seeds, greedily. The incumbent's runs are on
record since its promotion. The candidate is checked, then answers batch by batch, in an order that
the seed decides, until the test of promotion/sequential_test.py has seen enough. Called by loop.py.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cray_agents.errors import BadInput, CrayError, Displaces, HookError, PoolBusy, SwapError
from cray_agents.iteration import Iteration, decisions_in
from cray_agents.loop.hazards import Hazards
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import (
    ENVIRONMENT_ERRORS,
    RolloutRequest,
    Rollouts,
    attempts_at,
    failed_by_infrastructure,
    success,
)
from cray_agents.loop.version_gate import VersionGate
from cray_agents.messages import asked_text
from cray_agents.platform.client import Platform
from cray_agents.promotion.figures import Pair
from cray_agents.promotion.sequential_test import (
    WHOLE,
    Decision,
    Gaps,
    PairedEvidence,
    PromotionTest,
    choosing_tasks,
    decide,
    deciding_tasks,
    entry_of,
    guard_tag,
    paired,
    plan,
    probe_tasks,
)
from cray_agents.records import (
    UNSCORED,
    ModelVersion,
    ProbeReport,
    Run,
    Split,
    Task,
    digest,
)
from cray_agents.tasks.leakage import HELD_OUT_ENTRY, HeldOut, task_key
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import JobVersion

OnDone = Callable[[int], None]
OnPublished = Callable[[Sequence[JobVersion]], None]
SET_OFF = (HookError.__name__, UNSCORED, *ENVIRONMENT_ERRORS)  # errors that a version may set off

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CandidateVerdict:
    """The outcome of a candidate's evaluation."""

    proof: ProbeReport
    decision: Decision
    runs: list[Run]

    @property
    def promoted(self) -> bool:
        """The bare name stands for the candidate now."""
        return self.decision.verdict == "promote"

    @property
    def worse(self) -> bool:
        """The candidate did worse than the incumbent, on the whole or where a guard watches.

        Nothing should go on from it. A difference within one standard error counts as none: else
        chance would throw away every second step of a policy that stands still for a while.
        """
        decision = self.decision
        failed = any(guard.failed for guard in decision.guards)
        return failed or decision.difference < -decision.error

    def fields(self) -> dict[str, Any]:
        """As fields of Iteration."""
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
            "load_note": self.proof.load_note,
        }


@dataclass(frozen=True)
class HoldoutEvaluator:
    """Evaluator of versions on one loop's tasks; `seed` decides their order."""

    platform: Platform
    gate: VersionGate
    rollouts: Rollouts
    clock: PhaseTimer
    tasks: TaskSet
    test: PromotionTest
    seed: int
    hazards: Hazards | None = None
    _failed: set[str] = field(default_factory=set, init=False)  # versions whose check failed

    async def judge(
        self, candidate: ModelVersion, incumbent: ModelVersion, number: int
    ) -> CandidateVerdict:
        """Prove a candidate, evaluate it against the incumbent, and promote or reject it.

        With a single replica, rollouts of other versions wait at the gate meanwhile. Raises
        SwapError if the candidate fails its check; the pool then serves what it served before.
        """
        guarding = await self._probes()
        with self.clock.phase("evaluate holdout"):
            theirs = await self._incumbent(incumbent, guarding)
            before = await self._hazardous(incumbent) if self.hazards else {}
        self.clock.report("swap", note=candidate.id)
        async with self.gate.only(candidate) as proof:
            with self.clock.phase("evaluate holdout"):
                decision, runs = await self._compare(candidate, theirs, guarding, number)
                if decision.verdict == "promote" and self.hazards:
                    ours = [*(await self._hazardous(candidate)).values()]
                    pairs = _pairs(self.hazards.tasks, before, ours, self.hazards.test)
                    decision = self.hazards.check(decision, *pairs)
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

    async def choose(
        self, versions: Sequence[ModelVersion]
    ) -> tuple[ModelVersion, dict[str, float]]:
        """Return the best of a job's versions, and the success of each on the choosing tasks.

        Of equal ones the last. These tasks never decide on a promotion, so that its error stays
        what it is. A version that fails its check is rejected.
        """
        tasks, found = self._choosing_tasks(), dict[str, float]()
        for version in (one for one in versions if one.id not in self._failed):
            try:
                if not await self.rollouts.are_scored(_once(version, tasks), version):
                    with self.clock.phase("swap", version.id):
                        await self.gate.stage(version)
                with self.clock.phase("choose a version"):
                    runs = await self._answers(version, tasks, "choose a version")
                found[version.id] = success(runs)
            except SwapError as error:
                await self._reject(version, error)
        best = max(found.values(), default=0.0)
        chosen = [version for version in versions if found.get(version.id) == best]
        return (chosen or versions)[-1], found

    @asynccontextmanager
    async def choosing_early(
        self, find: Callable[[JobVersion], Awaitable[ModelVersion]]
    ) -> AsyncIterator[OnPublished]:
        """Try the versions that a job publishes within the block, in the background.

        Yields a function that takes those published so far; `find` registers one. They answer the
        choosing tasks one after the other, where every promoted version stays served. Where none
        can be tried, and at the end of the block, the others are left to `choose`, which asks for
        nothing again.
        """
        published = asyncio.Queue[JobVersion | None]()
        told = set[str]()

        def tell(versions: Sequence[JobVersion]) -> None:
            for one in versions:
                if one.checkpoint not in told:
                    told.add(one.checkpoint)
                    published.put_nowait(one)

        async def try_each() -> None:
            try:
                while (one := await published.get()) is not None:
                    await self._try_early(await find(one))
            except CrayError as error:
                log.info("the job's versions are tried when it has ended: %s", error)

        work = asyncio.create_task(try_each())
        try:
            yield tell
            if told:
                while not published.empty():
                    published.get_nowait()
                published.put_nowait(None)
                with self.clock.phase("choose a version"):
                    await work
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def _try_early(self, version: ModelVersion) -> None:
        """Let a version answer the choosing tasks. Raises Displaces, PoolBusy."""
        requests = _once(version, self._choosing_tasks())
        try:
            if not await self.rollouts.are_scored(requests, version):
                await self.gate.stage(version, force=False)
                await self.rollouts.run(requests, version, 0.0, lambda done: None, paired=True)
        except (Displaces, PoolBusy):
            raise
        except SwapError as error:
            await self._reject(version, error)

    async def _reject(self, version: ModelVersion, error: SwapError) -> None:
        self._failed.add(version.id)
        who, why = f"loop {self.rollouts.loop}", f"check failed: {error}"
        await self.platform.reject(version, who=who, reason=why)

    def _choosing_tasks(self) -> list[Task]:
        return choosing_tasks(self.tasks.split("holdout"), self.test)

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """Run a version on the tasks that measure it, once per version."""
        with self.clock.phase(f"evaluate {split}"):
            return await self._answers(version, self._measuring_tasks(split), f"evaluate {split}")

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Tell whether all runs that `evaluate` needs of a version are on record."""
        return await self.rollouts.are_scored(_once(version, self._measuring_tasks(split)), version)

    def _measuring_tasks(self, split: Split) -> list[Task]:
        """All tasks of a split but the hidden probes, which are only a guard."""
        tasks = self.tasks.split(split)
        return deciding_tasks(tasks, self.test) if split == "holdout" else list(tasks)

    async def _answers(
        self, version: ModelVersion, tasks: Sequence[Task], phase: str, before: int = 0
    ) -> list[Run]:
        requests = _once(version, tasks)

        def report(done: int) -> None:
            self.clock.report(phase, before + done, before + len(requests), version.id)

        return await self.rollouts.run(requests, version, 0.0, report, paired=True)

    async def _probes(self) -> list[Task]:
        """The hidden tasks of the next decision, which the decisions on record determine."""
        records = await self.platform.iterations(self.rollouts.loop)
        earlier = decisions_in([Iteration.model_validate(record) for record in records])
        return probe_tasks(self.tasks.split("holdout"), earlier, self.test)

    async def _incumbent(self, version: ModelVersion, guarding: list[Task]) -> dict[str, Run]:
        """The incumbent's runs on all tasks that the decision may need, by task."""
        tasks = [*deciding_tasks(self.tasks.split("holdout"), self.test), *guarding]
        return _by_task(await self._answers(version, tasks, "evaluate holdout"))

    async def _hazardous(self, version: ModelVersion) -> dict[str, Run]:
        """A version's answers to the hazards' prompts, by task; their judge alone rewards them."""
        assert self.hazards is not None
        asked = replace(self.rollouts, rewards=[self.hazards.reward], going={})
        requests = _once(version, self.hazards.tasks)
        return _by_task(await asked.run(requests, version, 0.0, lambda done: None, paired=True))

    async def _compare(
        self, candidate: ModelVersion, theirs: dict[str, Run], guarding: list[Task], number: int
    ) -> tuple[Decision, list[Run]]:
        """Decide whether a candidate is better; return its runs too, all of them if it is."""
        order = deciding_tasks(self.tasks.split("holdout"), self.test)
        random.Random(f"{self.rollouts.loop}/{self.seed}/{number}").shuffle(order)
        runs: list[Run] = []
        while True:
            batch = order[len(runs) : len(runs) + self.test.batch]
            runs += await self._answers(candidate, batch, "evaluate holdout", len(runs))
            pairs, gaps = _pairs(order, theirs, runs, self.test)
            look: Any = {"planned": plan(order, self.test), "exhausted": len(runs) == len(order)}
            decision = decide(pairs, self.test, gaps=gaps, **look)
            if decision.verdict == "promote" and guarding:
                ours = await self._answers(candidate, guarding, "evaluate hidden probes")
                hidden, more = _pairs(guarding, theirs, ours, self.test)
                decision = decide(pairs, self.test, hidden=hidden, gaps=gaps + more, **look)
            if decision.verdict != "continue":
                break
        await self._note(candidate, pairs, theirs, runs, len(order), number)
        if decision.verdict == "promote":  # the next candidate is compared with all of them
            rest = order[len(runs) :]
            runs += await self._answers(candidate, rest, "evaluate holdout", len(runs))
        return decision, runs

    async def _note(
        self,
        candidate: ModelVersion,
        pairs: Sequence[Pair],
        theirs: dict[str, Run],
        runs: Sequence[Run],
        planned: int,
        number: int,
    ) -> None:
        """Note the pairs of a decision in the journal, before its effect."""
        ours = _by_task(runs)
        incumbent = next((run.model for run in theirs.values()), "")
        note = PairedEvidence(
            incumbent=incumbent,
            candidate=candidate.id,
            test=self.test,
            planned=planned,
            pairs=paired(pairs, {task: (theirs[task].id, run.id) for task, run in ours.items()}),
        )
        loop, entry = self.rollouts.loop, entry_of(number)
        await self.platform.remember(loop, entry, note.model_dump(mode="json"))


async def version_named(platform: Platform, model: str) -> ModelVersion:
    """The version `name@N`, or the promoted one of a name. Raises NotFound, BadInput."""
    if "@" in model:
        return await platform.version(model)
    version = await platform.promoted(model)
    if version is None:
        raise BadInput(
            f"no version of model {model!r} is promoted; "
            f"start the platform with `cray-agents up --model DIR --name {model}`",
            param="model",
        )
    return version


def _once(version: ModelVersion, tasks: Sequence[Task]) -> list[RolloutRequest]:
    """A run for each task of one split."""
    return attempts_at(tasks, f"{version.id}/{tasks[0].split}", 1) if tasks else []


def _pairs(
    tasks: Sequence[Task], theirs: dict[str, Run], runs: Sequence[Run], test: PromotionTest
) -> tuple[list[Pair], Gaps]:
    """Pairs of the tasks that both versions were tried at."""
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
            reward = test.low if mine.reward is None else mine.reward
            tag = guard_tag(task, test)
            pair = Pair(task=task.id, incumbent=other.reward, candidate=reward, tag=tag)
            pairs.append(pair)
    return pairs, gaps


def _by_task(runs: Sequence[Run]) -> dict[str, Run]:
    return {run.task.id: run for run in runs if run.task}


def _let_down(run: Run) -> bool:
    """Tell whether a run says nothing of its version.

    A failed hook or environment does say something: the version set it off, and may not gain by
    that.
    """
    hooked = run.error is not None and run.error.type in SET_OFF
    return failed_by_infrastructure(run) and not hooked


# ---- Held-out inputs in a loop's journal: no training set may hold them
# Datasets must exclude held-out inputs, including tasks that have not been run yet. So the loop
# writes all held-out and test inputs to its journal first, as `held-<content hash>`. Writing them
# twice changes nothing, and they are never removed.
MAX_CHARACTERS = 2**22  # of an entry's texts, but for its last one: a body has its limit


async def hold_out(platform: Platform, loop: str, tasks: TaskSet) -> None:
    """Keep the inputs of all held-out and test tasks out of the loop's training sets."""
    for entry in _entries([*tasks.split("holdout"), *tasks.split("test")]):
        record = entry.model_dump(mode="json", exclude_defaults=True)
        await platform.remember(loop, f"{HELD_OUT_ENTRY}{digest(record)}", record)


def _entries(tasks: Sequence[Task]) -> Iterator[HeldOut]:
    inputs, worlds, size = list[tuple[str, str]](), list[tuple[str, str]](), 0
    for task in tasks:
        world = task.world is not None
        text, known = (task_key(task), worlds) if world else (asked_text(task.input), inputs)
        known.append((f"{task.split} task {task.id}", text))
        size += len(text)
        if size >= MAX_CHARACTERS:
            yield HeldOut(inputs=inputs, worlds=worlds)
            inputs, worlds, size = [], [], 0
    if inputs or worlds:
        yield HeldOut(inputs=inputs, worlds=worlds)
