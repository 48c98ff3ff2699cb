"""Leakage: find tasks of one split that are also in another, by id or by similar input.

text_index.py decides which inputs are equal, similar or contained in each other. The metadata that
Task.identity names are compared as well. Called by task_set.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from cray_agents.errors import BadInput
from cray_agents.messages import asked_text
from cray_agents.records import Record, Split, Task
from cray_agents.tasks.text_index import WORLD, TextIndex, input_key

#: Splits, the least guarded first. No task of a split may be in one before it: tasks that decide
#: are not trained on, and tasks that only measure do not decide.
GUARDED: tuple[Split, ...] = ("train", "holdout", "test")
#: Prefix of the entries of a loop's journal that name held-out inputs; see loop/evaluator.py.
HELD_OUT_ENTRY = "held-"


class HeldOut(Record):
    """Held-out inputs, each with its origin, such as `holdout task 3f2a`, and its text.

    A task with an identity has its key (task_key) in `worlds` instead of its text.
    """

    inputs: list[tuple[str, str]]
    worlds: list[tuple[str, str]] = Field(default_factory=list)


@dataclass(frozen=True)
class Leak:
    """A leak: task number `one` of a set equals task number `other` of a more guarded split.

    `how` is `id` for the same id, `equal` for equal inputs, `near` for inputs whose word 5-grams
    are similar (Jaccard), `contained` if the input of `one` contains all of the other.
    """

    one: int
    other: int
    similarity: float
    how: Literal["id", "equal", "near", "contained"]


def task_key(task: Task) -> str:
    """Return the key of a task: the key of its input, and its world if it has one.

    Tasks with a world are equal or not, never similar. Of a list of messages all but the system's
    count, and one message of the user is equal to its text.
    """
    key = input_key(asked_text(task.input))
    return key if task.world is None else f"{key}{WORLD}{task.world}"


class Dropped(NamedTuple):
    """A task that `on_leak="drop"` left out, with the reason in words."""

    task: Task
    reason: str


def separate_splits(
    tasks: Sequence[Task], keys: Sequence[str], places: Sequence[str], *, drop: bool
) -> tuple[tuple[Task, ...], tuple[Dropped, ...]]:
    """Return the tasks without leaks, and the dropped tasks, both in order.

    `places` are the names of the tasks in messages. Raises BadInput for a leak unless `drop` is
    set, and for two tasks of one id.
    """
    dropped: dict[int, Dropped] = {}
    for leak in find_leaks(tasks, keys):
        text = _describe(leak, tasks, places)
        if not drop:
            raise BadInput(text, param="id" if leak.how == "id" else "split")
        dropped[leak.one] = Dropped(tasks[leak.one], text)
    ids: dict[str, int] = {}
    for n, task in enumerate(tasks):
        first = n if n in dropped else ids.setdefault(task.id, n)
        if first != n:
            raise BadInput(
                f"{places[n]}: the same task id {task.id!r} as {places[first]}", param="id"
            )
    kept = tuple(task for n, task in enumerate(tasks) if n not in dropped)
    return kept, tuple(dropped.values())


def find_leaks(tasks: Sequence[Task], keys: Sequence[str]) -> Iterator[Leak]:
    """Yield a leak for each task that is also in a more guarded split. `keys`: see `task_key`."""
    ranks = [GUARDED.index(task.split) for task in tasks]
    by_guard = sorted(range(len(tasks)), key=lambda number: -ranks[number])
    # tasks of each split are looked up among those of more guarded splits
    guarded = {rank: [n for n in by_guard if ranks[n] > rank] for rank in set(ranks)}
    indexes = {rank: TextIndex(keys[n] for n in known) for rank, known in guarded.items()}
    ids: dict[str, int] = {}
    for number in by_guard:
        ids.setdefault(tasks[number].id, number)
    for number, (task, rank) in enumerate(zip(tasks, ranks, strict=True)):
        same = ids[task.id]
        if ranks[same] > rank:
            yield Leak(number, same, 1.0, "id")
        elif match := indexes[rank].match(keys[number]):
            yield Leak(number, guarded[rank][match.number], match.similarity, match.how)


def _describe(leak: Leak, tasks: Sequence[Task], places: Sequence[str]) -> str:
    """Describe a leak in words: both tasks, their similarity, and the remedies."""
    one, other = tasks[leak.one], tasks[leak.other]
    what = f"task id {one.id!r}" if leak.how == "id" else f"input {one.text[:60]!r}"
    alike, hint = "", ""
    if leak.how in ("near", "contained"):
        how = f"similarity {leak.similarity:.2f}" if leak.how == "near" else "all of it is in there"
        alike = f" as {other.text[:60]!r} ({how})"
        hint = "; what all tasks share belongs into the agent's instructions or examples"
    return (
        f"{places[leak.one]}: the {what} is in split {one.split!r} here and in {other.split!r} at "
        f"{places[leak.other]}{alike}. What a split judges must not be known from another: give "
        f'both one split, leave one out, or say on_leak="drop"{hint}'
    )
