"""Which tasks a generation works on: unseen ones first, more from where success is in between.

Groups are the values of one metadata key of the tasks (such as `level`). A group whose success rate
is p gets a share proportional to p(1 - p) + hard(1 - p) + floor: most is learned where the outcome
is open, what always fails is tried on, and nothing is forgotten. Used by loop.py.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.records import Run, Task


@dataclass(frozen=True)
class Curriculum:
    """How to draw tasks. `key=None`: all tasks are one group."""

    key: str | None = None
    hard: float = 0.1
    floor: float = 0.02

    def group(self, task: Task) -> Any:
        """The group a task belongs to."""
        return task.metadata.get(self.key) if self.key else None

    def success(self, generations: Iterable[Iterable[Run]]) -> dict[Any, float]:
        """Each group's success in the newest of the generations (oldest first) that tried it."""
        found: dict[Any, float] = {}
        for runs in generations:
            outcomes = defaultdict(list)
            for run in runs:
                if run.task is not None and run.reward is not None:
                    outcomes[self.group(run.task)].append(min(1.0, max(0.0, run.reward)))
            found |= {group: sum(seen) / len(seen) for group, seen in outcomes.items()}
        return found

    def shares(self, groups: Iterable[Any], success: dict[Any, float]) -> dict[Any, float]:
        """Each group's share of the next tasks; sums to 1. All alike while nothing is known."""
        weights = {}
        for group in groups:
            p = success.get(group, 0.5)
            weights[group] = p * (1 - p) + self.hard * (1 - p) + self.floor
        total = sum(weights.values())
        return {group: weight / total for group, weight in weights.items()}

    def choose(
        self, tasks: Iterable[Task], generations: Sequence[Sequence[Run]], count: int, seed: str
    ) -> list[Task]:
        """`count` tasks (all, if there are fewer), the same for the same arguments.

        `generations` are the runs so far, oldest first. A group that has too few tasks gives all
        it has, and the others fill up.
        """
        generator = random.Random(seed)
        used = {run.task.id for runs in generations for run in runs if run.task}
        pools: dict[Any, list[Task]] = defaultdict(list)
        for task in tasks:
            pools[self.group(task)].append(task)
        for pool in pools.values():
            generator.shuffle(pool)
            pool.sort(key=lambda task: task.id in used)  # stable: unseen first
        shares = self.shares(pools, self.success(generations))
        chosen = [
            task for group, pool in pools.items() for task in pool[: round(shares[group] * count)]
        ]
        taken = {task.id for task in chosen}
        rest = [task for pool in pools.values() for task in pool if task.id not in taken]
        generator.shuffle(rest)
        rest.sort(key=lambda task: task.id in used)
        generator.shuffle(chosen)  # before it is cut: no group stands last
        return (chosen + rest)[:count]
