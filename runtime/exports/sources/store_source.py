"""StoredRuns: the export source of the stored runs that match a filter, or that are named.

Runs come by id; for formats with a row per task, the first run of each task comes by task. A run
that arrives during an export may be in it or not. A resumed export keeps the times that ages such
as "7d" meant at its beginning. The port is ExportSource in export_source.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from cray_agents.errors import Corrupt
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Run
from cray_agents.runtime.exports.export_format import MISSING
from cray_agents.runtime.exports.sources.export_source import ExportSource, Item
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

PAGE = 256  # runs whose bodies are read at once


@dataclass(frozen=True)
class StoredRuns:
    """The stored runs that match, or those of `names` alone.

    `ages` holds since and until if given as ages, such as "7d".
    """

    store: Store
    filter: RunFilter
    ages: dict[str, str] = field(default_factory=dict)
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
        words = [f"{name} {value}" for name, value in (given | self.ages).items()]
        return f"runs with {', '.join(words)}" if words else "all runs"

    def identity(self) -> dict[str, Any]:
        """See ExportSource."""
        chosen = self.filter.model_dump(mode="json", exclude_defaults=True) | self.ages
        return {"runs": chosen} | ({"names": sorted(self.names)} if self.names else {})

    def state(self) -> dict[str, Any]:
        """See ExportSource."""
        return {name: getattr(self.filter, name) for name in self.ages}

    def with_state(self, state: dict[str, Any]) -> ExportSource:
        """See ExportSource."""
        times = {name: value for name, value in state.items() if name in self.ages}
        return replace(self, filter=self.filter.model_copy(update=times))

    def count(self) -> int | None:
        """See ExportSource. A text filter reads every body, so its runs are not counted first."""
        if self.names:
            return len(set(self.names))
        return self.store.count(self._query("id")) if self.filter.text is None else None

    def check(self) -> None:
        """See ExportSource. Raises NotFound for a name that no run has."""
        for name in self.names:
            self.store.run_state(name)

    def shards(self) -> list[Path]:
        """See ExportSource."""
        return []

    def items(self, after: str = "", *, by_task: bool = False) -> Iterator[Item]:
        """See ExportSource."""
        if by_task:
            yield from self._tasks(after)
            return
        names = (row.run_id for row in self._rows("id", after))
        while some := list(islice(names, PAGE)):
            runs = {run.id: run for run in self.store.runs_by_id(some)}
            for name in some:
                yield self._item(name, name, runs)

    def _tasks(self, after: str) -> Iterator[Item]:
        """Yield the first run of each task; the cursor is the last run's, past the whole task."""
        rows = self._rows("task", after)
        groups = (_Group.of(task, (row.run_id for row in rows)) for task, rows in
                  groupby(rows, key=lambda row: row.task))  # fmt: skip
        while some := list(islice(groups, PAGE)):
            runs = {run.id: run for run in self.store.runs_by_id([g.first for g in some if g.task])}
            for group in some:
                if group.task:
                    yield self._item(group.first, group.last, runs, group.count)
                else:
                    yield Item(group.last, (), group.count, (("no_task", group.count),))

    def _rows(self, order: Literal["id", "task"], after: str) -> Iterator[RunFacts]:
        """Yield the facts of the runs after a cursor, the id of a run."""
        if not self.names:
            yield from self.store.facts(self._query(order, after))
            return
        rows = [self.store.places(name)[0] for name in set(self.names)]
        if order == "task":
            rows.sort(key=_by_task)
        else:
            rows.sort(key=_by_id)
        past = [row.run_id for row in rows].index(after) + 1 if after else 0
        yield from rows[past:]

    def _item(self, name: str, cursor: str, runs: dict[str, Run], count: int = 1) -> Item:
        """Return the run as an item that counts as `count`. Raises Corrupt if it is unreadable."""
        losses = (("other_attempts", count - 1),) if count > 1 else ()
        if name in runs:
            return Item(cursor, (runs[name],), count, losses)
        if not self.skip_missing:
            raise Corrupt(
                f"run {name} cannot be read whole: `cray-agents maintain fsck` tells why; "
                "--skip-missing (skip_missing=true) leaves out such runs"
            )
        return Item(cursor, (), count, (*losses, (MISSING, 1)))

    def _query(self, order: Literal["id", "task"], after: str = "") -> RunQuery:
        return RunQuery(**self.filter.model_dump(), order=order, after=after or None)


def _by_id(row: RunFacts) -> str:
    return row.run_id


def _by_task(row: RunFacts) -> tuple[str, int, int, str]:
    """Return the key of the order `task` of a RunQuery."""
    generation = -1 if row.generation is None else row.generation
    return (row.task or "", generation, -1 if row.attempt is None else row.attempt, row.run_id)


@dataclass(frozen=True)
class _Group:
    """The runs of one task, or all runs without a task."""

    task: str | None
    first: str
    last: str
    count: int

    @classmethod
    def of(cls, task: str | None, ids: Iterator[str]) -> "_Group":
        first = last = next(ids)
        count = 1
        for last in ids:  # noqa: B007 - only the last one counts
            count += 1
        return cls(task, first, last, count)
