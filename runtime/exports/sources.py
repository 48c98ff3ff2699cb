"""Sources of an export: the stored runs that match a filter, or a dataset's runs or pairs.

An ExportSource is either. StoredRuns gives runs by id; for formats with a row per task, the first
run of each task, by task. DatasetRuns gives items in the order of the dataset's shards. Run bodies
are read a page at a time. A run that is missing or unreadable is an error, or with `skip_missing`
a loss. Used by exporter.py and export_files.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cray_agents.errors import BadInput, Corrupt
from cray_agents.exact_json import load_json
from cray_agents.messages import first_question
from cray_agents.paths import Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Message, Run, StopReason, Task, Trajectory, digest
from cray_agents.runtime.datasets.reader import RECIPE, SplitName, file_in, read_dataset, shards
from cray_agents.runtime.exports.export_format import MISSING, Item
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

PAGE = 256  # runs whose bodies are read at once
BATCH = 10_000  # rows whose names are read at once
NAMED = 5  # missing runs that a message names
DEMONSTRATION = "demonstration/"
METHOD_LOSSES = {"dpo": "unpaired", "kto": "unlabelled"}  # of single runs, by method


@dataclass(frozen=True)
class StoredRuns:
    """The stored runs that match, or those of `names` alone.

    A run that arrives during an export may be in it or not. `name` and `description` of a source
    are for people. `pairs` tells that its items are pairs of runs. `dataset` is the folder of a
    dataset, None for stored runs; `split` is its split.
    """

    store: Store
    filter: RunFilter
    skip_missing: bool = False
    names: tuple[str, ...] = ()
    pairs: bool = False
    dataset: Path | None = None
    split: str = "train"
    name: str = "runs"

    @property
    def description(self) -> str:
        """The filter, or the names, in words."""
        if self.names:
            return f"the runs {', '.join(self.names)}"
        given = self.filter.model_dump(mode="json", exclude_defaults=True)
        words = [f"{name} {value}" for name, value in given.items()]
        return f"runs with {', '.join(words)}" if words else "all runs"

    def count(self) -> int | None:
        """Return the number of items; None for a text filter, which reads every body."""
        if self.names:
            return len(set(self.names))
        return self.store.count(self._query("id")) if self.filter.text is None else None

    def check(self) -> None:
        """Raise NotFound for a name that no run has."""
        for name in self.names:
            self.store.run_state(name)

    def shards(self) -> list[Path]:
        """Return no token shards: a dataset has them."""
        return []

    def items(self, *, by_task: bool = False) -> Iterator[Item]:
        """Yield the items. `by_task`: one run of each task, the others counted."""
        if by_task:
            yield from self._tasks()
            return
        names = (row.run_id for row in self._rows("id"))
        while some := list(islice(names, PAGE)):
            runs = {run.id: run for run in self.store.runs_by_id(some)}
            for name in some:
                yield self._item(name, runs)

    def _tasks(self) -> Iterator[Item]:
        """Yield the first run of each task, which counts as all of them."""
        groups = (
            (task, next(rows).run_id, 1 + sum(1 for _ in rows))
            for task, rows in groupby(self._rows("task"), key=attrgetter("task"))
        )
        while some := list(islice(groups, PAGE)):
            runs = {
                run.id: run for run in self.store.runs_by_id([n for task, n, _ in some if task])
            }
            for task, first, count in some:
                if task:
                    yield self._item(first, runs, count)
                else:
                    yield Item((), count, (("no_task", count),))

    def _rows(self, order: Literal["id", "task"]) -> Iterable[RunFacts]:
        if not self.names:
            return self.store.facts(self._query(order))
        rows = [self.store.run_facts(name) for name in set(self.names)]
        return sorted(rows, key=_by_task if order == "task" else attrgetter("run_id"))

    def _item(self, name: str, runs: dict[str, Run], count: int = 1) -> Item:
        """Return the run as an item that counts as `count`. Raises Corrupt if it is unreadable."""
        losses = (("other_attempts", count - 1),) if count > 1 else ()
        if name in runs:
            return Item((runs[name],), count, losses)
        if not self.skip_missing:
            raise Corrupt(
                f"run {name} cannot be read whole: `cray-agents maintain fsck` tells why; "
                "--skip-missing (skip_missing=true) leaves out such runs"
            )
        return Item((), count, (*losses, (MISSING, 1)))

    def _query(self, order: Literal["id", "task"]) -> RunQuery:
        return RunQuery(**self.filter.model_dump(), order=order)


def _by_task(row: RunFacts) -> tuple[str, int, int, str]:
    """Return the key of the order `task` of a RunQuery."""
    iteration = -1 if row.iteration is None else row.iteration
    return (row.task or "", iteration, -1 if row.attempt is None else row.attempt, row.run_id)


class _Row(NamedTuple):
    """The origin of a shard's row: the columns of these names."""

    run_id: str
    task_id: str
    pair: str | None
    chosen: bool | None


