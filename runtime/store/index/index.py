"""Index: look up the events of the store, their places, and the facts of each run.

It is one SQLite file on this host's own disk, used by all processes of the host. It may be deleted
without loss, for the segments hold everything. Filled and queried by store.py, in any thread.

The first page of any filter takes one scan of a SQLite index with all columns that filters compare
(database.py). With 1,000,000 runs that is a fraction of a second, also if few runs match or none.

Read next: intake.py and run_merge.py (adding events), run_queries.py (queries),
database.py (the file).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index import intake
from cray_agents.runtime.store.index.database import CALL, FORGET, REWARD, Codes, Database
from cray_agents.runtime.store.index.intake import Intake, event_key, rows_in
from cray_agents.runtime.store.index.run_merge import RunFacts
from cray_agents.runtime.store.index.run_queries import (
    RunStatistics,
    facts_in,
    key_of,
    match_condition,
    read_page,
    start_key,
)
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed
from cray_agents.runtime.store.segments.reader import Damage

PAGE = 1000  # runs, or conversations, read at once
CONVERSATIONS = 100_000  # calls kept that a conversation may continue


class Places(NamedTuple):
    """The places of a run's live events: its newest description, calls and rewards."""

    run: LinePlace | None
    calls: tuple[LinePlace, ...]
    rewards: tuple[LinePlace, ...]


