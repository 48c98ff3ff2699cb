"""Change feed: which runs, jobs, loops, datasets, versions, batches, keys and replicas changed.

A client of /v1/events gets names of changes only and fetches what it shows. Changes of one thing
within a beat (a quarter of a second) are one. The feed looks only while it has readers: runs are
told by the store as they are recorded, the rest is noticed by the times of its files.

A cursor is `<feed>.<number>`. A feed is this process, or a shorter while: it gets another name
after a time without readers, in which nothing was noticed. A reader with the cursor of another
feed, or of a change that is no longer kept, is told to fetch everything anew (`reset`).
Called by gateway/routes/platform.py.
"""

import asyncio
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import BadInput, StoreError
from cray_agents.paths import ITERATIONS, Home
from cray_agents.runtime.background import BackgroundTasks, ChangeNotifier
from cray_agents.runtime.disk.durable import names_in
from cray_agents.runtime.store import Store

BEAT = 0.25  # seconds between two looks at what the store told
FILES = 2.0  # seconds between two looks at files, at least; and 20 times as long as a look takes
LINGER = 60.0  # seconds after its last reader until a feed stops
KEPT = 10_000  # changes for readers that come back
MANY = 500  # runs of a beat that are named; more are one change of the id ""
CURSOR = re.compile(r"([0-9a-f]{12})\.([0-9]{1,15})")

log = logging.getLogger(__name__)

Times = dict[tuple[str, str], int]  # by kind and id: the newest time of its files, in ns


class Change(NamedTuple):
    """A change of a thing; `number` counts the changes of its feed, from 1."""

    number: int
    kind: str
    id: str
    change: str


class ChangeFeed:
    """The changes under a home. For use on one event loop, but for `note_runs`.

    pool: returns a description of the replicas; another one than before is a change.
    shared: returns True where other processes record to the same store.
    """

    def __init__(
        self,
        home: Home,
        store: Store,
        pool: Callable[[], Any],
        shared: Callable[[], bool],
    ) -> None:
        self._home, self._store, self._pool, self._shared = home, store, pool, shared
        self._name = ""
        self._last = 0
        self._kept: deque[Change] = deque(maxlen=KEPT)
        self._readers = 0
        self._tasks = BackgroundTasks()
        self._follows = False
        self._news = ChangeNotifier()
        self._ready = asyncio.Event()  # changes from now on are noticed
        self._closed = False
        self._runs: dict[str, str] = {}  # by id: the change
        self._lock = threading.Lock()

    async def read(self, after: str | None, keep_alive: float) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events after a cursor, or from now on; comments keep it alive.

        It ends when the feed is closed. Raises BadInput for what is no cursor.
        """
        match = None if after is None else CURSOR.fullmatch(after)
        if after is not None and match is None:
            raise BadInput(f"after: {after[:50]!r} is no cursor of this stream", param="after")
        self._readers += 1
        try:
            if not self._follows:
                self._follows = True
                self._ready.clear()
                self._tasks.keep("change feed", self._follow)
            await self._ready.wait()
            yield b": ok\n\n"
            name, position = self._name, self._last
            if match is not None:
                reset = self._reset_reason(match[1], int(match[2]))
                if reset:
                    yield self._event(Change(self._last, "reset", "", reset))
                else:
                    position = int(match[2])
            while not self._closed:
                if self._last > position or self._name != name:
                    if reset := self._reset_reason(name, position):
                        yield self._event(Change(self._last, "reset", "", reset))
                    else:
                        newer = (c for c in self._kept if c.number > position)
                        yield b"".join(map(self._event, newer))
                    name, position = self._name, self._last
                    continue
                try:
                    async with asyncio.timeout(keep_alive):
                        await self._news.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"
        finally:
            self._readers -= 1

    def note_runs(self, run_ids: Iterable[tuple[str, str]]) -> None:
        """Take (run, change) pairs that the store has learnt of; from any thread."""
        with self._lock:
            self._runs.update(run_ids)

    async def close(self) -> None:
        """End the feed and its readers."""
        self._closed = True
        self._news.notify()
        self._ready.set()
        await self._tasks.close()

    def _reset_reason(self, name: str, number: int) -> str:
        """Return why a reader at this place must fetch everything anew; "" if it need not."""
        if name != self._name or number > self._last:
            return "restarted"
        oldest = self._kept[0].number if self._kept else self._last + 1
        return "lagged" if number + 1 < oldest else ""

    def _event(self, change: Change) -> bytes:
        data = orjson.dumps({"kind": change.kind, "id": change.id, "change": change.change})
        return b"id: %s.%d\ndata: %s\n\n" % (self._name.encode(), change.number, data)

    async def _follow(self) -> None:
        """Notice changes until nobody has read for a while."""
        self._name, self._last = os.urandom(6).hex(), 0
        self._kept.clear()
        self._runs.clear()
        self._store.watch(self.note_runs)
        try:
            before, pool = await asyncio.to_thread(self._look, Times()), self._state()
            self._ready.set()
            self._news.notify()
            look_at, last_reader = time.monotonic() + FILES, time.monotonic()
            while self._readers or time.monotonic() - last_reader < LINGER:
                await asyncio.sleep(BEAT)
                changes = self._run_changes()
                now = time.monotonic()
                last_reader = now if self._readers else last_reader
                if now >= look_at:
                    times = await asyncio.to_thread(self._look, before)
                    changed = [key for key in times if times[key] != before.get(key)]
                    changed += [key for key in before if key not in times]
                    changes += [(*key, "changed") for key in sorted(changed)]
                    took = time.monotonic() - now
                    before, look_at = times, time.monotonic() + max(FILES, 20 * took)
                if (state := self._state()) != pool:
                    pool = state
                    changes.append(("pool", "", "changed"))
                for change in changes:
                    self._last += 1
                    self._kept.append(Change(self._last, *change))
                if changes:
                    self._news.notify()
            self._follows = False
        finally:
            self._store.watch(None)

    def _run_changes(self) -> list[tuple[str, str, str]]:
        with self._lock:
            runs, self._runs = self._runs, {}
        if len(runs) > MANY:
            return [("run", "", "appended")]
        return [("run", run_id, change) for run_id, change in runs.items()]

    def _state(self) -> bytes:
        return orjson.dumps(self._pool(), default=str)

    def _look(self, before: Times) -> Times:
        """Return the times now; those of before where the disk fails for a while."""
        try:
            return self._times()
        except (StoreError, OSError) as error:
            log.warning("changes of files are noticed later: %s", error)
            return before

    def _times(self) -> Times:
        """Return the newest time of the files of each thing, but for runs and replicas."""
        if self._shared():
            self._store.refresh()  # tells of the runs that other processes recorded
        home, times = self._home, Times()
        for kind, folder, inner in (
            ("job", home.jobs, ("events.jsonl", "status.json", "attempts", "pauses", ".")),
            ("loop", home.loops, (ITERATIONS, "journal")),
            ("dataset", home.datasets, ("manifest.json",)),
            ("model", home.models, (".", "history", "canaries")),
            ("batch", home.batches, (".", "done", "results", "claims")),
        ):
            for name in names_in(folder):
                if not name.startswith("."):
                    times[kind, name] = max(_time(folder / name / each) for each in inner)
        times["key", ""] = _time(home.keys)
        return times


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
