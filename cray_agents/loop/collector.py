"""A generation's training runs: which tasks are drawn, in which rounds, and what came of them.

Each round's draw is written into the loop's journal before its first run begins, so that a
restarted loop goes on with the same tasks, whatever has come in since. Where a method learns from
how the attempts at a task differ, tasks whose attempts were all rewarded alike are replaced by new
ones, round by round, within a budget. When the rounds are over, that is written down too: a
training set may be made of the runs then, and those that the infrastructure failed stay as they
are. Called by loop.py; the runs are rollouts.py's, the choice is curriculum.py's.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.generation import Generation, onward_of
from cray_agents.loop.curriculum import AttemptOutcome, Curriculum
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import RolloutRequest, Rollouts, accepted, shuffled
from cray_agents.loop.stages import COMPARING, Planned, stage_of
from cray_agents.records import ModelVersion, Run, Task
from cray_agents.tasks.task_set import TaskSet

EQUAL = 1e-9  # rewards this near to each other are equal
ROUNDS = 20  # at most


@dataclass(frozen=True)
class Collected:
    """The runs of a generation that had ended when it closed, and how its rounds went."""

    runs: list[Run]
    zero_variance_groups: int = 0
    resampled: int = 0
    carried: int = 0
    tokens: int = 0
    sampled_from: str | None = None

    def told(self, least: float | None) -> dict[str, Any]:
        """As the fields of Generation; `least`: the reward from which on a run is good."""
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
    """Collects the runs of one loop's generations, each in its time.

    `resample`: of a generation's runs, the share that may be added in the place of groups without
    variance. `shuffle`: the rewards that decide are permuted among the runs of a round, with this
    seed; None: they are the true ones.
    """

    rollouts: Rollouts
    clock: PhaseTimer
    tasks: TaskSet
    stages: Sequence[Planned]
    curriculum: Curriculum
    temperature: float
    seed: int
    resample: float = 0.0
    staleness: int = 0
    close_at: float = 1.0
    shuffle: str | None = None
    _going: dict[int, asyncio.Task[Collected]] = field(default_factory=dict)
    _draws: dict[tuple[int, int], list[Task] | None] = field(default_factory=dict)
    _known: dict[int, list[AttemptOutcome]] = field(default_factory=dict)

    async def next(self, done: Sequence[Generation], last: int) -> Collected:
        """The runs of the generation after those `done`.

        What is decided now is enough for the `staleness` generations after it, too: their runs
        begin behind its own, up to generation `last`, and go on when this returns.
        """
        number = len(done)
        for ahead in range(number, min(number + self.staleness, last) + 1):
            if ahead not in self._going:
                await self._draw_first(ahead, done)  # in their order: each looks at those before
                work = self._collect(ahead, tuple(done))
                self._going[ahead] = asyncio.create_task(work)
        try:
            collected = await self._going[number]
        finally:
            self._going.pop(number).cancel()
        if self.close_at == 1 or number == 1:
            return collected
        came = len(await self._rows(number - 1)) - done[-1].runs
        return replace(collected, carried=max(0, came))

    async def stop(self) -> None:
        """Cancel what goes on."""
        going = list(self._going.values())
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def _collect(self, number: int, done: Sequence[Generation]) -> Collected:
        """Run the agent on a generation's tasks; what is stored is not run again."""
        stage, known = stage_of(self.stages, number), self._decided(number, done)
        if not stage.runs:
            return Collected([])
        version = await self.rollouts.platform.version(onward_of(known))
        if self.close_at < 1 and 1 < number == len(done):
            await self._carry_on(number - 1, done)
        runs, alike, resampled = await self._rounds(number, stage, version, len(known) - 1)
        await self.rollouts.platform.remember(self.rollouts.loop, f"collected-{number}", {})
        tokens = sum(row["sampled_tokens"] for row in await self._rows(number))
        return Collected(runs, alike, resampled, 0, tokens, version.id)

    async def _draw_first(self, number: int, done: Sequence[Generation]) -> None:
        stage, known = stage_of(self.stages, number), self._decided(number, done)
        if stage.runs:
            await self._drawn(number, 0, stage.tasks_per_generation, len(known) - 1)

    def _decided(self, number: int, done: Sequence[Generation]) -> Sequence[Generation]:
        """What must be decided before a generation's runs may begin: the bound is exact."""
        return done[: max(1, number - self.staleness)]

    async def _rounds(
        self, number: int, stage: Planned, version: ModelVersion, settled: int
    ) -> tuple[list[Run], int, int]:
        """The runs, how many groups had no variance, and how many tasks were drawn for them.

        What is drawn depends on the outcomes of the generations up to `settled`, and on which tasks
        the others drew.
        """
        runs: list[Run] = []
        alike = resampled = 0
        count = stage.tasks_per_generation
        left = int(self.resample * count * stage.attempts)
        loop = self.rollouts.loop
        over = await self.rollouts.platform.recall(loop, f"collected-{number}") is not None
        for turn in range(ROUNDS):
            tasks = await self._drawn(number, turn, count, settled)
            resampled += len(tasks) if turn else 0
            wanted = _wanted(tasks, number, turn, stage.attempts)
            report = self._reporter(number, version, len(runs), len(wanted))
            new = await self.rollouts.run(
                wanted,
                version,
                self.temperature,
                report,
                close_at=self.close_at,
                settled=over,
            )
            runs += new
            if stage.method not in COMPARING:
                break
            found = self._alike(number, turn, new, stage.attempts)
            alike += found
            count = min(found, left // stage.attempts)
            if not count or not tasks:
                break
            left -= count * stage.attempts
        return runs, alike, resampled

    def _reporter(
        self, number: int, version: ModelVersion, there: int, more: int
    ) -> Callable[[int], None]:
        def report(done: int) -> None:
            if number == self.clock.generation:  # what goes on for later ones is not shown
                self.clock.report("rollouts", there + done, there + more, version.id)

        return report

    async def _carry_on(self, number: int, done: Sequence[Generation]) -> None:
        """Let a closed generation's stragglers go on, also where the loop was killed meanwhile."""
        stage = stage_of(self.stages, number)
        version = await self.rollouts.platform.version(onward_of(self._decided(number, done)))
        known = {row["id"] for row in await self._rows(number)}
        for turn in range(ROUNDS):
            tasks = await self._on_record(number, turn)
            if tasks is None:
                return
            wanted = _wanted(tasks, number, turn, stage.attempts)
            self.rollouts.resume(wanted, version, self.temperature, known)

    async def _rows(self, number: int) -> list[dict[str, Any]]:
        """What the index knows of a generation's runs."""
        rows = self.rollouts.platform.summaries(
            loop=self.rollouts.loop, generation=number, split="train"
        )
        return [row async for row in rows]

    async def outcomes(self, number: int) -> list[AttemptOutcome]:
        """What came of a generation's runs so far, with the rewards that decide."""
        if number not in self._known:
            found = [
                AttemptOutcome(row["id"], row["task"], row["reward"])
                for row in await self._rows(number)
                if row["reward"] is not None and not row["infrastructure"]
            ]
            self._known[number] = await self._decisive(number, found)
        return self._known[number]

    async def _decisive(self, number: int, outcomes: list[AttemptOutcome]) -> list[AttemptOutcome]:
        """The outcomes with the rewards that decide: round by round."""
        if self.shuffle is None:
            return outcomes
        found: list[AttemptOutcome] = []
        for turn in range(ROUNDS):
            tasks = await self._on_record(number, turn)
            if tasks is None:
                break
            ids = {task.id for task in tasks}
            found += self._permuted(number, turn, [o for o in outcomes if o.task in ids])
        return found

    def _permuted(
        self, number: int, turn: int, outcomes: Sequence[AttemptOutcome]
    ) -> list[AttemptOutcome]:
        if self.shuffle is None:
            return list(outcomes)
        seed = f"{self.shuffle}/{number}" + (f"/{turn}" if turn else "")
        rewards = shuffled([(o.run, o.reward) for o in outcomes], seed)
        return [outcome._replace(reward=rewards[outcome.run]) for outcome in outcomes]

    def _alike(self, number: int, turn: int, runs: Sequence[Run], attempts: int) -> int:
        """How many tasks have all their attempts, and the same reward for each."""
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

    async def _drawn(self, number: int, turn: int, count: int, settled: int) -> list[Task]:
        """The tasks of a round: those on record, or drawn now and put there."""
        tasks = await self._on_record(number, turn)
        if tasks is not None:
            return tasks
        earlier = [await self.outcomes(n) for n in range(1, settled + 1)]
        taken = set[str]()
        for other in range(settled + 1, number):  # what is still going on there is not known yet
            taken |= {task.id for task in await self._on_record(other, 0) or ()}
        here = set[str]()
        for before in range(turn):
            here |= {task.id for task in await self._on_record(number, before) or ()}
        chosen = self.curriculum.choose(
            [task for task in self.tasks.split("train") if task.id not in here],
            earlier,
            count,
            f"{self.rollouts.loop}/{self.seed}/{number}" + (f"/{turn}" if turn else ""),
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
            found = await self.rollouts.platform.recall(self.rollouts.loop, entry)
            by_id = {task.id: task for task in self.tasks.split("train")}
            if found and (gone := [name for name in found["tasks"] if name not in by_id]):
                raise BadInput(
                    f"loop {self.rollouts.loop} drew task {gone[0]!r} for generation {number}, and "
                    "the task set has it no more: go on with the tasks it began with",
                    param="tasks",
                )
            tasks = [by_id[name] for name in found["tasks"]] if found else None
            self._draws[number, turn] = tasks
        return self._draws[number, turn]


def _entry(number: int, turn: int) -> str:
    return f"draw-{number}-{turn}"


def _wanted(tasks: Sequence[Task], number: int, turn: int, attempts: int) -> list[RolloutRequest]:
    scope = f"g{number}" + (f"/r{turn}" if turn else "")
    return [
        RolloutRequest(task, scope, attempt, number)
        for task in tasks
        for attempt in range(attempts)
    ]