class Index(RunStatistics):
    """An index in the file `path`, of the segments of the root with this `identity`.

    A damaged file, or one of another schema, identity or boot of this machine, is replaced by an
    empty one; `progress` is then {}. This may also happen later, on damage or by another process,
    so callers of `add` must be ready to read from the beginning.

    All methods raise StoreError on an error of the disk, or on damage: then call again.
    """

    def __init__(
        self, path: Path, identity: str = "", *, conversations: int = CONVERSATIONS
    ) -> None:
        self._database = Database(path, identity)
        self._codes = Codes()
        # the connection and the count of rollbacks for which the codes are valid
        self._coded: tuple[sqlite3.Connection, int] | None = None
        self._conversations = conversations
        self._new_conversations = 0  # added since old ones were deleted

    def add(
        self,
        segment: str,
        start: int,
        end: int,
        placed: Sequence[Placed],
        replaces: Sequence[str] = (),
    ) -> int:
        """Add the events of a segment from `start` to `end`. Return how many were new.

        This is one transaction. Offsets count bytes of the segment's uncompressed lines with their
        newlines. If the segment's progress is before `start`, nothing is added and -1 returned:
        read on from `progress()`. Known events are skipped. But a known event in a segment of
        `replaces`, the sources of a compaction, gets its new place. Call `drop(replaces)` after
        adding all of the new segment.
        """
        with self._writing() as connection:
            sql = "SELECT segment, progress FROM segments WHERE name = ?"
            known = connection.execute(sql, (segment,)).fetchone()
            if start > (known[1] if known else 0):
                return -1
            number, progress = known or (_insert_segment(connection, segment), 0)
            replaced = _numbers(connection, replaces)
            batch = Intake(connection, self._codes, number, replaced)
            new = batch.take(placed)
            if end > progress:
                move = "UPDATE segments SET progress = ? WHERE segment = ?"
                connection.execute(move, (end, number))
            self._new_conversations += batch.conversations
            if self._new_conversations > self._conversations // 10:
                self._new_conversations = 0
                _delete_old_conversations(connection, self._conversations)
        return new

    def drop(self, segments: Sequence[str]) -> None:
        """Remove segments with their events, problems and progress.

        Segments that shared an event with them must be read again: their progress becomes 0, and an
        `add` further on returns -1.
        """
        with self._writing() as connection:
            gone = _numbers(connection, segments)
            if gone and intake.drop(connection, self._codes, gone):
                read_again = "UPDATE segments SET progress = 0, doubles = 0 WHERE doubles > 0"
                connection.execute(read_again)
            connection.executemany("DELETE FROM segments WHERE segment = ?", [(n,) for n in gone])
            names = [(name,) for name in segments]
            connection.executemany("DELETE FROM problems WHERE segment = ?", names)

    def stale(self) -> list[str]:
        """Return the runs to rebuild: some of their events were forgotten or dropped, but not all.

        Until `rebuild_run` they appear in `places` and `live` only.
        """
        sql = "SELECT id FROM stale CROSS JOIN runs USING (run)"  # in this order: few are stale
        return sorted(run_id for (run_id,) in self._all(sql))

    def rebuild_run(self, run_id: str, placed: Sequence[Placed]) -> bool:
        """Rebuild a stale run from the events of `live`; further events do no harm.

        Return False, and change nothing, if a live event of the run is missing: call `live` again.
        """
        with self._writing() as connection:
            return intake.rebuild_run(connection, self._codes, run_id, list(placed))

    def forgotten(self) -> dict[str, int]:
        """Return the number of forgotten events of each segment that has any."""
        sql = (
            "SELECT name, count(*) FROM events JOIN segments USING (segment)"
            f" WHERE dead = 1 AND kind != {FORGET} GROUP BY segment"
        )
        return dict(self._all(sql))

    def note(self, segment: str, offset: int, at: int, length: int, message: str) -> None:
        """Record damage, once for each segment and place."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO problems VALUES (?, ?, ?, ?, ?)",
                (segment, offset, at, length, message),
            )

    def problems(self) -> list[Damage]:
        """Return the recorded damage of segments that were not dropped, sorted by place."""
        return [Damage(*row) for row in self._all("SELECT * FROM problems")]

    def progress(self) -> dict[str, int]:
        """Return how far each segment has been read, in bytes of its uncompressed lines."""
        return dict(self._all("SELECT name, progress FROM segments"))

    def has(self, event_id: str) -> bool:
        """Tell whether a live event has this id."""
        sql = "SELECT dead FROM events WHERE key = ?"
        with self._database.reading(often=True) as connection:
            row = connection.execute(sql, (event_key(event_id),)).fetchone()
        return row is not None and not row[0]

    def known(self, event_id: str) -> bool:
        """Tell whether an event has this id, forgotten or not."""
        sql = "SELECT 1 FROM events WHERE key = ?"
        with self._database.reading(often=True) as connection:
            return connection.execute(sql, (event_key(event_id),)).fetchone() is not None

    def place(self, event_id: str) -> LinePlace | None:
        """Return the place of a live event."""
        sql = (
            "SELECT name, offset, length FROM events JOIN segments USING (segment)"
            " WHERE key = ? AND dead = 0"
        )
        with self._database.reading() as connection:
            row = connection.execute(sql, (event_key(event_id),)).fetchone()
        return None if row is None else LinePlace(*row)

    def places(self, run_ids: Sequence[str]) -> dict[str, Places]:
        """Return the places of the live events of runs; runs without any are left out.

        Calls and rewards are in order of their event's time.
        """
        with self._database.reading() as connection:
            rows = set(rows_in(connection, _PLACES, run_ids, _PLACES_LIVE))
        by_run: dict[str, tuple[list[LinePlace], list[LinePlace], list[LinePlace]]] = {}
        for _, _, run_id, kind, newest, *place in sorted(rows):
            run, calls, rewards = by_run.setdefault(run_id, ([], [], []))
            if kind == CALL:
                calls.append(LinePlace(*place))
            elif kind == REWARD:
                rewards.append(LinePlace(*place))
            elif newest:
                run.append(LinePlace(*place))
        return {
            run_id: Places(run[0] if run else None, tuple(calls), tuple(rewards))
            for run_id, (run, calls, rewards) in by_run.items()
        }

    def newest(self, run_ids: Sequence[str]) -> dict[str, float]:
        """Return the time of the newest live event of each run that has any."""
        with self._database.reading() as connection:
            return dict(rows_in(connection, _NEWEST, run_ids, f"{_PLACES_LIVE} GROUP BY id"))

    def live(self, run_id: str) -> list[LinePlace]:
        """Return the places of all live events of a run, with older descriptions."""
        sql = (
            "SELECT name, offset, length FROM runs JOIN events USING (run)"
            f" JOIN segments USING (segment) WHERE id = ? AND dead = 0 AND kind != {FORGET}"
            " ORDER BY segment, offset"
        )
        return [LinePlace(*row) for row in self._all(sql, (run_id,))]

    def run(self, run_id: str) -> RunFacts | None:
        """Return the facts of a run; None if it is unknown or has only rewards."""
        sql = "SELECT id, told FROM runs WHERE id = ? AND shown = 1"
        with self._database.reading() as connection:
            row = connection.execute(sql, (run_id,)).fetchone()
        return None if row is None else facts_in(row)

    def run_state(self, run_id: str) -> bytes | None:
        """Return bytes that change with every event of a run; None as for `run`."""
        sql = "SELECT told FROM runs WHERE id = ? AND shown = 1"
        with self._database.reading() as connection:
            row = connection.execute(sql, (run_id,)).fetchone()
        return None if row is None else row[0]

    def iterate(self, query: RunQuery) -> Iterator[RunFacts]:
        """Yield all matching runs, up to `limit`, reading page by page in constant memory.

        The query's `text` is ignored. A run whose place in the order changes meanwhile may come
        twice or not at all. Raises NotFound for an unknown `after`.
        """
        left = query.limit
        with self._database.reading() as connection:
            key = start_key(connection, query)
        while left is None or left > 0:
            most = PAGE if left is None else min(PAGE, left)
            with self._database.reading() as connection:
                runs = read_page(connection, query, key, most)
            yield from runs
            if len(runs) < most:
                return
            key = key_of(query.order, runs[-1])
            left = None if left is None else left - most

    def count(self, query: RunFilter) -> int:
        """Return the number of matching runs; the query's `text` is ignored."""
        with self._database.reading() as connection:
            matching = match_condition(connection, query, None)
            if matching is None:
                return 0
            sql = f"SELECT count(*) FROM runs WHERE {matching.sql}"
            return int(connection.execute(sql, matching.values).fetchone()[0])

    def conversations(
        self, since: float | None = None
    ) -> Iterator[tuple[float, str, str, list[str], str]]:
        """Yield the calls that a conversation may continue, oldest first: the newest, or `since`.

        Each is (time, hash of the request, run id, ids of the tool calls, text of the answer); the
        last four are the arguments of `Conversations.learn`. Times are the calls' own, in unix
        seconds.
        """
        newest = "SELECT time, event FROM asked ORDER BY time DESC, event DESC LIMIT 1 OFFSET ?"
        before_all = since if since is not None else -1e308, 0
        known = self._all(newest, (self._conversations,)) if since is None else []
        last = known[0] if known else before_all
        while True:
            some = self._all(_CONVERSATIONS, (*last, PAGE))
            for time, event, request, run_id, answer in some:
                last = (time, event)
                ids, text = orjson.loads(answer)
                yield time, request, run_id, ids, text
            if len(some) < PAGE:
                return

    def _counting(self, query: RunFilter) -> AbstractContextManager[sqlite3.Connection]:
        return self.reading()

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Borrow a connection for reading. Raises StoreError."""
        return self._database.reading()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._database.writing() as connection:
            current = (connection, self._database.rollbacks)
            if current != self._coded:  # another file, or a rollback that may have removed codes
                self._codes, self._coded = Codes(), current
            yield connection

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._database.reading() as connection:
            return connection.execute(sql, values).fetchall()


_PLACES = (
    "SELECT time, event, id, kind, event IS description, name, offset, length"
    " FROM runs CROSS JOIN events USING (run) CROSS JOIN segments USING (segment) WHERE id IN"
)
_PLACES_LIVE = f" AND dead = 0 AND kind != {FORGET}"
_NEWEST = "SELECT id, max(time) FROM runs CROSS JOIN events USING (run) WHERE id IN"
_CONVERSATIONS = (
    "SELECT time, event, hash, id, said FROM asked JOIN runs USING (run)"
    " WHERE (time, event) > (?, ?) ORDER BY time, event LIMIT ?"
)


def _insert_segment(connection: sqlite3.Connection, name: str) -> int:
    into = "INSERT INTO segments (name, progress) VALUES (?, 0)"
    return int(connection.execute(into, (name,)).lastrowid or 0)


def _numbers(connection: sqlite3.Connection, names: Sequence[str]) -> set[int]:
    """Return the numbers of the known segments among these."""
    sql = "SELECT segment FROM segments WHERE name IN"
    return {number for (number,) in rows_in(connection, sql, names)}


def _delete_old_conversations(connection: sqlite3.Connection, most: int) -> None:
    """Delete all but the newest `most` conversations."""
    newest = "SELECT time FROM asked ORDER BY time DESC LIMIT 1 OFFSET ?"
    row = connection.execute(newest, (most,)).fetchone()
    if row is not None:
        connection.execute("DELETE FROM asked WHERE time < ?", row)
