"""Collector of an iteration's training runs: draws tasks in rounds, and gathers their outcomes.

Each round's draw is written into the loop's journal before its first run begins. So a restarted
loop goes on with the same tasks, whatever has come in since. Some methods learn from how the
attempts at a task differ. For them, tasks whose attempts were all rewarded alike are replaced by
new ones, round by round, within a budget. The end of the rounds is written down too: from then on
a training set may be made of the runs, and runs that the infrastructure failed stay as they are.
Called by loop.py. Read next: rollouts.py (the runs), curriculum.py (the choice).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration, base_version
from cray_agents.loop.curriculum import AttemptOutcome, Curriculum
from cray_agents.loop.methods import Method, Scheduled, scheduled_at
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import RolloutRequest, Rollouts, accepted, attempts_at, shuffled
from cray_agents.loop.settings import Sampling
from cray_agents.records import ModelVersion, Run, Task
from cray_agents.tasks.task_set import TaskSet

EQUAL = 1e-9  # rewards this near to each other are equal
ROUNDS = 20  # at most


@dataclass(frozen=True)
class Collected:
    """The runs of an iteration that had ended when it closed, and how its rounds went."""

    runs: list[Run]
    zero_variance_groups: int = 0
    resampled: int = 0
    carried: int = 0
    tokens: int = 0
    sampled_from: str | None = None

    def fields(self, least: float | None) -> dict[str, Any]:
        """As fields of Iteration. `least`: the least reward of a good run."""
        return {
            "runs": len(self.runs),
            "accepted_runs": accepted(self.runs, 1.0 if least is None else least),
            "failed_runs": sum(run.reward is None for run in self.runs),
            "zero_variance_groups": self.zero_variance_groups,
            "resampled": self.resampled,
            "carried": self.carried,
            "tokens": self.tokens,
            "sampled_from": self.sampled_from,
        }


@dataclass
class Collector:
    """Collector of the runs of one loop's iterations.

    shuffle: seed of a permutation of the rewards among the runs of a round; None: true rewards.
    """

    rollouts: Rollouts
    clock: PhaseTimer
    tasks: TaskSet
    schedule: Sequence[Scheduled]
    curriculum: Curriculum
    sampling: Sampling
    shuffle: str | None = None
    _going: dict[int, asyncio.Task[Collected]] = field(default_factory=dict)
    _draws: dict[tuple[int, int], list[Task] | None] = field(default_factory=dict)
    _known: dict[int, list[AttemptOutcome]] = field(default_factory=dict)

    async def begin(self, done: list[Iteration]) -> list[Iteration]:
        """The iterations to go on from: all of them."""
        return done

    async def givers(self, number: int) -> list[str] | None:
        """The givers whose rewards count in an iteration's training set; None: all."""
        return None

    async def next(self, done: Sequence[Iteration], last: int) -> Collected:
        """Collect the runs of the iteration after the `done` ones.

        The decisions so far are enough for the next `max_staleness` iterations too. Their runs
        begin behind this iteration's, up to iteration `last`, and go on when this returns.
        """
        number, end = len(done), self.schedule[-1].last
        last = last if end is None else min(last, end)
        for ahead in range(number, min(number + self.sampling.max_staleness, last) + 1):
            if ahead not in self._going:
                await self._draw_first(ahead, done)  # in their order: each looks at those before
                work = self._collect(ahead, tuple(done))
                self._going[ahead] = asyncio.create_task(work)
        try:
            collected = await self._going[number]
        finally:
            self._going.pop(number).cancel()
        if self.sampling.straggler_quantile == 1 or number == 1:
            return collected
        came = len(await self._rows(number - 1)) - done[-1].runs
        return replace(collected, carried=max(0, came))

    async def stop(self) -> None:
        """Cancel the collections that go on."""
        going = list(self._going.values())
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def _collect(self, number: int, done: Sequence[Iteration]) -> Collected:
        """Run the agent on an iteration's tasks; stored runs are not run again."""
        method = scheduled_at(self.schedule, number).method
        known = self._decided(number, done)
        if not method.runs:
            return Collected([])
        version = await self.rollouts.platform.version(base_version(known))
        if self.sampling.straggler_quantile < 1 and 1 < number == len(done):
            await self._carry_on(number - 1, done)
        runs, alike, resampled = await self._rounds(number, method, version, len(known) - 1)
        await self.rollouts.platform.remember(self.rollouts.loop, f"collected-{number}", {})
        tokens = sum(row["sampled_tokens"] for row in await self._rows(number))
        return Collected(runs, alike, resampled, 0, tokens, version.id)

    async def _draw_first(self, number: int, done: Sequence[Iteration]) -> None:
        method = scheduled_at(self.schedule, number).method
        known = self._decided(number, done)
        if method.runs:
            await self._draw(number, 0, method.tasks_per_iteration, len(known) - 1)

    def _decided(self, number: int, done: Sequence[Iteration]) -> Sequence[Iteration]:
        """The iterations that must be decided before this one's runs may begin."""
        return done[: max(1, number - self.sampling.max_staleness)]

    async def _rounds(
        self, number: int, method: Method, version: ModelVersion, decided: int
    ) -> tuple[list[Run], int, int]:
        """Return the runs, the number of groups without variance, and the tasks drawn for them.

        The draw depends on the outcomes of the iterations up to `decided`, and on the tasks of
        later iterations.
        """
        runs: list[Run] = []
        alike = resampled = 0
        count, size = method.tasks_per_iteration, method.group_size
        left = int(self.sampling.dynamic_sampling * count * size)
        loop = self.rollouts.loop
        over = await self.rollouts.platform.recall(loop, f"collected-{number}") is not None
        for turn in range(ROUNDS):
            tasks = await self._draw(number, turn, count, decided)
            resampled += len(tasks) if turn else 0
            requests = _requests(tasks, number, turn, size)
            report = self._reporter(number, version, len(runs), len(requests))
            new = await self.rollouts.run(
                requests,
                version,
                self.sampling.temperature,
                report,
                close_at=self.sampling.straggler_quantile,
                final=over,
            )
            runs += new
            if not method.compares:
                break
            equal = self._count_alike(number, turn, new, size)
            alike += equal
            count = min(equal, left // size)
            if not count or not tasks:
                break
            left -= count * size
        return runs, alike, resampled

    def _reporter(
        self, number: int, version: ModelVersion, before: int, more: int
    ) -> Callable[[int], None]:
        def report(done: int) -> None:
            if number == self.clock.iteration:  # what goes on for later ones is not shown
                self.clock.report("rollouts", before + done, before + more, version.id)

        return report

    async def _carry_on(self, number: int, done: Sequence[Iteration]) -> None:
        """Let a closed iteration's stragglers go on, also after the loop was killed."""
        method = scheduled_at(self.schedule, number).method
        version = await self.rollouts.platform.version(base_version(self._decided(number, done)))
        known = {row["id"] for row in await self._rows(number)}
        for turn in range(ROUNDS):
            tasks = await self._on_record(number, turn)
            if tasks is None:
                return
            requests = _requests(tasks, number, turn, method.group_size)
            self.rollouts.resume(requests, version, self.sampling.temperature, known)

    async def _rows(self, number: int) -> list[dict[str, Any]]:
        """The index's rows of an iteration's runs."""
        rows = self.rollouts.platform.summaries(
            loop=self.rollouts.loop, iteration=number, split="train"
        )
        return [row async for row in rows]

    async def outcomes(self, number: int) -> list[AttemptOutcome]:
        """The outcomes of an iteration's runs so far, with the rewards that decide."""
        if number not in self._known:
            scored = [
                AttemptOutcome(row["id"], row["task"], row["reward"])
                for row in await self._rows(number)
                if row["reward"] is not None and not row["infrastructure"]
            ]
            self._known[number] = await self._decisive(number, scored)
        return self._known[number]

    async def _decisive(self, number: int, outcomes: list[AttemptOutcome]) -> list[AttemptOutcome]:
        """The outcomes with their rewards permuted within each round, if the loop is a control."""
        if self.shuffle is None:
            return outcomes
        permuted: list[AttemptOutcome] = []
        for turn in range(ROUNDS):
            tasks = await self._on_record(number, turn)
            if tasks is None:
                break
            ids = {task.id for task in tasks}
            permuted += self._permuted(number, turn, [o for o in outcomes if o.task in ids])
        return permuted

    def _permuted(
        self, number: int, turn: int, outcomes: Sequence[AttemptOutcome]
    ) -> list[AttemptOutcome]:
        if self.shuffle is None:
            return list(outcomes)
        seed = f"{self.shuffle}/{number}" + (f"/{turn}" if turn else "")
        rewards = shuffled([(o.run, o.reward) for o in outcomes], seed)
        return [outcome._replace(reward=rewards[outcome.run]) for outcome in outcomes]

    def _count_alike(self, number: int, turn: int, runs: Sequence[Run], attempts: int) -> int:
        """Count the tasks that have all their attempts, and the same reward for each."""
        groups: dict[str, list[float]] = defaultdict(list)
        scored = [
            AttemptOutcome(run.id, run.task.id, run.reward)
            for run in runs
            if run.task is not None and run.reward is not None
        ]
        for outcome in self._permuted(number, turn, scored):
            groups[outcome.task].append(outcome.reward)
        whole = [rewards for rewards in groups.values() if len(rewards) == attempts]
        return sum(max(rewards) - min(rewards) <= EQUAL for rewards in whole)

    async def _draw(self, number: int, turn: int, count: int, decided: int) -> list[Task]:
        """The tasks of a round: those on record, or drawn now and put there."""
        tasks = await self._on_record(number, turn)
        if tasks is not None:
            return tasks
        earlier = [await self.outcomes(n) for n in range(1, decided + 1)]
        taken = set[str]()
        for other in range(decided + 1, number):  # their outcomes are not known yet
            taken |= {task.id for task in await self._on_record(other, 0) or ()}
        earlier_rounds = set[str]()
        for before in range(turn):
            earlier_rounds |= {task.id for task in await self._on_record(number, before) or ()}
        chosen = self.curriculum.choose(
            [task for task in self.tasks.split("train") if task.id not in earlier_rounds],
            earlier,
            count,
            f"{self.rollouts.loop}/{self.sampling.seed}/{number}" + (f"/{turn}" if turn else ""),
            taken,
        )
        record = {"tasks": [task.id for task in chosen]}
        await self.rollouts.platform.remember(self.rollouts.loop, _entry(number, turn), record)
        self._draws.pop((number, turn), None)
        return await self._on_record(number, turn) or []

    async def _on_record(self, number: int, turn: int) -> list[Task] | None:
        """The tasks that were drawn for a round, if it has begun."""
        if self._draws.get((number, turn)) is None:
            entry = _entry(number, turn)
            draw = await self.rollouts.platform.recall(self.rollouts.loop, entry)
            by_id = {task.id: task for task in self.tasks.split("train")}
            if draw and (gone := [name for name in draw["tasks"] if name not in by_id]):
                raise BadInput(
                    f"loop {self.rollouts.loop} drew task {gone[0]!r} for iteration {number}, and "
                    "the task set has it no more: go on with the tasks it began with",
                    param="tasks",
                )
            tasks = [by_id[name] for name in draw["tasks"]] if draw else None
            self._draws[number, turn] = tasks
        return self._draws[number, turn]


def _entry(number: int, turn: int) -> str:
    return f"draw-{number}-{turn}"


def _requests(tasks: Sequence[Task], number: int, turn: int, attempts: int) -> list[RolloutRequest]:
    scope = f"g{number}" + (f"/r{turn}" if turn else "")
    return attempts_at(tasks, scope, attempts, number)
