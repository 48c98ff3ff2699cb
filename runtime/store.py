"""The store: every call, run and reward, durable when `append` returns, once each.

The gateway appends and asks; the dataset builder asks. Events lie in segments.py's files under the
shared root, one writer a file; run_index.py holds in memory where; assembly.py makes Run records.
Files of other writers are read on when they have grown.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from cray_agents.errors import Corrupt, NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.records import Event, Run, new_id
from cray_agents.runtime.assembly import assemble
from cray_agents.runtime.conversations import Conversations
from cray_agents.runtime.run_index import Entry, RunIndex, RunQuery
from cray_agents.runtime.segments import Place, SegmentWriter, fetch, read_lines

log = logging.getLogger(__name__)

Calls = Literal["full", "none"]


class Appended(NamedTuple):
    """How many events were new, and how many the store had already."""

    appended: int
    duplicates: int


@dataclass(frozen=True)
class Problem:
    """A line that could not be used and was skipped."""

    path: str
    offset: int
    message: str


@dataclass
class _Progress:
    """How far another writer's file has been read."""

    offset: int = 0


class Store:
    """The events under one home. `append` belongs to one event loop; asking to any thread.

    Opening reads all segments. `problems` lists the lines that were skipped, with their places.
    """

    def __init__(self, home: Home, writer: str | None = None) -> None:
        self.problems: list[Problem] = []
        self._directory = home.segments
        self._writer = SegmentWriter(home.segments, writer or new_id("segment"))
        self._index = RunIndex()
        self._pending: dict[str, asyncio.Future[list[Place]]] = {}
        self._progress: dict[Path, _Progress] = {}
        self._index_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self.refresh()

    async def append(self, events: Sequence[Event]) -> Appended:
        """Put events on the disk; those whose id is known are left out. Raises StoreError.

        When this returns, they are all durable, also those another append is still writing. If it
        is cancelled, the writing goes on.
        """
        fresh: dict[str, Event] = {}
        waits: list[asyncio.Future[list[Place]]] = []
        for event in events:
            if event.id in self._pending:
                waits.append(self._pending[event.id])
            elif event.id not in fresh and event.id not in self._index.places:
                fresh[event.id] = event
        if fresh:
            waits.append(self._submit(list(fresh.values())))
        for wait in waits:
            await asyncio.shield(wait)
        return Appended(len(fresh), len(events) - len(fresh))

    def run(self, run_id: str) -> Run:
        """One run, whole. Raises NotFound, or Corrupt if its events cannot be read."""
        self.refresh()
        with self._index_lock:
            entry = self._index.get(run_id)
            if entry is None or not (entry.run or entry.calls):
                raise NotFound(f"no run {run_id!r} is recorded", param="run_id")
            wanted = {run_id: _places(entry, "full")}
        runs = self._assemble(wanted)
        if not runs:
            raise Corrupt(f"the events of run {run_id!r} cannot be read: see the platform's log")
        return runs[0]

    def runs(self, query: RunQuery | None = None, calls: Calls = "full") -> list[Run]:
        """The matching runs, by run id. With calls "none" their turns name calls without them."""
        self.refresh()
        with self._index_lock:
            entries = self._index.select(query or RunQuery())
            wanted = {entry.run_id: _places(entry, calls) for entry in entries}
        return self._assemble(wanted)

    def whole(self, run_ids: Sequence[str]) -> list[Run]:
        """These runs with their calls, in this order; unknown and unreadable ones are left out."""
        with self._index_lock:
            entries = [e for e in map(self._index.get, run_ids) if e is not None]
            wanted = {e.run_id: _places(e, "full") for e in entries if e.run or e.calls}
        return self._assemble(wanted)

    @property
    def conversations(self) -> Conversations:
        """Which run a conversation goes on with."""
        return self._index.conversations

    def has(self, event_id: str) -> bool:
        """Whether there is an event of this id."""
        return event_id in self._index.places

    def body(self, event_id: str) -> dict[str, Any]:
        """The body of an event, as it was appended. Raises KeyError."""
        place = self._index.places[event_id]
        body: dict[str, Any] = orjson.loads(fetch([place])[0])["body"]
        return body

    def refresh(self) -> None:
        """Read on in other writers' files."""
        with self._refresh_lock:
            for path in sorted(self._directory.glob("*.jsonl")):
                if not self._writer.owns(path):
                    self._read_on(path, self._progress.setdefault(path, _Progress()))

    async def close(self) -> None:
        """Wait for what is being written."""
        await self._writer.close()

    def _submit(self, events: list[Event]) -> "asyncio.Future[list[Place]]":
        lines = [_line(event) for event in events]
        written = self._writer.submit(lines)
        for event in events:
            self._pending[event.id] = written
        written.add_done_callback(partial(self._written, events))
        return written

    def _written(self, events: list[Event], written: "asyncio.Future[list[Place]]") -> None:
        for event in events:
            del self._pending[event.id]
        if written.exception() is not None:
            return
        with self._index_lock:
            for event, place in zip(events, written.result(), strict=True):
                self._index.add(_plain(event), place)

    def _read_on(self, path: Path, progress: _Progress) -> None:
        try:
            if path.stat().st_size <= progress.offset:
                return
            for place, line in read_lines(path, progress.offset):
                progress.offset = place.offset + place.length + 1
                self._take(place, line)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def _take(self, place: Place, line: bytes) -> None:
        try:
            event = orjson.loads(line)
            with self._index_lock:
                self._index.add(event, place)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._skip(place, f"not an event ({error!r})")

    def _skip(self, place: Place, message: str) -> None:
        self.problems.append(Problem(place.path, place.offset, message))
        log.warning("skipped a line of %s at byte %d: %s", place.path, place.offset, message)

    def _assemble(self, wanted: dict[str, list[Place]]) -> list[Run]:
        lines = iter(fetch([place for places in wanted.values() for place in places]))
        runs = []
        for run_id, places in wanted.items():
            found = [next(lines) for _ in places]
            try:
                runs.append(_join(run_id, [orjson.loads(line) for line in found]))
            except ValueError as error:  # pydantic's and orjson's errors are ValueErrors
                self._skip(places[0], f"run {run_id} cannot be read ({error})")
        return runs


def _line(event: Event) -> bytes:
    try:
        return orjson.dumps(_plain(event))
    except TypeError as error:  # orjson's JSONEncodeError is one
        raise StoreError(f"event {event.id} is not JSON: {error}") from error


def _plain(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "run_id": event.run_id,
        "kind": event.kind,
        "time": event.time,
        "body": event.body,
    }


def _places(entry: Entry, calls: Calls) -> list[Place]:
    """What must be read for a run. One without a description is told by its calls."""
    described = [entry.run] if entry.run is not None else []
    with_calls = calls == "full" or not described
    return [*described, *(entry.calls if with_calls else ()), *entry.rewards]


def _join(run_id: str, events: list[dict[str, Any]]) -> Run:
    bodies: dict[str, list[dict[str, Any]]] = {"run": [], "call": [], "reward": []}
    for event in events:
        bodies[event["kind"]].append(event["body"])
    described = bodies["run"][0] if bodies["run"] else None
    return assemble(run_id, described, bodies["call"], bodies["reward"])
