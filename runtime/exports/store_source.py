"""The runs of a filter, straight from the store, by id; or one of each task, by task.

A source as sources.py says. New runs that come while it is exported are in it or not; one that is
resumed keeps the times which "7d" meant when it began.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from cray_agents.errors import Corrupt
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Run
from cray_agents.runtime.exports.counts import MISSING
from cray_agents.runtime.exports.sources import ExportSource, Item
from cray_agents.runtime.store import Store

PAGE = 256  # runs whose bodies are read at once


@dataclass(frozen=True)
class StoredRuns:
    """The runs that match. `ages`: which of since and until were given as ages, in their words."""

    store: Store
    filter: RunFilter
    ages: dict[str, str] = field(default_factory=dict)
    skip_missing: bool = False
    pairs: bool = False
    dataset: Path | None = None
    split: str = "train"
    name: str = "runs"

    @property
    def says(self) -> str:
        """The filter in words."""
        given = self.filter.model_dump(mode="json", exclude_defaults=True)
        words = [f"{name} {value}" for name, value in (given | self.ages).items()]
        return f"runs with {', '.join(words)}" if words else "all runs"

    def identity(self) -> dict[str, Any]:
        """See Source."""
        return {"runs": self.filter.model_dump(mode="json", exclude_defaults=True) | self.ages}

    def state(self) -> dict[str, Any]:
        """See Source."""
        return {name: getattr(self.filter, name) for name in self.ages}

    def resumed(self, state: dict[str, Any]) -> ExportSource:
        """See Source."""
        times = {name: value for name, value in state.items() if name in self.ages}
        return replace(self, filter=self.filter.model_copy(update=times))

    def count(self) -> int | None:
        """See Source. A text is looked for in bodies: that is not done twice."""
        return self.store.count(self._query("id")) if self.filter.text is None else None

    def check(self) -> None:
        """See Source."""

    def shards(self) -> list[Path]:
        """See Source."""
        return []

    def items(self, after: str = "", *, by_task: bool = False) -> Iterator[Item]:
        """See Source."""
        if by_task:
            yield from self._tasks(after)
            return
        names = (row.run_id for row in self.store.facts(self._query("id", after)))
        while some := list(islice(names, PAGE)):
            found = {run.id: run for run in self.store.whole(some)}
            for name in some:
                yield self._item(name, name, found)

    def _tasks(self, after: str) -> Iterator[Item]:
        """The first run of each task; the cursor is its last one's, so that all are passed."""
        rows = self.store.facts(self._query("task", after))
        groups = (_Group.of(task, (row.run_id for row in rows)) for task, rows in
                  groupby(rows, key=lambda row: row.task))  # fmt: skip
        while some := list(islice(groups, PAGE)):
            runs = {run.id: run for run in self.store.whole([g.first for g in some if g.task])}
            for group in some:
                if group.task:
                    yield self._item(group.first, group.last, runs, group.count)
                else:
                    yield Item(group.last, (), group.count, (("no_task", group.count),))

    def _item(self, name: str, cursor: str, found: dict[str, Run], count: int = 1) -> Item:
        """The run of this name, standing for so many. Raises Corrupt where it cannot be read."""
        others = (("other_attempts", count - 1),) if count > 1 else ()
        if name in found:
            return Item(cursor, (found[name],), count, others)
        if not self.skip_missing:
            raise Corrupt(
                f"run {name} cannot be read whole: `cray-agents runs fsck` tells why; "
                "--skip-missing (skip_missing=true) leaves out such runs"
            )
        return Item(cursor, (), count, (*others, (MISSING, 1)))

    def _query(self, order: Any, after: str = "") -> RunQuery:
        return RunQuery(**self.filter.model_dump(), order=order, after=after or None)


@dataclass(frozen=True)
class _Group:
    """The runs of a task, or all that have none."""

    task: str | None
    first: str
    last: str
    count: int

    @classmethod
    def of(cls, task: str | None, ids: Iterator[str]) -> "_Group":
        first = last = next(ids)
        count = 1
        for last in ids:  # noqa: B007 - the last one is wanted
            count += 1
        return cls(task, first, last, count)
