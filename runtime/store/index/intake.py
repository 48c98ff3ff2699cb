"""Intake: add events to the index's tables, forget them, and remove those of dropped segments.

All functions run in a transaction that index.py holds. Rows of runs are read for many events at
once, merged in run_merge.py, and written at the end. A row's columns follow from the merged facts
of its run. Columns that queries sort or select by are written only when they change, since each is
in three indexes.
"""

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from cray_agents.runtime.store.index.database import FORGET, KINDS, Codes, any_version, to_rank
from cray_agents.runtime.store.index.run_merge import MergedRun
from cray_agents.runtime.store.segments.line_format import Fact, Placed

PUT = (256, 64, 16, 4, 1)  # rows inserted by one statement
SIZES = (1, 16, 128, 1024)  # values in one SELECT; few sizes, so few statements to prepare

_SORTED = [
    *("shown", "loop", "iteration", "agent", "split", "stop_reason", "error"),
    *("models", "tags", "reward", "started", "task", "attempt"),
]
_MORE = [
    *("description", "model", "infrastructure", "seconds", "calls", "prompt", "sampled"),
    *("cached", "turns", "owner", "told"),
]
_FIND = (
    f"SELECT id, run, description, told, run IN (SELECT run FROM stale), {', '.join(_SORTED)}"
    " FROM runs WHERE id IN"
)
_INSERT = f"INSERT INTO runs (run, id, {', '.join(_SORTED + _MORE)})"
_UPDATE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _SORTED + _MORE)} WHERE run = ?"
_UPDATE_MORE = f"UPDATE runs SET {', '.join(f'{name} = ?' for name in _MORE)} WHERE run = ?"
_HIDDEN = (0, None, 0, None, None, None, None, "", "", None, 0.0, "", 0)
_LIVE = f"run = ? AND dead = 0 AND kind != {FORGET}"


def event_key(event_id: str) -> bytes:
    """Return the 16-byte key of an event.

    The key of an id that begins with a time (records.new_id) begins with that time too. Events
    written at about the same time then lie together, and an index of millions grows at its end.
    """
    name = event_id.encode()
    if event_id[-26:-25] == "_":
        try:
            when = bytes.fromhex("0" + event_id[-25:-14])
        except ValueError:
            when = b""
        if len(when) == 6:
            return when + blake2b(name, digest_size=10).digest()
    return blake2b(name, digest_size=16).digest()


class _RunRow:
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


class Intake:
    """The intake of events of one segment; `replaces` are the numbers of segments it replaces."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        codes: Codes,
        segment: int,
        replaces: Collection[int] = (),
    ) -> None:
        self._connection = connection
        self._codes = codes
        self._segment = segment
        self._replaces = replaces
        self._events: list[tuple[Any, ...]] = []
        self._conversations: list[tuple[Any, ...]] = []  # rows of the table `asked`

    def take(self, placed: Sequence[Placed]) -> int:
        """Index events. Return how many were new."""
        fresh: dict[bytes, Placed] = {}
        for one in placed:
            fresh.setdefault(event_key(one[0].id), one)
        self._leave_out_known(fresh)
        if fresh:
            self._take_in(fresh)
        return len(fresh)

    @property
    def conversations(self) -> int:
        """The number of conversations indexed so far."""
        return len(self._conversations)

    def _leave_out_known(self, fresh: dict[bytes, Placed]) -> None:
        """Drop known events from `fresh`; those of replaced segments get their new place."""
        moved, doubles = [], 0
        sql = "SELECT key, event, segment FROM events WHERE key IN"
        for key, event, segment in rows_in(self._connection, sql, list(fresh)):
            if key not in fresh:
                continue  # rows_in may repeat a row
            _, place = fresh.pop(key)
            if segment in self._replaces:
                moved.append((self._segment, place.offset, place.length, event))
            elif segment != self._segment:
                doubles += 1
        if moved:
            move = "UPDATE events SET segment = ?, offset = ?, length = ? WHERE event = ?"
            self._connection.executemany(move, moved)
        if doubles:
            count = "UPDATE segments SET doubles = doubles + ? WHERE segment = ?"
            self._connection.execute(count, (doubles, self._segment))

    def _take_in(self, fresh: dict[bytes, Placed]) -> None:
        connection = self._connection
        by_run: dict[str, list[tuple[bytes, Placed]]] = {}
        for key, one in fresh.items():
            by_run.setdefault(one[0].run_id, []).append((key, one))
        rows = _find(connection, list(by_run))
        last = connection.execute("SELECT coalesce(max(event), 0) FROM events").fetchone()[0]
        for run_id, events in by_run.items():
            row = rows[run_id]
            times = [fact.time for _, (fact, _) in events if fact.kind == "forget"]
            if times:
                _forget(connection, row, max(times))
            for key, (fact, place) in events:
                last += 1
                self._take_event(row, last, key, fact, place)
        _write(connection, self._codes, rows.values())
        _put(connection, "INSERT INTO events", self._events)
        _put(connection, "INSERT INTO asked", self._conversations)

    def _take_event(self, row: _RunRow, event: int, key: bytes, fact: Fact, place: Any) -> None:
        until = row.merged.forgotten
        kind = KINDS[fact.kind]
        dead = until is not None and kind != FORGET and fact.time <= until
        _, offset, length = place
        self._events.append(
            (event, key, row.run, kind, self._segment, offset, length, fact.time, dead)
        )
        if dead:
            return
        if fact.about.get("asked"):
            self._conversations.append(_conversation_row(row, event, fact))
        if not row.stale and row.merged.take(fact):
            row.description = event


def rebuild_run(
    connection: sqlite3.Connection, codes: Codes, run_id: str, placed: list[Placed]
) -> bool:
    """Rebuild a run's row from all its live events. Return False if one is missing."""
    row = _find(connection, [run_id])[run_id]
    if row.new:
        return True  # no such run any more
    given = {event_key(fact.id): fact for fact, _ in placed}
    live = connection.execute(f"SELECT event, key FROM events WHERE {_LIVE}", (row.run,)).fetchall()
    if not all(key in given for _, key in live):
        return False
    row.merged, row.description, row.stale = _empty(row.merged.forgotten), None, False
    for event, key in live:
        fact = given[key]
        if row.merged.take(fact):
            row.description = event
        if fact.about.get("asked"):
            values = _conversation_row(row, event, fact)
            connection.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?, ?, ?)", values)
    connection.execute("DELETE FROM stale WHERE run = ?", (row.run,))
    _write(connection, codes, [row])
    return True


