"""Intake: add events to the index's tables, forget them, and remove those of dropped segments.

All functions run in a transaction that index.py holds. Rows are read for many events at once,
merged in run_merge.py, and written at the end by run_rows.py.
"""

import sqlite3
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from cray_agents.runtime.store.index import run_rows
from cray_agents.runtime.store.index.codes import Codes
from cray_agents.runtime.store.index.run_merge import MergedRun
from cray_agents.runtime.store.index.run_rows import RunRow, rows_in
from cray_agents.runtime.store.index.schema import BY_RUN, FORGET, KEYS, KINDS
from cray_agents.runtime.store.segments.facts import Fact
from cray_agents.runtime.store.segments.line_format import Placed

if TYPE_CHECKING:
    from cray_agents.runtime.store.index.key_filter import KeyFilter

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


class Intake:
    """The intake of events of one segment; `replaces` are the numbers of segments it replaces.

    `seen` is given for a draft, whose keys are not sorted yet (unless one came twice).
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        codes: Codes,
        segment: int,
        replaces: Collection[int] = (),
        seen: "KeyFilter | None" = None,
    ) -> None:
        self._connection = connection
        self._codes = codes
        self._segment = segment
        self._replaces = replaces
        self._seen = seen
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
        if self._seen is not None:
            if self._seen.are_new(fresh):
                return
            self._connection.execute(KEYS)
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
        rows = run_rows.find(connection, list(by_run))
        last = connection.execute("SELECT coalesce(max(event), 0) FROM events").fetchone()[0]
        for run_id, events in by_run.items():
            row = rows[run_id]
            times = [fact.time for _, (fact, _) in events if fact.kind == "forget"]
            if times:
                _forget(connection, row, max(times))
            for key, (fact, place) in events:
                last += 1
                self._take_event(row, last, key, fact, place)
        run_rows.write(connection, self._codes, rows.values())
        run_rows.put(connection, "INSERT INTO events", self._events)
        run_rows.put(connection, "INSERT INTO asked", self._conversations)

    def _take_event(self, row: RunRow, event: int, key: bytes, fact: Fact, place: Any) -> None:
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
    row = run_rows.find(connection, [run_id])[run_id]
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
    run_rows.write(connection, codes, [row])
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
        row = run_rows.find(connection, [run_id])[run_id]
        sql = f"SELECT max(time) FROM events WHERE run = ? AND kind = {FORGET}"
        until = connection.execute(sql, (row.run,)).fetchone()[0]
        revive = f"UPDATE events SET dead = 0 WHERE run = ? AND kind != {FORGET} AND dead = 1"
        if until is not None:
            revive += f" AND time > {until!r}"
        connection.execute(revive, (row.run,))
        _hide(connection, row, until)
        run_rows.write(connection, codes, [row])
    return deleted > 0


def _forget(connection: sqlite3.Connection, row: RunRow, until: float) -> None:
    """Forget the events of a run up to a time."""
    if row.merged.forgotten is not None and row.merged.forgotten >= until:
        return
    row.merged.forgotten = until
    if row.new:
        return
    for statement in BY_RUN:  # a draft may lack these
        connection.execute(statement)
    kill = f"UPDATE events SET dead = 1 WHERE {_LIVE} AND time <= ?"
    if connection.execute(kill, (row.run, until)).rowcount:
        gone = "DELETE FROM asked WHERE run = ? AND time <= ?"
        connection.execute(gone, (row.run, until))
        _hide(connection, row, until)


def _hide(connection: sqlite3.Connection, row: RunRow, until: float | None) -> None:
    """Clear a run's row; mark the run as stale if it still has live events."""
    row.merged, row.description = _empty(until), None
    sql = f"SELECT EXISTS (SELECT 1 FROM events WHERE {_LIVE})"
    row.stale = bool(connection.execute(sql, (row.run,)).fetchone()[0])
    if row.stale:
        connection.execute("INSERT OR IGNORE INTO stale VALUES (?)", (row.run,))
    else:
        connection.execute("DELETE FROM stale WHERE run = ?", (row.run,))


def _conversation_row(row: RunRow, event: int, fact: Fact) -> tuple[Any, ...]:
    """Return the row of `asked` for a call that a conversation may continue."""
    return fact.time, event, row.run, fact.about["asked"], orjson.dumps(fact.about["said"])


def _empty(forgotten: float | None) -> MergedRun:
    merged = MergedRun()
    merged.forgotten = forgotten
    return merged
