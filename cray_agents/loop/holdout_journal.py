"""The inputs that a loop keeps to judge by, told to the platform before anything is trained on.

What was run is known from the runs; hidden probes and test tasks may not have been run yet, and a
warm-up trains before anything is judged. So all of them are in the loop's journal, in entries
`held-<hash>` that are named by what they hold: written again they are the same, and what was held
once stays held. Called by loop.py and warmup.py before they build a dataset; read by
runtime/datasets/decontamination.py.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from cray_agents.records import Record, Task, digest
from cray_agents.tasks.leakage import task_key

if TYPE_CHECKING:
    from cray_agents.platform.client import Platform
    from cray_agents.tasks.task_set import TaskSet

ENTRY = "held-"
MOST = 2**22  # characters of an entry's texts, but for its last one: a body has its limit


class HeldOut(Record):
    """An entry: what each input is of, such as `holdout task 3f2a`, and its text.

    Of tasks with an identity it is the key (splits.task_key) in `worlds`, in the place of the text.
    """

    inputs: list[tuple[str, str]]
    worlds: list[tuple[str, str]] = Field(default_factory=list)


async def hold_out(platform: "Platform", loop: str, tasks: "TaskSet") -> None:
    """Have the inputs of all held-out and test tasks kept out of the loop's training sets."""
    for entry in _entries([*tasks.split("holdout"), *tasks.split("test")]):
        record = entry.model_dump(mode="json", exclude_defaults=True)
        await platform.remember(loop, f"{ENTRY}{digest(record)}", record)


def _entries(tasks: Sequence[Task]) -> Iterator[HeldOut]:
    inputs, worlds, size = list[tuple[str, str]](), list[tuple[str, str]](), 0
    for task in tasks:
        text, known = (task.input, inputs) if task.world is None else (task_key(task), worlds)
        known.append((f"{task.split} task {task.id}", text))
        size += len(text)
        if size >= MOST:
            yield HeldOut(inputs=inputs, worlds=worlds)
            inputs, worlds, size = [], [], 0
    if inputs or worlds:
        yield HeldOut(inputs=inputs, worlds=worlds)
