"""The inputs that a loop keeps to judge by, told to the platform before anything is trained on.

What was run is known from the runs; hidden probes and test tasks may not have been run yet, and a
warm-up trains before anything is judged. So all of them are in the loop's journal, in entries
`held-<hash>` that are named by what they hold: written again they are the same, and what was held
once stays held. Called by loop.py and warmup.py before they build a dataset; read by
runtime/datasets/decontamination.py.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cray_agents.records import Record, Task, digest

if TYPE_CHECKING:
    from cray_agents.platform import Platform
    from cray_agents.tasks import TaskSet

ENTRY = "held-"
MOST = 2**22  # characters of an entry's texts, but for its last one: a body has its limit


class HeldOut(Record):
    """An entry: what each input is of, such as `holdout task 3f2a`, and its text."""

    inputs: list[tuple[str, str]]


async def hold_out(platform: "Platform", loop: str, tasks: "TaskSet") -> None:
    """Have the inputs of all held-out and test tasks kept out of the loop's training sets."""
    for entry in _entries([*tasks.split("holdout"), *tasks.split("test")]):
        record = entry.model_dump(mode="json")
        await platform.remember(loop, f"{ENTRY}{digest(record)}", record)


def _entries(tasks: Sequence[Task]) -> Iterator[HeldOut]:
    inputs, size = list[tuple[str, str]](), 0
    for task in tasks:
        inputs.append((f"{task.split} task {task.id}", task.input))
        size += len(task.input)
        if size >= MOST:
            yield HeldOut(inputs=inputs)
            inputs, size = [], 0
    if inputs:
        yield HeldOut(inputs=inputs)
