"""TaskSet: the tasks of a loop or an evaluation, in splits that do not leak into each other.

Called by agent authors and the loop. A task without a split gets one from a hash of its input. It
therefore keeps its split when the set grows, and equal inputs get the same split. Read next:
leakage.py, the definition of a leak; readers.py, rows with other names of fields.
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
from cray_agents.tasks.leakage import Dropped, separate_splits, task_key
from cray_agents.tasks.readers import (
    Columns,
    Row,
    RowBound,
    TaskLike,
    files_at,
    make_task,
    rows_of_csv,
    rows_of_json,
    rows_of_parquet,
)

OnLeak = Literal["error", "drop"]
DRAWS = 20  # per wanted task, before a generator counts as exhausted


class Placing(TypedDict, total=False):
    """Options that assign tasks to splits.

    `holdout` (0.2) and `test` (0) are the shares of the tasks without a split. `on_leak` decides
    about a task in two splits, by id or by (nearly) equal input (leakage.py): `error`, or `drop` it
    from the less guarded split, from train before holdout before test. `identity` is the
    Task.identity of all tasks without one: keys of the metadata that distinguish equal inputs.
    """

    holdout: float
    test: float
    on_leak: OnLeak
    identity: Sequence[str]


class Reading(Placing, Columns, total=False):
    """Options for reading a file: rows become tasks (Columns), tasks get splits (Placing)."""


class TaskSet(Sequence[Task]):
    """Tasks in their order, with unique ids, and no (nearly) equal tasks in two splits.

    Otherwise the constructor raises BadInput, naming the two tasks. `dropped` are the tasks that
    `on_leak="drop"` left out.
    """

    def __init__(self, tasks: Iterable[Task], *, on_leak: OnLeak = "error") -> None:
        whole = tuple(tasks)
        for number, task in enumerate(whole):
            if not isinstance(task, Task):
                raise BadInput(
                    f"task {number} is {task!r}: give Tasks; TaskSet.from_list also takes inputs "
                    "and dicts",
                    param="tasks",
                )
        keys = [task_key(task) for task in whole]
        places = [f"task {number}" for number in range(len(whole))]
        self._tasks, self.dropped = separate_splits(whole, keys, places, drop=_drops(on_leak))

    @classmethod
    def from_list(cls, tasks: Iterable[TaskLike], **placing: Unpack[Placing]) -> "TaskSet":
        """Make a set of Tasks, dicts of their fields, or inputs; see Placing. Raises BadInput."""
        return cls._place(((f"task {n}", task) for n, task in enumerate(tasks)), placing)

    @classmethod
    def from_jsonl(cls, path: str | Path, **reading: Unpack[Reading]) -> "TaskSet":
        """Read a file of JSON lines with `input` and the other fields of a Task; see Reading.

        It may be one JSON array, and be compressed (.gz, .zst). Raises BadInput, with the line's
        number, for a line that is no task, and for an empty file.
        """
        return cls._read(path, rows_of_json(Path(path)), reading)

    @classmethod
    def from_csv(
        cls, path: str | Path, *, delimiter: str = ",", **reading: Unpack[Reading]
    ) -> "TaskSet":
        """Read a table whose first line names the columns: `input`, `target`, or see Reading.

        Every value is a text. Raises BadInput, with the line's number.
        """
        return cls._read(path, rows_of_csv(Path(path), delimiter), reading)

    @classmethod
    def from_parquet(cls, path: str | Path, **reading: Unpack[Reading]) -> "TaskSet":
        """Read a Parquet file, or all in a folder; see Reading. Raises BadInput, SetupError."""
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
        """Read a local folder in the layout of Hugging Face's `datasets`; nothing is fetched.

        Args:
            folder: with Parquet, JSON lines or CSV files; its README may assign them to splits.
            config: a configuration of the folder; default: its default, or the only one.
            splits: our split for each of the folder's; None: distributed by `holdout` and `test`.
                Default: `validation` is holdout, `test` test, and `train` is distributed.
            reading: see Reading. If a split is holdout, `holdout` is 0 unless given.

        Raises BadInput, also for a split that `splits` does not name; SetupError.
        """
        rows = list(huggingface_folder.rows_by_split(Path(folder), config))
        names = {split for split, _ in rows}
        if unknown := sorted(names - splits.keys()):
            raise BadInput(
                f"{folder} has a split {unknown[0]!r}: say what it is, as in "
                f"splits={{{unknown[0]!r}: 'holdout'}}; those that are known are "
                f"{', '.join(splits)}",
                param="splits",
            )
        if "holdout" in map(splits.get, names):
            reading.setdefault("holdout", 0.0)
        columns, placing = _split_options(reading)
        items = []
        for name, (location, row) in rows:
            task, split = make_task(row, location, columns), splits[name]
            items.append((location, task.model_copy(update={"split": split}) if split else task))
        return cls._place(items, placing)

    @classmethod
    def from_generator(
        cls,
        function: Callable[[random.Random], TaskLike | Iterable[TaskLike]],
        count: int,
        *,
        seed: int = 0,
        **placing: Unpack[Placing],
    ) -> "TaskSet":
        """Make `count` different tasks by a function of a random generator; see Placing.

        Task n gets its own generator, seeded by `seed` and n. The same seed gives the same tasks
        with the same ids, and a larger count only adds some. A function that yields is called once.
        A duplicate is drawn again, up to 20 draws per wanted task in all. Raises BadInput if these
        are not enough.
        """
        made: Iterable[TaskLike]
        if inspect.isgeneratorfunction(function):
            made = function(random.Random(str(seed)))
        else:
            generators = (random.Random(f"{seed}/{n}") for n in itertools.count())
            made = (cast(TaskLike, function(generator)) for generator in generators)
        tasks: dict[str, Task] = {}
        draws = 0
        for draws, given in enumerate(itertools.islice(made, count * DRAWS), 1):
            task = make_task(given, f"task {draws - 1} of {seed=}")
            known = tasks.setdefault(task.id, task)
            if (known.input, known.target) != (task.input, task.target):  # the id was given
                raise BadInput(
                    f"task {draws - 1} of {seed=} has the id {task.id!r} of another task that "
                    "differs from it: give each an id of its own, or none",
                    param="tasks",
                )
            if len(tasks) == count:
                break
        if len(tasks) < count:
            raise BadInput(
                f"{getattr(function, '__name__', function)!s} made {len(tasks)} different tasks in "
                f"{draws} draws, and {count} are wanted: ask for fewer, or let it vary more",
                param="count",
            )
        return cls._place(((f"task {task.id}", task) for task in tasks.values()), placing)

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
        """The tasks that only measure, and decide nothing."""
        return self.split("test")

    def split(self, name: Split) -> "TaskSet":
        """Return the tasks of one split, in their order."""
        if name not in get_args(Split):
            raise BadInput(f"no split {name!r}; there are {get_args(Split)}", param="split")
        return self._view(task for task in self._tasks if task.split == name)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskSet": ...
    def __getitem__(self, index: int | slice) -> "Task | TaskSet":
        """Return one task, or a slice of them as a TaskSet."""
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
        columns, placing = _split_options(reading)
        rows = RowBound(files_at(Path(path))).checked(rows)
        items = [(location, make_task(row, location, columns)) for location, row in rows]
        if not items:
            raise BadInput(f"{path} holds no tasks", param="path")
        return cls._place(items, placing)

    @classmethod
    def _place(cls, items: Iterable[tuple[str, TaskLike]], placing: Placing) -> "TaskSet":
        """Assign tasks without a split to that of an equal input, else by the shares."""
        if unknown := sorted(placing.keys() - Placing.__annotations__.keys()):
            options = ", ".join([*Placing.__annotations__, *Columns.__annotations__])
            raise BadInput(f"no option {unknown[0]!r}; there are {options}", param=unknown[0])
        holdout, test = placing.get("holdout", 0.2), placing.get("test", 0.0)
        if not (0 <= holdout <= 1 and 0 <= test <= 1 and holdout + test <= 1):
            raise BadInput(
                f"holdout={holdout!r}, test={test!r}: shares between 0 and 1, together at most 1",
                param="holdout",
            )
        places, tasks = [], []
        for location, value in items:
            places.append(location)
            task = make_task(value, location)
            tasks.append(_with_identity(task, location, placing.get("identity", ())))
        keys = [task_key(task) for task in tasks]
        explicit = ["split" in task.model_fields_set for task in tasks]
        named = {keys[n]: task.split for n, task in enumerate(tasks) if explicit[n]}
        for n, key in enumerate(keys):
            if not explicit[n]:
                split = named.get(key) or _split_by_hash(key, holdout, test)
                tasks[n] = tasks[n].model_copy(update={"split": split})
        drop = _drops(placing.get("on_leak", "error"))
        return cls._view(*separate_splits(tasks, keys, places, drop=drop))


def _with_identity(task: Task, location: str, identity: Sequence[str]) -> Task:
    """Return the task with this identity, unless it has one. Raises BadInput."""
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
        raise BadInput(f"{location}: {problem}", param="identity") from error


def _split_options(reading: Reading) -> tuple[Columns, Placing]:
    """Split options into those for reading and those for placing."""
    columns = {name: value for name, value in reading.items() if name in Columns.__annotations__}
    placing = {name: value for name, value in reading.items() if name not in columns}
    return cast(Columns, columns), cast(Placing, placing)


def _drops(on_leak: OnLeak) -> bool:
    if on_leak not in get_args(OnLeak):
        raise BadInput(f"on_leak={on_leak!r}: there are {get_args(OnLeak)}", param="on_leak")
    return on_leak == "drop"


def _split_by_hash(key: str, holdout: float, test: float) -> Split:
    place = int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13
    split = "test" if place < test else "holdout" if place < test + holdout else "train"
    return cast(Split, split)
