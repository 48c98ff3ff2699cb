"""The index: which events there are, where they lie, and what is known of each run.

One SQLite file on this host's own disk, shared by its processes, and thrown away without a loss:
the segments hold everything. Filled and asked by store.py; any thread may ask.

The first page of any filter is found by a scan of an index that holds all that filters compare: at
1,000,000 runs less than a tenth of a second, also where few match or none (see schema.py). A tag or
model that is in more than 500 different sets of a run's tags or models takes up to ten times that.

Read next: schema.py, intake.py and merging.py (events in), filters.py and pages.py (runs out),
database.py (the file).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index import filters, intake
from cray_agents.runtime.store.index.codes import Codes
from cray_agents.runtime.store.index.database import Database
from cray_agents.runtime.store.index.filters import statistics
from cray_agents.runtime.store.index.intake import Intake, event_key
from cray_agents.runtime.store.index.pages import facts_in, page, start_of
from cray_agents.runtime.store.index.run_merge import RunFacts
from cray_agents.runtime.store.index.run_rows import rows_in
from cray_agents.runtime.store.index.schema import CALL, FORGET, REWARD
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed

PAGE = 1000  # runs, or conversations, read at once
CONVERSATIONS = 100_000  # calls kept that a conversation may go on from


class Problem(NamedTuple):
    """A stretch of a segment that cannot be read. `offset` in its lines, `at` in the file."""

    segment: str
    offset: int
    at: int
    length: int
    message: str


class Places(NamedTuple):
    """Where the live events of a run lie: its newest description, calls and rewards."""

    run: LinePlace | None
    calls: tuple[LinePlace, ...]
    rewards: tuple[LinePlace, ...]


class Index:
    """An index in the file `path`, of the segments whose root has this `identity`.

    A file of another schema, identity or boot of this machine, or that is damaged, is started
    again empty: `progress` then is {}. So it may be later, when damage is met or another process
    starts again: whoever adds must be ready to read from the beginning (see `add`).

    All methods raise StoreError where the disk refuses, or where damage is met: ask again then.
    """

    def __init__(
        self, path: Path, identity: str = "", *, conversations: int = CONVERSATIONS
    ) -> None:
        self._database = Database(path, identity)
        self._codes = Codes()
        self._coded: tuple[sqlite3.Connection, int] | None = None  # where the codes are good
        self._conversations = conversations
        self._asked = 0  # taken in since old ones were deleted

    def add(
        self,
        segment: str,
        start: int,
        end: int,
        placed: Sequence[Placed],
        replaces: Sequence[str] = (),
    ) -> int:
        """Take in what was read of a segment from `start` to `end`; returns how many were new.

        One transaction. Offsets are in the segment's uncompressed lines, the newline counted.
        Where the index does not yet stand at `start`, nothing is taken in and -1 returned: read on
        from `progress()`. What it knows already is left out, but for its place: an event that lies
        in a segment of `replaces` (a compaction wrote it anew) lies in this one from now on. When
        the whole of the new segment has been added, `drop(replaces)`.
        """
        with self._writing() as connection:
            ask = "SELECT segment, progress FROM segments WHERE name = ?"
            found = connection.execute(ask, (segment,)).fetchone()
            if start > (found[1] if found else 0):
                return -1
            number, progress = found or (_new_segment(connection, segment), 0)
            replaced = _numbers(connection, replaces)
            taking = Intake(connection, self._codes, number, replaced, self._database.seen)
            new = taking.take(placed)
            if end > progress:
                move = "UPDATE segments SET progress = ? WHERE segment = ?"
                connection.execute(move, (end, number))
            self._asked += taking.asked
            if self._asked > self._conversations // 10:
                self._asked = 0
                _delete_old(connection, self._conversations)
        return new

    def drop(self, segments: Sequence[str]) -> None:
        """These segments are gone: so are their events, problems and progress.

        Where something lay in two segments, the other one must be read again: its progress is 0.
        An `add` of what follows in it then is -1.
        """
        with self._writing() as connection:
            gone = _numbers(connection, segments)
            if gone and intake.drop(connection, self._codes, gone):
                again = "UPDATE segments SET progress = 0, doubles = 0 WHERE doubles > 0"
                connection.execute(again)
            connection.executemany("DELETE FROM segments WHERE segment = ?", [(n,) for n in gone])
            names = [(name,) for name in segments]
            connection.executemany("DELETE FROM problems WHERE segment = ?", names)

    def stale(self) -> list[str]:
        """Runs to `retell`: some of their events were forgotten or dropped, others are live.

        Until then they are in no answer but those of `places` and `live`.
        """
        ask = "SELECT id FROM stale CROSS JOIN runs USING (run)"  # in this order: few are stale
        return sorted(run_id for (run_id,) in self._all(ask))

    def retell(self, run_id: str, placed: Sequence[Placed]) -> bool:
        """Tell a stale run anew from its events (those of `live`, others do no harm).

        False, and nothing done, where a live event of the run is missing: ask `live` again.
        """
        with self._writing() as connection:
            return intake.retell(connection, self._codes, run_id, list(placed))

    def forgotten(self) -> dict[str, int]:
        """How many events of each segment were forgotten, of those with any."""
        ask = (
            "SELECT name, count(*) FROM events JOIN segments USING (segment)"
            f" WHERE dead = 1 AND kind != {FORGET} GROUP BY segment"
        )
        return dict(self._all(ask))

    def bulk(self) -> AbstractContextManager[None]:
        """Around many `add`s to an empty index: takes half the time; to another it does nothing.

        They go to a draft, with whatever other threads add here, that takes the file's place at the
        end. Till then others see the file as it was; only this thread's `progress` is the draft's.
        What other processes add meanwhile is lost and must be read again. Waits for another
        process that does the same, so ask for `progress` inside. Killed, it leaves nothing.
        """
        return self._database.filling()

    def note(self, segment: str, offset: int, at: int, length: int, message: str) -> None:
        """Remember damage, once for each segment and `at`."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO problems VALUES (?, ?, ?, ?, ?)",
                (segment, offset, at, length, message),
            )

    def problems(self) -> list[Problem]:
        """The damage that was noted, by segment and place; that of dropped segments is not."""
        return [Problem(*row) for row in self._all("SELECT * FROM problems")]

    def progress(self) -> dict[str, int]:
        """How far each segment has been read, in bytes of its uncompressed lines."""
        return dict(self._all("SELECT name, progress FROM segments"))

    def reset(self) -> None:
        """Throw everything away."""
        self._database.start_again()

    def has(self, event_id: str) -> bool:
        """Whether there is a live event of this id."""
        ask = "SELECT dead FROM events WHERE key = ?"
        with self._database.reading(often=True) as connection:
            row = connection.execute(ask, (event_key(event_id),)).fetchone()
        return row is not None and not row[0]

    def known(self, event_id: str) -> bool:
        """Whether there is an event of this id, forgotten or not."""
        ask = "SELECT 1 FROM events WHERE key = ?"
        with self._database.reading(often=True) as connection:
            return connection.execute(ask, (event_key(event_id),)).fetchone() is not None

    def place(self, event_id: str) -> LinePlace | None:
        """Where a live event lies."""
        ask = (
            "SELECT name, offset, length FROM events JOIN segments USING (segment)"
            " WHERE key = ? AND dead = 0"
        )
        with self._database.reading() as connection:
            row = connection.execute(ask, (event_key(event_id),)).fetchone()
        return None if row is None else LinePlace(*row)

    def places(self, run_ids: Sequence[str]) -> dict[str, Places]:
        """Where the live events of these runs lie; runs without any are left out.

        Calls and rewards in order of their event's time.
        """
        with self._database.reading() as connection:
            rows = set(rows_in(connection, _PLACES, run_ids, _PLACES_LIVE))
        found: dict[str, tuple[list[LinePlace], list[LinePlace], list[LinePlace]]] = {}
        for _, _, run_id, kind, newest, *place in sorted(rows):
            run, calls, rewards = found.setdefault(run_id, ([], [], []))
            if kind == CALL:
                calls.append(LinePlace(*place))
            elif kind == REWARD:
                rewards.append(LinePlace(*place))
            elif newest:
                run.append(LinePlace(*place))
        return {
            run_id: Places(run[0] if run else None, tuple(calls), tuple(rewards))
            for run_id, (run, calls, rewards) in found.items()
        }

    def newest(self, run_ids: Sequence[str]) -> dict[str, float]:
        """The time of the newest live event of each run; runs without any are left out."""
        with self._database.reading() as connection:
            return dict(rows_in(connection, _NEWEST, run_ids, f"{_PLACES_LIVE} GROUP BY id"))

    def live(self, run_id: str) -> list[LinePlace]:
        """Where all live events of a run lie, older descriptions too: what `retell` needs."""
        ask = (
            "SELECT name, offset, length FROM runs JOIN events USING (run)"
            f" JOIN segments USING (segment) WHERE id = ? AND dead = 0 AND kind != {FORGET}"
            " ORDER BY segment, offset"
        )
        return [LinePlace(*row) for row in self._all(ask, (run_id,))]

    def run(self, run_id: str) -> RunFacts | None:
        """What is known of a run. One that has only rewards is none."""
        ask = "SELECT id, told FROM runs WHERE id = ? AND shown = 1"
        with self._database.reading() as connection:
            row = connection.execute(ask, (run_id,)).fetchone()
        return None if row is None else facts_in(row)

    def select(self, query: RunQuery) -> list[RunFacts]:
        """A page of runs. Its `text` is ignored: only bodies tell. Raises NotFound for `after`."""
        with self._database.reading() as connection:
            return page(connection, query, start_of(connection, query), query.limit)

    def iterate(self, query: RunQuery) -> Iterator[RunFacts]:
        """All runs that `select` would give page by page, up to `limit`, in flat memory.

        A run that moves in the order meanwhile may come twice or not at all.
        """
        left = query.limit
        with self._database.reading() as connection:
            key = start_of(connection, query)
        while left is None or left > 0:
            most = PAGE if left is None else min(PAGE, left)
            with self._database.reading() as connection:
                runs = page(connection, query, key, most)
            yield from runs
            if len(runs) < most:
                return
            key = filters.key_of(query.order, runs[-1])
            left = None if left is None else left - most

    def count(self, query: RunFilter) -> int:
        """How many runs match; its `text` is ignored."""
        with self._database.reading() as connection:
            found = filters.where(connection, query, None)
            if found is None:
                return 0
            ask = f"SELECT count(*) FROM runs WHERE {found.sql}"
            return int(connection.execute(ask, found.values).fetchone()[0])

    def conversations(self) -> Iterator[tuple[str, str, list[str], str]]:
        """The newest calls a conversation may go on from, oldest first.

        Each is (asked, run id, ids of the tool calls, text said): see facts.py.
        """
        newest = "SELECT time, event FROM asked ORDER BY time DESC, event DESC LIMIT 1 OFFSET ?"
        last = next(iter(self._all(newest, (self._conversations,))), (-1e308, 0))
        while True:
            some = self._all(_ASKED, (*last, PAGE))
            for time, event, asked, run_id, said in some:
                last = (time, event)
                ids, text = orjson.loads(said)
                yield asked, run_id, ids, text
            if len(some) < PAGE:
                return

    def stats(self, query: RunFilter, by: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Counts and means of the matching runs, one row for each group, largest group first.

        `by`: any of agent, model, loop, generation, split, stop_reason, error, task, day (of UTC,
        `2026-01-31`). A row has these and: runs, rewarded, mean_reward, min_reward, max_reward,
        calls, prompt_tokens, sampled_tokens, errors, infrastructure, mean_seconds, p50_seconds,
        p95_seconds. Raises BadInput for another `by`.
        """
        with self._database.reading() as connection:
            return statistics(connection, query, by)

    def close(self) -> None:
        """Close the file; what was added stays."""
        self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._database.writing() as connection:
            here = (connection, self._database.undone)
            if here != self._coded:  # another file, or some were given in a transaction undone
                self._codes, self._coded = Codes(), here
            yield connection

    def _all(self, ask: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._database.reading() as connection:
            return connection.execute(ask, values).fetchall()


_PLACES = (
    "SELECT time, event, id, kind, event IS description, name, offset, length"
    " FROM runs CROSS JOIN events USING (run) CROSS JOIN segments USING (segment) WHERE id IN"
)
_PLACES_LIVE = f" AND dead = 0 AND kind != {FORGET}"
_NEWEST = "SELECT id, max(time) FROM runs CROSS JOIN events USING (run) WHERE id IN"
_ASKED = (
    "SELECT time, event, hash, id, said FROM asked JOIN runs USING (run)"
    " WHERE (time, event) > (?, ?) ORDER BY time, event LIMIT ?"
)


def _new_segment(connection: sqlite3.Connection, name: str) -> int:
    into = "INSERT INTO segments (name, progress) VALUES (?, 0)"
    return int(connection.execute(into, (name,)).lastrowid or 0)


def _numbers(connection: sqlite3.Connection, names: Sequence[str]) -> set[int]:
    """The numbers of the segments that are known."""
    ask = "SELECT segment FROM segments WHERE name IN"
    return {number for (number,) in rows_in(connection, ask, names)}


def _delete_old(connection: sqlite3.Connection, most: int) -> None:
    """Keep the newest conversations."""
    newest = "SELECT time FROM asked ORDER BY time DESC LIMIT 1 OFFSET ?"
    row = connection.execute(newest, (most,)).fetchone()
    if row is not None:
        connection.execute("DELETE FROM asked WHERE time < ?", row)
