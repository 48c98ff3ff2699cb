"""TaskSet: the tasks of a loop or an evaluation, in splits that do not leak into each other.

Called by agent authors and loop.py. A task that says no split gets one from a hash of its input, so
that it stays where it is when the set grows, and inputs that are the same text are on one side.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, overload

from pydantic import ValidationError
from pydantic_core import from_json

from cray_agents.errors import BadInput
from cray_agents.records import Split, Task

Given = Task | Mapping[str, Any] | str


class TaskSet(Sequence[Task]):
    """Tasks in their order. Ids are unique, and no input stands in two splits.

    Raises BadInput, which names the two tasks, otherwise.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tuple(tasks)
        _check(self._tasks, [f"task {number}" for number in range(len(self._tasks))])

    @classmethod
    def from_list(
        cls, tasks: Iterable[Given], *, holdout: float = 0.2, test: float = 0.0
    ) -> "TaskSet":
        """From Tasks, dicts of their fields, or plain inputs.

        `holdout` and `test` are the shares of those tasks that name no split. Raises BadInput.
        """
        items = [(f"task {number}", task) for number, task in enumerate(tasks)]
        return cls._split_up(items, holdout, test)

    @classmethod
    def from_jsonl(cls, path: str | Path, *, holdout: float = 0.2, test: float = 0.0) -> "TaskSet":
        """From a file with a JSON object a line: `input`, and what else a Task has.

        Raises BadInput, with the line's number, for a line that is no task, and for an empty file.
        """
        try:
            lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        except OSError as error:
            raise BadInput(f"cannot read tasks from {path}: {error}", param="path") from error
        items: list[tuple[str, Given]] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = from_json(line, allow_inf_nan=False)
            except ValueError as error:
                raise BadInput(f"{where}: not JSON: {error}", param="path") from error
            if not isinstance(value, dict):
                raise BadInput(
                    f'{where}: not a JSON object such as {{"input": "..."}}', param="path"
                )
            items.append((where, value))
        if not items:
            raise BadInput(f"{path} holds no tasks", param="path")
        return cls._split_up(items, holdout, test)

    @property
    def train(self) -> "TaskSet":
        """The tasks to learn from."""
        return self.split("train")

    @property
    def holdout(self) -> "TaskSet":
        """The tasks that decide whether a model is promoted; never trained on."""
        return self.split("holdout")

    @property
    def test(self) -> "TaskSet":
        """The tasks that decide nothing; only measured."""
        return self.split("test")

    def split(self, name: Split) -> "TaskSet":
        """The tasks of one split, in their order."""
        if name not in get_args(Split):
            raise BadInput(f"no split {name!r}; there are {get_args(Split)}", param="split")
        return self._view(task for task in self._tasks if task.split == name)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskSet": ...
    def __getitem__(self, index: int | slice) -> "Task | TaskSet":
        """One task, or a slice of them as a TaskSet."""
        if isinstance(index, slice):
            return self._view(self._tasks[index])
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={len(self.split(name))}" for name in get_args(Split))
        return f"TaskSet({counts})"

    @classmethod
    def _view(cls, tasks: Iterable[Task]) -> "TaskSet":
        view = cls.__new__(cls)
        view._tasks = tuple(tasks)  # a part of what was checked already
        return view

    @classmethod
    def _split_up(
        cls, items: Sequence[tuple[str, Given]], holdout: float, test: float
    ) -> "TaskSet":
        if not (0 <= holdout <= 1 and 0 <= test <= 1 and holdout + test <= 1):
            raise BadInput(
                f"holdout={holdout!r}, test={test!r}: shares between 0 and 1, together at most 1",
                param="holdout",
            )
        tasks = [_task(value, where) for where, value in items]
        named = {_text(task): task.split for task in tasks if "split" in task.model_fields_set}
        placed = [
            task
            if "split" in task.model_fields_set
            else task.model_copy(
                update={"split": named.get(_text(task)) or _share(_text(task), holdout, test)}
            )
            for task in tasks
        ]
        _check(placed, [where for where, _ in items])
        return cls._view(placed)


def _task(value: Given, where: str) -> Task:
    if isinstance(value, Task):
        return value
    try:
        return Task.model_validate({"input": value} if isinstance(value, str) else dict(value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "task"
        raise BadInput(
            f"{where}: {place}: {problem['msg']} (fields: {', '.join(Task.model_fields)})",
            param=place,
        ) from error


def _text(task: Task) -> str:
    """What makes two inputs the same question: letters, not case or spacing."""
    return " ".join(task.input.casefold().split())


def _share(text: str, holdout: float, test: float) -> Split:
    place = int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13
    split = "test" if place < test else "holdout" if place < test + holdout else "train"
    return cast(Split, split)


def _check(tasks: Sequence[Task], places: Sequence[str]) -> None:
    ids: dict[str, str] = {}
    texts: dict[str, tuple[str, Split]] = {}
    for task, where in zip(tasks, places, strict=True):
        if task.id in ids:
            raise BadInput(f"{where}: the same task id {task.id!r} as {ids[task.id]}", param="id")
        ids[task.id] = where
        other, split = texts.setdefault(_text(task), (where, task.split))
        if split != task.split:
            raise BadInput(
                f"{where}: the input {task.input[:60]!r} is in split {task.split!r} here and in "
                f"{split!r} at {other}; an input belongs to one split",
                param="split",
            )
