"""TaskSet: the tasks of a loop or an evaluation, in splits that do not leak into each other.

Called by agent authors and the loop. A task that says no split gets one from a hash of its input,
so that it stays where it is when the set grows, and inputs that are the same text are on one side.
Read next: splits.py, what a leak is; task_columns.py, rows that name their fields otherwise.
"""

import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack, cast, get_args, overload

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import Split, Task, task_id
from cray_agents.tasks import huggingface_folder
from cray_agents.tasks.leakage import Dropped, apart, task_key
from cray_agents.tasks.readers import (
    Columns,
    Given,
    Row,
    rows_of_csv,
    rows_of_jsonl,
    rows_of_parquet,
    task_of,
)

OnLeak = Literal["error", "drop"]
DRAWS = 20  # of a generator, for each task that is wanted, before it is taken for exhausted


class Placing(TypedDict, total=False):
    """How tasks come into splits.

    `holdout` (0.2) and `test` (0) are the shares of those tasks that name no split. `on_leak`: what
    to do where a task is in two splits, by its id or by its input, also nearly (splits.py):
    `error`, or `drop` it from the less guarded one: from train before holdout before test.
    `identity`: the keys of the metadata that, beside the input, make each what it is: Task.identity
    of all tasks that name none.
    """

    holdout: float
    test: float
    on_leak: OnLeak
    identity: Sequence[str]


class Reading(Placing, Columns, total=False):
    """How the rows of a file become tasks (Columns), and come into splits (Placing)."""


