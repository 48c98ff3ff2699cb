"""Curriculum: the draw of an iteration's tasks, unseen ones first, then where success is open.

Groups are the values of one metadata key of the tasks (such as `level`). A group whose success rate
is p gets a share proportional to p(1 - p) + hard(1 - p) + floor. Most is learned where the outcome
is open; groups that always fail are still tried; no group is forgotten. Within a group, tasks that
were tried before are drawn by the same weight of their own success. Called by collector.py.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.records import Task

PRIOR = 2.0  # attempts that a group's success counts for in a task's


class AttemptOutcome(NamedTuple):
    """The reward of an attempt at a task."""

    run: str
    task: str
    reward: float


@dataclass(frozen=True)
class Curriculum:
    """A rule for drawing tasks. `key=None`: all tasks are one group.

    `revisit`: the share of a draw that goes to tasks tried before, while there are unseen ones. A
    reward of `low` is no success, one of `high` full success: see `over`.
    """

    key: str | None = None
    hard: float = 0.1
    floor: float = 0.02
    revisit: float = 0.0
    low: float = field(default=0.0, init=False)
    high: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        for name, value, fits, range_ in (
            ("hard", self.hard, self.hard >= 0, "from 0"),
            ("floor", self.floor, self.floor > 0, "above 0, for no group is forgotten"),
            ("revisit", self.revisit, 0 <= self.revisit <= 1, "from 0 to 1"),
        ):
            if not (fits and math.isfinite(value)):
                message = f"curriculum: {name}={value!r}: give a number {range_}"
                raise BadInput(message, param="curriculum")

    def over(self, low: float, high: float) -> "Curriculum":
        """The same curriculum for rewards in this range."""
        copy = replace(self)
        object.__setattr__(copy, "low", low)
        object.__setattr__(copy, "high", high)
        return copy

    def group(self, task: Task) -> Any:
        """The group a task belongs to."""
        return task.metadata.get(self.key) if self.key else None

    def weight(self, p: float) -> float:
        """The weight of a task or group whose success is p: how much is to be learned there."""
        return p * (1 - p) + self.hard * (1 - p) + self.floor

    def success(
        self, groups: dict[str, Any], iterations: Iterable[Iterable[AttemptOutcome]]
    ) -> dict[Any, float]:
        """Each group's success in the newest of the iterations (oldest first) that tried it.

        `groups`: the group of each task, by the task's id.
        """
        successes: dict[Any, float] = {}
        for outcomes in iterations:
            seen = defaultdict(list)
            for outcome in outcomes:
                if outcome.task in groups:
                    seen[groups[outcome.task]].append(self._success(outcome.reward))
            successes |= {group: sum(values) / len(values) for group, values in seen.items()}
        return successes

    def shares(self, groups: Iterable[Any], success: dict[Any, float]) -> dict[Any, float]:
        """Each group's share of the next tasks; the sum is 1. Unknown groups count as half won."""
        weights = {group: self.weight(success.get(group, 0.5)) for group in groups}
        total = sum(weights.values())
        return {group: weight / total for group, weight in weights.items()}

    def choose(
        self,
        tasks: Iterable[Task],
        iterations: Sequence[Sequence[AttemptOutcome]],
        count: int,
        seed: str,
        taken: Set[str] = frozenset(),
    ) -> list[Task]:
        """Draw `count` tasks (all, if there are fewer), the same for the same arguments.

        iterations: the outcomes so far, oldest first.
        taken: ids of tasks that count as tried, though their outcomes are not known yet.

        A group with too few tasks gives all it has, and the other groups fill up.
        """
        generator = random.Random(seed)
        pools: dict[Any, list[Task]] = defaultdict(list)
        for task in tasks:
            pools[self.group(task)].append(task)
        groups = {task.id: group for group, pool in pools.items() for task in pool}
        success = self.success(groups, iterations)
        own = self._attempts(iterations)
        tried = own.keys() | taken
        for group, pool in pools.items():
            self._order(pool, own, tried, success.get(group, 0.5), generator)
        shares = self.shares(pools, success)
        chosen = [
            task
            for group, pool in pools.items()
            for task in self._first(pool, tried, round(shares[group] * count))
        ]
        names = {task.id for task in chosen}
        rest = [task for pool in pools.values() for task in pool if task.id not in names]
        generator.shuffle(rest)
        rest.sort(key=lambda task: task.id in tried)
        generator.shuffle(chosen)  # before it is cut: no group stands last
        return (chosen + rest)[:count]

    def _order(
        self,
        pool: list[Task],
        own: dict[str, list[float]],
        tried: Set[str],
        prior: float,
        generator: random.Random,
    ) -> None:
        """Sort a pool: unseen tasks first, in any order, then tried ones as if drawn by weight.

        The order by u**(1 / weight), u uniform, is that of draws without replacement (Efraimidis
        and Spirakis, 2006).
        """
        generator.shuffle(pool)
        places = {}
        for task in pool:
            seen = own.get(task.id, [])
            p = (sum(seen) + PRIOR * prior) / (len(seen) + PRIOR)
            places[task.id] = -(generator.random() ** (1 / self.weight(p)))
        pool.sort(key=lambda task: (task.id in tried, places[task.id] * (task.id in tried)))

    def _first(self, pool: list[Task], tried: Set[str], count: int) -> list[Task]:
        """The first tasks of a pool, with the share that is to be revisited."""
        again = [task for task in pool if task.id in tried][: round(self.revisit * count)]
        unseen = [task for task in pool if task.id not in tried][: count - len(again)]
        names = {task.id for task in (*again, *unseen)}
        more = [task for task in pool if task.id not in names][: count - len(names)]
        return [*unseen, *again, *more]

    def _attempts(self, iterations: Iterable[Iterable[AttemptOutcome]]) -> dict[str, list[float]]:
        """The success of each attempt at a task in the newest iteration that tried it."""
        successes: dict[str, list[float]] = {}
        for outcomes in iterations:
            seen = defaultdict(list)
            for outcome in outcomes:
                seen[outcome.task].append(self._success(outcome.reward))
            successes |= seen
        return successes

    def _success(self, reward: float) -> float:
        return min(1.0, max(0.0, (reward - self.low) / (self.high - self.low)))