class _Use(NamedTuple):
    """The origin of one item: its run ids and its task."""

    run_ids: tuple[str, ...]
    task: str


@dataclass(frozen=True)
class DatasetRuns:
    """A dataset as a source: its preference pairs if `pairs`, else its runs.

    Demonstrations are read from the recipe, runs from the store.
    """

    store: Store
    home: Home
    id: str
    split: SplitName = "train"
    pairs: bool = False
    skip_missing: bool = False

    @property
    def dataset(self) -> Path:
        """The dataset's folder."""
        return self.home.dataset(self.id)

    @property
    def name(self) -> str:
        """The name of a folder that holds the export."""
        return self.id if self.split == "train" else f"{self.id}-{self.split}"

    @property
    def description(self) -> str:
        """The dataset and its split in words."""
        kind = "pairs" if self.pairs else "runs"
        return f"{kind} of the dataset {self.id} ({self.split})"

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The dataset's manifest. Raises NotFound, Corrupt."""
        return read_dataset(self.home, self.id)

    def shards(self) -> list[Path]:
        """Return the token shards. Raises NotFound, and BadInput if the split does not exist."""
        paths = shards(self.home, self.id, self.split)
        if not paths:
            raise BadInput(f"the dataset {self.id} has no split {self.split!r}", param="split")
        return paths

    def count(self) -> int | None:
        """Return the number of items."""
        return sum(1 for _ in self._uses())

    def check(self) -> None:
        """Raise BadInput for runs that are not in the store any more."""
        names = (name for use in self._uses() for name in use.run_ids)
        stored = (name for name in names if not name.startswith(DEMONSTRATION))
        missing = 0
        some: list[str] = []
        while page := list(islice(stored, PAGE)):
            known = self.store.index.places(page)
            lost = [name for name in page if name not in known]
            missing += len(lost)
            some += lost[: NAMED - len(some)]
        if missing and not self.skip_missing:
            raise self._missing(missing, some)

    def items(self, *, by_task: bool = False) -> Iterator[Item]:
        """Yield the items. `by_task`: the first of each task, the others counted."""
        seen: set[str] = set()
        uses = self._uses()
        while page := list(islice(uses, PAGE)):
            fresh = [not by_task or self._is_new(use, seen) for use in page]
            wanted = list(zip(page, fresh, strict=True))
            runs = self._read(name for use, new in wanted if new for name in use.run_ids)
            for use, new in wanted:
                yield self._item(use, runs) if new else Item((), 1, (("other_attempts", 1),))

    def _is_new(self, use: _Use, seen: set[str]) -> bool:
        """Tell whether the item is the first on its task; one without a task always is."""
        if not use.task or use.task in seen:
            return not use.task
        seen.add(use.task)
        return True

    def _item(self, use: _Use, runs: dict[str, Run]) -> Item:
        own = tuple(runs[name] for name in use.run_ids if name in runs)
        if len(own) == len(use.run_ids):
            loss = METHOD_LOSSES.get(self.manifest.get("method", "")) if not self.pairs else None
            return Item(own, 1, ((loss, 1),) if loss else ())
        if not self.skip_missing:
            lost = [name for name in use.run_ids if name not in runs]
            raise self._missing(len(lost), lost)
        return Item((), 1, ((MISSING, 1),))

    def _read(self, names: Iterable[str]) -> dict[str, Run]:
        wanted = list(names)
        runs = {run.id: run for run in self.store.runs_by_id(
            [name for name in wanted if not name.startswith(DEMONSTRATION)])}  # fmt: skip
        for name in wanted:
            if name.startswith(DEMONSTRATION):
                runs[name] = self._demonstration(name)
        return runs

    def _demonstration(self, name: str) -> Run:
        position, _, rejected = name.removeprefix(DEMONSTRATION).partition("/")
        recipe, number = self._recipe, int(position)
        tools, about = recipe["demonstrations_tools"], recipe["demonstrations_metadata"]
        messages = recipe["demonstrations"][number]
        if rejected:
            messages = [*messages[:-1], recipe["demonstrations_rejected"][number]]
        return run_of_demonstration(
            messages,
            tools[number] if tools else recipe["tools"],
            about[number] if about else None,
        )

    @cached_property
    def _recipe(self) -> dict[str, Any]:
        recipe: dict[str, Any] = load_json(file_in(self.dataset, RECIPE).read_bytes())
        return recipe

    def _missing(self, count: int, some: Sequence[str]) -> BadInput:
        if self.manifest.get("documents"):
            message = f"the dataset {self.id} is of documents, not of runs: export it as `tokens`"
            return BadInput(message, param="dataset", code="missing_runs")
        more = ", ..." if count > len(some) else ""
        return BadInput(
            f"{count:,} runs of the dataset {self.id} are no longer in the store ({', '.join(some)}"
            f"{more}): they were pruned since. --skip-missing (skip_missing=true) leaves them out; "
            "the format `tokens` does not need them",
            param="dataset",
            code="missing_runs",
        )

    def _uses(self) -> Iterator[_Use]:
        """Yield the items of the shards' rows; rows of one run or pair are adjacent."""
        if self.pairs:
            paired = (row for row in self._rows() if row.pair is not None)
            for _, both in groupby(paired, key=attrgetter("pair")):
                rows = sorted(both, key=attrgetter("chosen"), reverse=True)
                names = tuple(dict.fromkeys(row.run_id for row in rows))
                yield _Use(names, rows[0].task_id)
        else:
            for name, same in groupby(self._rows(), key=attrgetter("run_id")):
                *_, last = same
                yield _Use((name,), last.task_id)

    def _rows(self) -> Iterator[_Row]:
        """Yield the rows of all shards, without their tokens."""
        from pyarrow import parquet

        for shard in self.shards():
            with parquet.ParquetFile(shard) as file:
                for batch in file.iter_batches(BATCH, columns=list(_Row._fields)):
                    columns = [batch.column(name).to_pylist() for name in _Row._fields]
                    yield from map(_Row, *columns)


ExportSource = StoredRuns | DatasetRuns


def run_of_demonstration(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    metadata: dict[str, Any] | None = None,
) -> Run:
    """Return a demonstration of a dataset as an imported run, named by its content."""
    question = first_question(messages)
    return Run(
        id=f"demonstration-{digest([list(messages), list(tools)])}",
        agent="",
        model="",
        input=question,
        output=messages[-1].get("content") if messages else None,
        stop_reason=StopReason.completed,
        trajectory=Trajectory(messages=list(messages), tools=list(tools)),
        task=Task(input=question, metadata=metadata) if metadata else None,
        imported="demonstration",
    )