class TaskSet(Sequence[Task]):
    """Tasks in their order. Ids are unique, and nothing is in two splits, not even nearly.

    Raises BadInput, which names the two tasks, otherwise. `dropped` is what `on_leak="drop"`
    left out.
    """

    def __init__(self, tasks: Iterable[Task], *, on_leak: OnLeak = "error") -> None:
        whole = tuple(tasks)
        keys = [task_key(task) for task in whole]
        places = [f"task {number}" for number in range(len(whole))]
        self._tasks, self.dropped = apart(whole, keys, places, drop=_drops(on_leak))

    @classmethod
    def from_list(cls, tasks: Iterable[Given], **placing: Unpack[Placing]) -> "TaskSet":
        """From Tasks, dicts of their fields, or plain inputs; see Placing. Raises BadInput."""
        return cls._placed(((f"task {n}", task) for n, task in enumerate(tasks)), placing)

    @classmethod
    def from_jsonl(cls, path: str | Path, **reading: Unpack[Reading]) -> "TaskSet":
        """From a file with a JSON object a line: `input`, and what else a Task has; see Reading.

        Raises BadInput, with the line's number, for a line that is no task, and for an empty file.
        """
        return cls._read(path, rows_of_jsonl(Path(path)), reading)

    @classmethod
    def from_csv(
        cls, path: str | Path, *, delimiter: str = ",", **reading: Unpack[Reading]
    ) -> "TaskSet":
        """From a table whose first line names the columns: `input`, `target`, or see Reading.

        Every value is a text. Raises BadInput, with the line's number.
        """
        return cls._read(path, rows_of_csv(Path(path), delimiter), reading)

    @classmethod
    def from_parquet(cls, path: str | Path, **reading: Unpack[Reading]) -> "TaskSet":
        """From a Parquet file, or all in a folder; see Reading. Raises BadInput, SetupError."""
        return cls._read(path, rows_of_parquet(Path(path)), reading)

    @classmethod
    def from_huggingface(
        cls,
        folder: str | Path,
        *,
        config: str | None = None,
        splits: Mapping[str, Split | None] = huggingface_folder.SPLITS,
        **reading: Unpack[Reading],
    ) -> "TaskSet":
        """From a local folder in the layout of Hugging Face's `datasets`; nothing is fetched.

        Args:
            folder: with Parquet, JSON lines or CSV files; its README may say which is what.
            config: which of the folder's configurations; default: its default, or the only one.
            splits: what its splits are here; None: distributed by `holdout` and `test`. Default:
                `validation` is holdout, `test` test, and `train` is distributed.
            reading: see Reading; `holdout` is 0 unless given where a split is holdout.

        Raises BadInput, also for a split that `splits` does not name; SetupError.
        """
        found = list(huggingface_folder.rows_by_split(Path(folder), config))
        there = {split for split, _ in found}
        if unknown := sorted(there - splits.keys()):
            raise BadInput(
                f"{folder} has a split {unknown[0]!r}: say what it is, as in "
                f"splits={{{unknown[0]!r}: 'holdout'}}; those that are known are "
                f"{', '.join(splits)}",
                param="splits",
            )
        if "holdout" in map(splits.get, there):
            reading.setdefault("holdout", 0.0)
        columns, placing = _parted(reading)
        items = []
        for name, (where, row) in found:
            task, split = task_of(row, where, columns), splits[name]
            items.append((where, task.model_copy(update={"split": split}) if split else task))
        return cls._placed(items, placing)

    @classmethod
    def from_generator(
        cls,
        function: Callable[[random.Random], Given | Iterable[Given]],
        count: int,
        *,
        seed: int = 0,
        **placing: Unpack[Placing],
    ) -> "TaskSet":
        """`count` different tasks that a function makes of a random generator; see Placing.

        Task n is made with a generator of its own, by `seed` and n: the same seed gives the same
        tasks with the same ids, and a larger count only adds some. A function that yields is called
        once. A task that was made before is made again, up to 20 times as often as tasks are
        wanted. Raises BadInput if that is not enough.
        """
        made: Iterable[Given]
        if inspect.isgeneratorfunction(function):
            made = function(random.Random(str(seed)))
        else:
            made = (cast(Given, function(random.Random(f"{seed}/{n}"))) for n in itertools.count())
        found: dict[str, Task] = {}
        draws = 0
        for draws, given in enumerate(itertools.islice(made, count * DRAWS), 1):
            task = task_of(given, f"task {draws - 1} of {seed=}")
            found.setdefault(task.id, task)
            if len(found) == count:
                break
        if len(found) < count:
            raise BadInput(
                f"{getattr(function, '__name__', function)!s} made {len(found)} different tasks in "
                f"{draws} draws, and {count} are wanted: ask for fewer, or let it vary more",
                param="count",
            )
        return cls._placed(((f"task {task.id}", task) for task in found.values()), placing)

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
    def _view(cls, tasks: Iterable[Task], dropped: tuple[Dropped, ...] = ()) -> "TaskSet":
        view = cls.__new__(cls)
        view._tasks, view.dropped = tuple(tasks), dropped  # checked already
        return view

    @classmethod
    def _read(cls, path: str | Path, rows: Iterable[Row], reading: Reading) -> "TaskSet":
        columns, placing = _parted(reading)
        items = [(where, task_of(row, where, columns)) for where, row in rows]
        if not items:
            raise BadInput(f"{path} holds no tasks", param="path")
        return cls._placed(items, placing)

    @classmethod
    def _placed(cls, items: Iterable[tuple[str, Given]], placing: Placing) -> "TaskSet":
        """With a split for each that names none: that of an equal input, else by shares."""
        if unknown := sorted(placing.keys() - Placing.__annotations__.keys()):
            there = ", ".join([*Placing.__annotations__, *Columns.__annotations__])
            raise BadInput(f"no option {unknown[0]!r}; there are {there}", param=unknown[0])
        holdout, test = placing.get("holdout", 0.2), placing.get("test", 0.0)
        if not (0 <= holdout <= 1 and 0 <= test <= 1 and holdout + test <= 1):
            raise BadInput(
                f"holdout={holdout!r}, test={test!r}: shares between 0 and 1, together at most 1",
                param="holdout",
            )
        places, tasks = [], []
        for where, value in items:
            places.append(where)
            tasks.append(_identified(task_of(value, where), where, placing.get("identity", ())))
        keys = [task_key(task) for task in tasks]
        said = ["split" in task.model_fields_set for task in tasks]
        named = {keys[n]: task.split for n, task in enumerate(tasks) if said[n]}
        for n, key in enumerate(keys):
            if not said[n]:
                split = named.get(key) or _share(key, holdout, test)
                tasks[n] = tasks[n].model_copy(update={"split": split})
        return cls._view(*apart(tasks, keys, places, drop=_drops(placing.get("on_leak", "error"))))


def _identified(task: Task, where: str, identity: Sequence[str]) -> Task:
    """The task with this identity, unless it has one. Raises BadInput."""
    if not identity or task.identity:
        return task
    if isinstance(identity, str):
        message = f"identity={identity!r}: give a list of keys, as in [{identity!r}]"
        raise BadInput(message, param="identity")
    given = {name: getattr(task, name) for name in task.model_fields_set}
    if task.id == task_id(given):
        given.pop("id", None)
    try:
        return Task(**{**given, "identity": [*identity]})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise BadInput(f"{where}: {problem}", param="identity") from error


def _parted(reading: Reading) -> tuple[Columns, Placing]:
    """What says how to read, and what how to place."""
    columns = {name: value for name, value in reading.items() if name in Columns.__annotations__}
    placing = {name: value for name, value in reading.items() if name not in columns}
    return cast(Columns, columns), cast(Placing, placing)


def _drops(on_leak: OnLeak) -> bool:
    if on_leak not in get_args(OnLeak):
        raise BadInput(f"on_leak={on_leak!r}: there are {get_args(OnLeak)}", param="on_leak")
    return on_leak == "drop"


def _share(key: str, holdout: float, test: float) -> Split:
    place = int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13
    split = "test" if place < test else "holdout" if place < test + holdout else "train"
    return cast(Split, split)
