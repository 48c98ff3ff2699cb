"""DatasetRuns: the export source of a dataset's runs or preference pairs.

Items come in the order of the shards; cursors are row numbers. Demonstrations are read from the
recipe, runs from the store, a page at a time. A run pruned since the build is an error, or a loss
with `skip_missing`. Formats without conversations read the shards alone. The port is ExportSource
in export_source.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.exact_json import load_json
from cray_agents.paths import Home
from cray_agents.records import Run
from cray_agents.runtime.datasets import read_dataset, shards
from cray_agents.runtime.datasets.reader import RECIPE, SplitName, file_in
from cray_agents.runtime.exports.conversations.conversation import run_of_demonstration
from cray_agents.runtime.exports.export_format import MISSING
from cray_agents.runtime.exports.sources.export_source import ExportSource, Item
from cray_agents.runtime.store import Store

PAGE = 256  # runs whose bodies are read at once
BATCH = 10_000  # rows whose names are read at once
NAMED = 5  # missing runs that a message names
DEMONSTRATION = "demonstration/"
METHOD_LOSSES = {"dpo": "unpaired", "kto": "unlabelled"}  # of single runs, by method


class _Row(NamedTuple):
    """The origin of a shard's row: its row number, then the columns of these names."""

    number: int
    run_id: str
    task_id: str
    pair: str | None
    chosen: bool | None


class _Use(NamedTuple):
    """The origin of one item: its last row's number, its run ids and its task."""

    row: int
    run_ids: tuple[str, ...]
    task: str


@dataclass(frozen=True)
class DatasetRuns:
    """A dataset as a source: its preference pairs if `pairs`, else its runs."""

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
        """See ExportSource."""
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

    def identity(self) -> dict[str, Any]:
        """See ExportSource."""
        return {"dataset": self.id, "split": self.split, "pairs": self.pairs}

    def state(self) -> dict[str, Any]:
        """See ExportSource."""
        return {}

    def with_state(self, state: dict[str, Any]) -> ExportSource:
        """See ExportSource. A dataset never changes, so it has no state."""
        return self

    def count(self) -> int | None:
        """See ExportSource."""
        return sum(1 for _ in self._uses())

    def check(self) -> None:
        """See ExportSource."""
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

    def items(self, after: str = "", *, by_task: bool = False) -> Iterator[Item]:
        """See ExportSource."""
        last = int(after or -1)
        seen: set[str] = set()
        uses = self._uses(0 if by_task else last + 1)
        while page := list(islice(uses, PAGE)):
            fresh = [not by_task or self._is_new(use, seen) for use in page]
            wanted = [(use, new) for use, new in zip(page, fresh, strict=True) if use.row > last]
            runs = self._read(name for use, new in wanted if new for name in use.run_ids)
            for use, new in wanted:
                lost = (("other_attempts", 1),)
                yield self._item(use, runs) if new else Item(str(use.row), (), 1, lost)

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
            return Item(str(use.row), own, 1, ((loss, 1),) if loss else ())
        if not self.skip_missing:
            lost = [name for name in use.run_ids if name not in runs]
            raise self._missing(len(lost), lost)
        return Item(str(use.row), (), 1, ((MISSING, 1),))

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
        more = ", ..." if count > len(some) else ""
        return BadInput(
            f"{count:,} runs of the dataset {self.id} are no longer in the store ({', '.join(some)}"
            f"{more}): they were pruned since. --skip-missing (skip_missing=true) leaves them out; "
            "the format `tokens` does not need them",
            param="dataset",
            code="missing_runs",
        )

    def _uses(self, start: int = 0) -> Iterator[_Use]:
        """Yield the items of the rows from `start` on; rows of one run or pair are adjacent."""
        if self.pairs:
            paired = (row for row in self._rows(start) if row.pair is not None)
            for _, both in groupby(paired, key=attrgetter("pair")):
                rows = sorted(both, key=attrgetter("chosen"), reverse=True)
                names = tuple(dict.fromkeys(row.run_id for row in rows))
                yield _Use(max(row.number for row in rows), names, rows[0].task_id)
        else:
            for name, same in groupby(self._rows(start), key=attrgetter("run_id")):
                *_, last = same
                yield _Use(last.number, (name,), last.task_id)

    def _rows(self, start: int) -> Iterator[_Row]:
        """Yield the rows of all shards from `start` on, without their tokens."""
        from pyarrow import parquet

        number = 0
        for shard in self.shards():
            with parquet.ParquetFile(shard) as file:
                if number + file.metadata.num_rows <= start:
                    number += file.metadata.num_rows
                    continue
                for batch in file.iter_batches(BATCH, columns=list(_Row._fields[1:])):
                    columns = [batch.column(name).to_pylist() for name in _Row._fields[1:]]
                    for row in zip(*columns, strict=True):
                        if number >= start:
                            yield _Row(number, *row)
                        number += 1
