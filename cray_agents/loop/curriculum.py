"""Which tasks a generation works on: unseen ones first, more from where success is in between.

Groups are the values of one metadata key of the tasks (such as `level`). A group whose success rate
is p gets a share proportional to p(1 - p) + hard(1 - p) + floor: most is learned where the outcome
is open, what always fails is tried on, and nothing is forgotten. Within a group the tasks that were
tried before are drawn by the same weight, of their own success. Called by collecting.py.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cray_agents.records import Task

PRIOR = 2.0  # attempts that a group's success counts for in a task's


class AttemptOutcome(NamedTuple):
    """What came of an attempt at a task."""

    run: str
    task: str
    reward: float


@dataclass(frozen=True)
class Curriculum:
    """How to draw tasks. `key=None`: all tasks are one group.

    `revisit`: the share of a draw that goes to tasks tried before while there are unseen ones. A
    reward of `low` is no success and one of `high` a whole one: see `over`.
    """

    key: str | None = None
    hard: float = 0.1
    floor: float = 0.02
    revisit: float = 0.0
    low: float = field(default=0.0, init=False)
    high: float = field(default=1.0, init=False)

    def over(self, low: float, high: float) -> "Curriculum":
        """The same for rewards in this range: a loop gives that of its promotion test."""
        copy = replace(self)
        object.__setattr__(copy, "low", low)
        object.__setattr__(copy, "high", high)
        return copy

    def group(self, task: Task) -> Any:
        """The group a task belongs to."""
        return task.metadata.get(self.key) if self.key else None

    def weight(self, p: float) -> float:
        """How much is to be learned where success is p."""
        return p * (1 - p) + self.hard * (1 - p) + self.floor

    def success(
        self, groups: dict[str, Any], generations: Iterable[Iterable[AttemptOutcome]]
    ) -> dict[Any, float]:
        """Each group's success in the newest of the generations (oldest first) that tried it.

        `groups`: of each task, by its id.
        """
        found: dict[Any, float] = {}
        for outcomes in generations:
            seen = defaultdict(list)
            for outcome in outcomes:
                if outcome.task in groups:
                    seen[groups[outcome.task]].append(self._success(outcome.reward))
            found |= {group: sum(values) / len(values) for group, values in seen.items()}
        return found

    def shares(self, groups: Iterable[Any], success: dict[Any, float]) -> dict[Any, float]:
        """Each group's share of the next tasks; sums to 1. All alike while nothing is known."""
        weights = {group: self.weight(success.get(group, 0.5)) for group in groups}
        total = sum(weights.values())
        return {group: weight / total for group, weight in weights.items()}

    def choose(
        self,
        tasks: Iterable[Task],
        generations: Sequence[Sequence[AttemptOutcome]],
        count: int,
        seed: str,
        taken: Set[str] = frozenset(),
    ) -> list[Task]:
        """`count` tasks (all, if there are fewer), the same for the same arguments.

        `generations` are the outcomes so far, oldest first; tasks whose ids are `taken` count as
        tried, though nothing is known of them yet. A group that has too few tasks gives all it has,
        and the others fill up.
        """
        generator = random.Random(seed)
        pools: dict[Any, list[Task]] = defaultdict(list)
        for task in tasks:
            pools[self.group(task)].append(task)
        groups = {task.id: group for group, pool in pools.items() for task in pool}
        success = self.success(groups, generations)
        own = self._attempts(generations)
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
        """Unseen ones first, in any order; then those tried, as if drawn by weight.

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
        """The first of a pool, with the share of those tried before that is to be revisited."""
        again = [task for task in pool if task.id in tried][: round(self.revisit * count)]
        unseen = [task for task in pool if task.id not in tried][: count - len(again)]
        names = {task.id for task in (*again, *unseen)}
        more = [task for task in pool if task.id not in names][: count - len(names)]
        return [*unseen, *again, *more]

    def _attempts(self, generations: Iterable[Iterable[AttemptOutcome]]) -> dict[str, list[float]]:
        """The success of each attempt at a task in the newest generation that tried it."""
        found: dict[str, list[float]] = {}
        for outcomes in generations:
            seen = defaultdict(list)
            for outcome in outcomes:
                seen[outcome.task].append(self._success(outcome.reward))
            found |= seen
        return found

    def _success(self, reward: float) -> float:
        return min(1.0, max(0.0, (reward - self.low) / (self.high - self.low)))
