"""Paging: the part of a list behind a page's last row."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from cray_agents.errors import BadInput

T = TypeVar("T")


def after(
    rows: Sequence[T], key: Callable[[T], str], cursor: str | None, limit: int, noun: str
) -> tuple[Sequence[T], bool]:
    """Return at most `limit` rows behind the one whose key is `cursor`, and if there are more.

    Without a cursor they begin at the first. `noun` names a row. Raises BadInput for a cursor that
    no row has.
    """
    rest = behind(rows, key, cursor, noun)
    return rest[:limit], len(rest) > limit


def behind(
    rows: Sequence[T], key: Callable[[T], str], cursor: str | None, noun: str
) -> Sequence[T]:
    """Return all rows behind the one whose key is `cursor`. Raises BadInput as `after` does."""
    if cursor is None:
        return rows
    for at, row in enumerate(rows):
        if key(row) == cursor:
            return rows[at + 1 :]
    raise BadInput(f"after: no {noun} {cursor[:200]!r} is listed here", param="after")
