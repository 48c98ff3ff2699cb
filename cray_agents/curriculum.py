"""Which tasks a generation works on: unseen ones first, more from where success is in between.

Groups are the values of one metadata key of the tasks (such as `level`). A group whose success rate
is p gets a share proportional to p(1 - p) plus a floor: nothing is learned from tasks that always
or never succeed, yet none is forgotten. Used by loop.py.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cray_agents.records import Run, Task

FLOOR = 0.05  # of a group's share, beside p(1 - p) <= 0.25


@dataclass(frozen=True)
class Curriculum:
    """How to draw tasks. `key=None`: all tasks are one group."""

    key: str | None = None
    floor: float = FLOOR

    def group(self, task: Task) -> Any:
        """The group a task belongs to."""
        return task.metadata.get(self.key) if self.key else None

    def shares(self, tasks: Iterable[Task], latest: Iterable[Run]) -> dict[Any, float]:
        """Each group's share of the next tasks, from the success of the latest runs; sums to 1."""
        outcomes: dict[Any, list[float]] = defaultdict(list)
        for run in latest:
            if run.task is not None and run.reward is not None:
                outcomes[self.group(run.task)].append(run.reward)
        weights = {}
        for group in dict.fromkeys(self.group(task) for task in tasks):
            seen = outcomes.get(group)
            success = min(1.0, max(0.0, sum(seen) / len(seen))) if seen else 0.5
            weights[group] = success * (1 - success) + self.floor
        total = sum(weights.values())
        return {group: weight / total for group, weight in weights.items()}

    def choose(
        self, tasks: Iterable[Task], latest: Iterable[Run], used: set[str], count: int, seed: str
    ) -> list[Task]:
        """`count` tasks (all, if there are fewer), the same for the same arguments."""
        generator = random.Random(seed)
        pools: dict[Any, list[Task]] = defaultdict(list)
        for task in tasks:
            pools[self.group(task)].append(task)
        chosen: list[Task] = []
        for group, share in self.shares(tasks, latest).items():
            pool = pools[group]
            generator.shuffle(pool)
            pool.sort(key=lambda task: task.id in used)  # stable: unseen first
            chosen += pool[: round(share * count)]
        taken = {task.id for task in chosen}
        rest = [task for pool in pools.values() for task in pool if task.id not in taken]
        generator.shuffle(rest)
        rest.sort(key=lambda task: task.id in used)
        chosen = (chosen + rest)[:count]
        generator.shuffle(chosen)
        return chosen