def drop(connection: sqlite3.Connection, codes: Codes, segments: Collection[int]) -> bool:
    """Remove the events of segments; their runs become stale. Return whether there were any."""
    in_segments = f"segment IN ({', '.join(map(str, segments))})"
    counted = f"(dead = 0 OR kind = {FORGET})"
    run_numbers = f"SELECT run FROM events WHERE {in_segments} AND {counted}"
    ids = connection.execute(f"SELECT id FROM runs WHERE run IN ({run_numbers})").fetchall()
    events = f"SELECT event FROM events WHERE {in_segments}"
    connection.execute(f"DELETE FROM asked WHERE event IN ({events})")
    deleted = connection.execute(f"DELETE FROM events WHERE {in_segments}").rowcount
    for (run_id,) in ids:
        row = _find(connection, [run_id])[run_id]
        sql = f"SELECT max(time) FROM events WHERE run = ? AND kind = {FORGET}"
        until = connection.execute(sql, (row.run,)).fetchone()[0]
        revive = f"UPDATE events SET dead = 0 WHERE run = ? AND kind != {FORGET} AND dead = 1"
        if until is not None:
            revive += f" AND time > {until!r}"
        connection.execute(revive, (row.run,))
        _hide(connection, row, until)
        _write(connection, codes, [row])
    return deleted > 0


def _forget(connection: sqlite3.Connection, row: _RunRow, until: float) -> None:
    """Forget the events of a run up to a time."""
    if row.merged.forgotten is not None and row.merged.forgotten >= until:
        return
    row.merged.forgotten = until
    if row.new:
        return
    kill = f"UPDATE events SET dead = 1 WHERE {_LIVE} AND time <= ?"
    if connection.execute(kill, (row.run, until)).rowcount:
        gone = "DELETE FROM asked WHERE run = ? AND time <= ?"
        connection.execute(gone, (row.run, until))
        _hide(connection, row, until)


def _hide(connection: sqlite3.Connection, row: _RunRow, until: float | None) -> None:
    """Clear a run's row; mark the run as stale if it still has live events."""
    row.merged, row.description = _empty(until), None
    sql = f"SELECT EXISTS (SELECT 1 FROM events WHERE {_LIVE})"
    row.stale = bool(connection.execute(sql, (row.run,)).fetchone()[0])
    if row.stale:
        connection.execute("INSERT OR IGNORE INTO stale VALUES (?)", (row.run,))
    else:
        connection.execute("DELETE FROM stale WHERE run = ?", (row.run,))


def _conversation_row(row: _RunRow, event: int, fact: Fact) -> tuple[Any, ...]:
    """Return the row of `asked` for a call that a conversation may continue."""
    return fact.time, event, row.run, fact.about["asked"], orjson.dumps(fact.about["said"])


def _empty(forgotten: float | None) -> MergedRun:
    merged = MergedRun()
    merged.forgotten = forgotten
    return merged


def _find(connection: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, _RunRow]:
    """Return the rows of runs, with a new row for each run without one."""
    rows: dict[str, _RunRow] = {}
    for run_id, run, description, merged, stale, *columns in rows_in(connection, _FIND, run_ids):
        row = rows[run_id] = _RunRow(run_id, run)
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
                rows[run_id] = _RunRow(run_id, last)
    return rows


def _write(connection: sqlite3.Connection, codes: Codes, rows: Iterable[_RunRow]) -> None:
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
    _put(connection, _INSERT, inserted)
    for statement, values in ((_UPDATE, updated), (_UPDATE_MORE, changed)):
        if values:
            connection.executemany(statement, values)


def _put(connection: sqlite3.Connection, insert: str, rows: Sequence[Sequence[Any]]) -> None:
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
    connection: sqlite3.Connection, codes: Codes, row: _RunRow
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the sorted and the other columns. A hidden run keeps its place in the orders."""
    facts = row.merged.facts(row.run_id)
    merged = row.merged.dumps()
    if facts is None:
        hidden = (row.description, None, 0, None, 0, 0, 0, 0, 0, None, merged)
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
        to_rank(facts.iteration),
        agent,
        split,
        stop_reason,
        error,
        codes.several(connection, [*facts.models, *sorted({*map(any_version, facts.models)})]),
        codes.several(connection, facts.tags),
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
        facts.cached_tokens,
        facts.turns,
        owner,
        merged,
    )
    return columns, more
