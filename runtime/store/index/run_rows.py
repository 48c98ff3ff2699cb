"""Rows of the index's table `runs`: found and written many at once.

A row's columns follow from what its run's events told (merging.py). Those that are sorted by or
selected are written only where they changed, since each is in three indexes. Used by intake.py.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cray_agents.runtime.store.index.codes import MODELS, TAGS, Codes
from cray_agents.runtime.store.index.filters import ranked
from cray_agents.runtime.store.index.run_merge import MergedRun

PUT = (256, 64, 16, 4, 1)  # rows inserted by one statement
SIZES = (1, 16, 128, 1024)  # values asked for in one statement; few sizes, so that few are prepared

_SORTED = [
    *("shown", "loop", "generation", "agent", "split", "stop_reason", "error"),
    *("models", "tags", "reward", "started", "task", "attempt"),
]
_MORE = [
    *("description", "model", "infrastructure", "seconds", "calls", "prompt", "sampled", "told"),
]
_FIND = (
    f"SELECT id, run, description, told, run IN (SELECT run FROM stale), {', '.join(_SORTED)}"
    " FROM runs WHERE id IN"
)
_INSERT = f"INSERT INTO runs (run, id, {', '.join(_SORTED + _MORE)})"
_UPDATE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _SORTED + _MORE)} WHERE run = ?"
_UPDATE_MORE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _MORE)} WHERE run = ?"
_NOWHERE = (0, None, 0, None, None, None, None, 0, 0, None, 0.0, "", 0)


class RunRow:
    """A run as it stands in the table (`columns`: the sorted ones), or is to."""

    __slots__ = ("columns", "description", "new", "run", "run_id", "stale", "told")

    def __init__(self, run_id: str, run: int) -> None:
        self.run_id = run_id
        self.run = run
        self.new = True
        self.stale = False
        self.description: int | None = None
        self.told = MergedRun()
        self.columns: tuple[Any, ...] = _NOWHERE


def find(connection: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, RunRow]:
    """The rows of these runs, new ones for those that have none."""
    rows: dict[str, RunRow] = {}
    for run_id, run, description, told, stale, *columns in rows_in(connection, _FIND, run_ids):
        row = rows[run_id] = RunRow(run_id, run)
        row.new = False
        row.stale = bool(stale)
        row.description = description
        row.told = MergedRun(told)
        row.columns = tuple(columns)
    if len(rows) < len(run_ids):
        last = connection.execute("SELECT coalesce(max(run), 0) FROM runs").fetchone()[0]
        for run_id in run_ids:
            if run_id not in rows:
                last += 1
                rows[run_id] = RunRow(run_id, last)
    return rows


def write(connection: sqlite3.Connection, codes: Codes, rows: Iterable[RunRow]) -> None:
    """Put the rows into the table as they are now."""
    inserted, updated, changed = [], [], []
    for row in rows:
        columns, more = _values(connection, codes, row)
        if row.new:
            inserted.append((row.run, row.run_id, *columns, *more))
        elif columns == row.columns:
            changed.append((*more, row.run))
        else:
            updated.append((*columns, *more, row.run))
    put(connection, _INSERT, inserted)
    for statement, values in ((_UPDATE, updated), (_UPDATE_MORE, changed)):
        if values:
            connection.executemany(statement, values)


def put(connection: sqlite3.Connection, insert: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows, many in a statement: between two of them another thread may take Python's lock.

    `insert` ends before its VALUES.
    """
    at = 0
    while at < len(rows):
        size = next(size for size in PUT if size <= len(rows) - at)
        some = rows[at : at + size]
        places = f"({', '.join('?' * len(some[0]))})"
        sql = f"{insert} VALUES {', '.join([places] * size)}"
        connection.execute(sql, [value for row in some for value in row])
        at += size


def rows_in(
    connection: sqlite3.Connection, sql: str, values: Sequence[Any], more: str = ""
) -> Iterator[Any]:
    """The rows of `sql` + a list of these values, some at a time. The last may be twice."""
    at = 0
    while at < len(values):
        left = len(values) - at
        size = next((size for size in SIZES if size >= left), SIZES[-1])
        some = list(values[at : at + size])
        some += some[-1:] * (size - len(some))
        yield from connection.execute(f"{sql} ({', '.join('?' * size)}){more}", some).fetchall()
        at += size


def _values(
    connection: sqlite3.Connection, codes: Codes, row: RunRow
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The sorted columns and the others. What is not shown keeps its place in the orders."""
    facts = row.told.facts(row.run_id)
    told = row.told.dumps()
    if facts is None:
        return (0, *row.columns[1:]), (row.description, None, 0, None, 0, 0, 0, told)

    known = codes.names
    loop, agent, split, stop_reason, error, model = [
        known[name] if name in known else codes.name(connection, name)
        for name in (
            *(facts.loop, facts.agent, facts.split, facts.stop_reason),
            *(facts.error, facts.model),
        )
    ]
    columns = (
        1,
        loop,
        ranked(facts.generation),
        agent,
        split,
        stop_reason,
        error,
        codes.set(connection, MODELS, facts.models),
        codes.set(connection, TAGS, facts.tags),
        facts.reward,
        facts.started,
        facts.task or "",
        ranked(facts.attempt),
    )
    more = (
        row.description,
        model,
        facts.infrastructure,
        facts.seconds,
        facts.calls,
        facts.prompt_tokens,
        facts.sampled_tokens,
        told,
    )
    return columns, more
