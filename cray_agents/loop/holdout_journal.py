"""Held-out inputs in a loop's journal: no training set may hold them.

Datasets must exclude held-out inputs, including tasks that have not been run yet. So the loop
writes all held-out and test inputs to its journal first, as `held-<content hash>`. Writing them
twice changes nothing, and they are never removed. Called by loop.py and warmup.py before they build
a dataset; read by runtime/datasets/decontamination.py.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cray_agents.messages import asked_text
from cray_agents.records import HELD_OUT_ENTRY, HeldOut, Task, digest
from cray_agents.tasks.leakage import task_key

if TYPE_CHECKING:
    from cray_agents.platform.client import Platform
    from cray_agents.tasks.task_set import TaskSet

MAX_CHARACTERS = 2**22  # of an entry's texts, but for its last one: a body has its limit


async def hold_out(platform: "Platform", loop: str, tasks: "TaskSet") -> None:
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
