"""What an export reads: items in an order that does not change, each with a cursor.

An interrupted export goes on after the last cursor it had written. Two there are: stored.py, the
runs that match a filter; chosen.py, the runs or pairs of a dataset. Used by lines.py and tables.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cray_agents.records import Run


class Item(NamedTuple):
    """A run, or the better and the worse run of a pair; and what is lost before it is written.

    `covers`: how many runs or pairs it stands for. No runs: there is nothing of it to write.
    """

    cursor: str
    runs: tuple[Run, ...]
    covers: int = 1
    lost: tuple[tuple[str, int], ...] = ()


class ExportSource(Protocol):
    """What an export reads.

    `pairs`: its items are pairs. `name` and `says` tell people what it is. `dataset`: the
    directory, if it is one, and `split` the part of it.
    """

    @property
    def pairs(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def dataset(self) -> Path | None: ...

    @property
    def split(self) -> str: ...

    @property
    def says(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """What makes two exports exports of the same, as JSON."""
        ...

    def state(self) -> dict[str, Any]:
        """What an export that goes on must be told again: when "7d ago" was when it began."""
        ...

    def resumed(self, state: dict[str, Any]) -> "ExportSource":
        """The source as it was when an export began."""
        ...

    def count(self) -> int | None:
        """How many items there are in all, if that is known before they are read."""
        ...

    def check(self) -> None:
        """Raise BadInput on what lacks and can be known before anything is written."""
        ...

    def shards(self) -> list[Path]:
        """A dataset's token shards. Raises BadInput where it has no such split."""
        ...

    def items(self, after: str = "", *, by_task: bool = False) -> Iterator[Item]:
        """The items after a cursor. `by_task`: those on one task side by side."""
        ...
