"""Run rows: read and write many rows of the index's table `runs` at once.

A row's columns follow from the merged facts of its run (run_merge.py). Columns that queries sort or
select by are written only when they change, since each is in three indexes. Used by intake.py.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cray_agents.runtime.store.index.codes import MODELS, TAGS, Codes
from cray_agents.runtime.store.index.filters import to_rank
from cray_agents.runtime.store.index.run_merge import MergedRun

PUT = (256, 64, 16, 4, 1)  # rows inserted by one statement
SIZES = (1, 16, 128, 1024)  # values in one SELECT; few sizes, so few statements to prepare

_SORTED = [
    *("shown", "loop", "generation", "agent", "split", "stop_reason", "error"),
    *("models", "tags", "reward", "started", "task", "attempt"),
]
_MORE = [
    *("description", "model", "infrastructure", "seconds", "calls", "prompt", "sampled"),
    *("turns", "owner", "told"),
]
_FIND = (
    f"SELECT id, run, description, told, run IN (SELECT run FROM stale), {', '.join(_SORTED)}"
    " FROM runs WHERE id IN"
)
_INSERT = f"INSERT INTO runs (run, id, {', '.join(_SORTED + _MORE)})"
_UPDATE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _SORTED + _MORE)} WHERE run = ?"
_UPDATE_MORE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _MORE)} WHERE run = ?"
_HIDDEN = (0, None, 0, None, None, None, None, 0, 0, None, 0.0, "", 0)


class RunRow:
    """A row of `runs`. `columns` are its sorted columns as they are in the table."""

    __slots__ = ("columns", "description", "merged", "new", "run", "run_id", "stale")

    def __init__(self, run_id: str, run: int) -> None:
        self.run_id = run_id
        self.run = run
        self.new = True
        self.stale = False
        self.description: int | None = None
        self.merged = MergedRun()
        self.columns: tuple[Any, ...] = _HIDDEN


def find(connection: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, RunRow]:
    """Return the rows of runs, with a new RunRow for each run without one."""
    rows: dict[str, RunRow] = {}
    for run_id, run, description, merged, stale, *columns in rows_in(connection, _FIND, run_ids):
        row = rows[run_id] = RunRow(run_id, run)
        row.new = False
        row.stale = bool(stale)
        row.description = description
        row.merged = MergedRun(merged)
        row.columns = tuple(columns)
    if len(rows) < len(run_ids):
        last = connection.execute("SELECT coalesce(max(run), 0) FROM runs").fetchone()[0]
        for run_id in run_ids:
            if run_id not in rows:
                last += 1
                rows[run_id] = RunRow(run_id, last)
    return rows


def write(connection: sqlite3.Connection, codes: Codes, rows: Iterable[RunRow]) -> None:
    """Insert or update rows in the table."""
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
    """Insert rows, many in a statement; `insert` ends before its VALUES.

    Fewer statements give other threads fewer chances to take Python's lock.
    """
    at = 0
    while at < len(rows):
        size = next(size for size in PUT if size <= len(rows) - at)
        some = rows[at : at + size]
        marks = f"({', '.join('?' * len(some[0]))})"
        sql = f"{insert} VALUES {', '.join([marks] * size)}"
        connection.execute(sql, [value for row in some for value in row])
        at += size


def rows_in(
    connection: sqlite3.Connection, sql: str, values: Sequence[Any], more: str = ""
) -> Iterator[Any]:
    """Yield the rows of `sql` + a list of the values + `more`. The last row may come twice."""
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
    """Return the sorted and the other columns. A hidden run keeps its place in the orders."""
    facts = row.merged.facts(row.run_id)
    merged = row.merged.dumps()
    if facts is None:
        hidden = (row.description, None, 0, None, 0, 0, 0, 0, None, merged)
        return (0, *row.columns[1:]), hidden

    known = codes.names
    loop, agent, split, stop_reason, error, model, owner = [
        known[name] if name in known else codes.name(connection, name)
        for name in (
            *(facts.loop, facts.agent, facts.split, facts.stop_reason),
            *(facts.error, facts.model, facts.owner),
        )
    ]
    columns = (
        1,
        loop,
        to_rank(facts.generation),
        agent,
        split,
        stop_reason,
        error,
        codes.set(connection, MODELS, facts.models),
        codes.set(connection, TAGS, facts.tags),
        facts.reward,
        facts.started,
        facts.task or "",
        to_rank(facts.attempt),
    )
    more = (
        row.description,
        model,
        facts.infrastructure,
        facts.seconds,
        facts.calls,
        facts.prompt_tokens,
        facts.sampled_tokens,
        facts.turns,
        owner,
        merged,
    )
    return columns, more
