"""ExportSource: the port through which an export reads its items, in a fixed order.

Each item has a cursor; an interrupted export goes on after the last cursor it wrote. Two sources
exist: store_source.py, the runs that match a filter, and dataset_source.py, the runs or pairs of a
dataset. Used by jsonl_files.py and parquet_files.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cray_agents.records import Run
from cray_agents.runtime.store import Store


class Item(NamedTuple):
    """A run, or the better and the worse run of a pair, to be written.

    `covers` is the number of runs or pairs that it counts as. `lost` holds the losses known before
    writing, as (code, count). An item without runs writes nothing.
    """

    cursor: str
    runs: tuple[Run, ...]
    covers: int = 1
    lost: tuple[tuple[str, int], ...] = ()


class ExportSource(Protocol):
    """Items to export, of runs in `store`. `pairs` tells that they are pairs of runs.

    `name` and `description` are for people. `dataset` is the folder of a dataset, None for stored
    runs; `split` is its split.
    """

    @property
    def store(self) -> Store: ...

    @property
    def pairs(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def dataset(self) -> Path | None: ...

    @property
    def split(self) -> str: ...

    @property
    def description(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """Return the source's identity as JSON: equal for equal exports."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed export needs, such as the time meant by "7d"."""
        ...

    def with_state(self, state: dict[str, Any]) -> "ExportSource":
        """Return the source with the state that an export began with."""
        ...

    def count(self) -> int | None:
        """Return the number of items, or None if only reading would tell."""
        ...

    def check(self) -> None:
        """Raise BadInput for runs known to be missing, before anything is written."""
        ...

    def shards(self) -> list[Path]:
        """Return a dataset's token shards. Raises BadInput if it lacks the split."""
        ...

    def items(self, after: str = "", *, by_task: bool = False) -> Iterator[Item]:
        """Yield the items after a cursor. `by_task`: one run of each task, the others counted."""
        ...
