"""The store: every call, run and reward, durable when `append` returns, once each.

The gateway appends and queries; loops, datasets and exports query. Events lie in segments under the
shared root, one writer a file. The index, on this host's own disk, knows their places. Each query
first reads what other writers added. Read next: segments/, index/, indexing.py, assembly.py.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

from cray_agents.errors import BadInput, Corrupt, NotFound, StoreError, store_errors
from cray_agents.exact_json import dump_json
from cray_agents.messages import text_of
from cray_agents.paths import Home
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import Event, Run, new_id
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.group_commit import CommitCounts
from cray_agents.runtime.disk.turns import between_pieces, undivided
from cray_agents.runtime.store.assembly import assemble
from cray_agents.runtime.store.call_deltas import BRANCHES, KnownCall, KnownCalls, WholeCalls
from cray_agents.runtime.store.conversations import Conversations
from cray_agents.runtime.store.index import Index, Places, RunFacts, cache_of, identity_of
from cray_agents.runtime.store.index.run_queries import RunStatistics
from cray_agents.runtime.store.indexing import Indexing, catch_up
from cray_agents.runtime.store.redaction import Redactor
from cray_agents.runtime.store.segments.line_format import (
    Fact,
    LinePlace,
    Placed,
    event_in,
    facts_of,
    line_of,
)
from cray_agents.runtime.store.segments.reader import Damage, Moved, Segments
from cray_agents.runtime.store.segments.repair import ORPHANED, seal_orphans
from cray_agents.runtime.store.segments.writer import SegmentWriter

log = logging.getLogger(__name__)

PAGE = 256  # runs whose bodies are read at once
FORGETTING = 1000  # runs forgotten in one append
RECORDED_LATE = 10.0  # seconds from a call's time until it is in the index, at most
ROUND = 80  # characters on each side of what a search found
TRIES = 5  # to read events that compaction moves meanwhile

Calls = Literal["full", "none"]
Tell = Callable[[Iterable[tuple[str, str]]], None]
Result = TypeVar("Result")


class Appended(NamedTuple):
    """Counts of an append: new events, and events that the store had already."""

    appended: int
    duplicates: int


class _Line(NamedTuple):
    """An event as it is written; `known`: a call from which later ones may go on."""

    fact: Fact
    text: bytes
    known: KnownCall | None


class Store(RunStatistics):
    """The events under one home. `append` belongs to one event loop; queries run in any thread.

    `redactor` removes sensitive text from events before they are written. Queries first read what
    other writers added; the first query on a host reads everything.
    """

    def __init__(
        self, home: Home, writer: str | None = None, *, redactor: Redactor | None = None
    ) -> None:
        self.home = home
        self.conversations = Conversations()
        self._known_calls = KnownCalls()
        self._last_read: tuple[Any, dict[str, dict[str, Any]]] = (None, {})
        self.segments = Segments(home.segments)
        self.identity = identity_of(home)
        self.index = Index(cache_of(home), self.identity)
        self._indexing = Indexing(self.index, self._on_indexed)
        name = writer or new_id("segment")
        self._writer = SegmentWriter(home.segments, name, self._indexing.submit)
        self._redactor = redactor
        # the write of each event, by id, until the event is in the index
        self._pending: dict[str, asyncio.Future[list[LinePlace]]] = {}
        self._acknowledged = 0  # events that are on the disk
        self._refreshing = threading.Lock()
        self._watcher: Tell | None = None
        self._conversations_until = time.time()  # those recorded before are known
        for _, request, run_id, call_ids, text in self.index.conversations():
            self.conversations.learn(request, run_id, call_ids, text)
        self.refresh()

    async def append(
        self, events: Sequence[Event], *, new: bool = False, many: bool = False
    ) -> Appended:
        """Put events on the disk, except those whose id is known. Raises StoreError.

        All are durable when this returns, also those that another append is writing. The writing
        goes on if this is cancelled. `new` skips the look-up of ids that were just made. `many`
        events, or large ones, become lines in a thread, and not on the event loop.
        """
        lines = await asyncio.to_thread(self._lines, events, new) if many else {}
        fresh: dict[str, _Line] = {}
        newer: dict[str, list[KnownCall]] = {}
        waits: list[asyncio.Future[list[LinePlace]]] = []
        for event in events:
            pending = self._pending.get(event.id)
            if pending is not None:
                waits.append(pending)
            elif many and event.id in lines:
                fresh[event.id] = lines[event.id]
            elif not many and event.id not in fresh and (new or not self.index.known(event.id)):
                fresh[event.id] = self._line(event, newer)
        if fresh:
            waits.append(self._submit(list(fresh.values())))
        for wait in waits:
            await asyncio.shield(wait)
        return Appended(len(fresh), len(events) - len(fresh))

    async def forget(self, run_ids: Iterable[str], reason: str) -> int:
        """Hide runs from all queries. Return their number. Compaction removes their bytes."""
        ids, count = iter(run_ids), 0
        while some := list(islice(ids, FORGETTING)):
            newest = await asyncio.to_thread(self._newest_times, some)
            now = time.time()
            await self.append(
                [
                    Event(
                        id=new_id("forget"),
                        run_id=run_id,
                        kind="forget",
                        body={"reason": reason},
                        time=max(now, newest.get(run_id, now)),  # a writer's clock may be ahead
                    )
                    for run_id in some
                ]
            )
            count += len(some)
        return count

    def run(self, run_id: str) -> Run:
        """Return one run with its calls. Raises NotFound, or Corrupt on unreadable events."""
        self.run_facts(run_id)
        runs = self._read([run_id], "full")
        if not runs:
            raise Corrupt(
                f"the events of run {run_id!r} cannot be read: see `cray-agents maintain fsck`"
            )
        return runs[0]

    def run_state(self, run_id: str) -> bytes:
        """Return bytes that change with every event of a run. Raises NotFound."""
        self.refresh()
        state = self.index.run_state(run_id)
        if state is None:
            raise NotFound(f"no run {run_id!r} is recorded", param="run_id")
        return state

    def run_facts(self, run_id: str) -> RunFacts:
        """Return the facts of a run. Raises NotFound."""
        self.refresh()
        facts = self.index.run(run_id)
        if facts is None:
            raise NotFound(f"no run {run_id!r} is recorded", param="run_id")
        return facts

    def places(self, run_id: str) -> tuple[RunFacts, Places]:
        """Return the facts of a run and the places of its events. Raises NotFound."""
        facts = self.run_facts(run_id)
        return facts, self.index.places([run_id]).get(run_id, Places(None, (), ()))

    def bodies(self, places: Sequence[LinePlace]) -> Iterator[dict[str, Any]]:
        """Yield the bodies of events at some places, in their order, as they were appended.

        Raises Moved if compaction has moved one: call this within `retry`. Raises Corrupt.
        """
        calls = WholeCalls(self._written_calls)
        for at in range(0, len(places), PAGE):
            for line in self.segments.fetch(places[at : at + PAGE]):
                yield calls.whole(event_in(line))

    def runs(self, query: RunQuery | None = None, calls: Calls = "full") -> list[Run]:
        """Return the matching runs, in the query's order and up to its limit.

        With calls "none" their turns have the ids of the calls only.
        """
        return list(self.stream(query or RunQuery(), calls))

    def stream(self, query: RunQuery, calls: Calls = "full") -> Iterator[Run]:
        """Yield the matching runs, in the query's order, read in pages."""
        ids = (row.run_id for row in self.facts(query))
        while some := list(islice(ids, PAGE)):
            yield from self._read(some, calls)

    def facts(self, query: RunQuery) -> Iterator[RunFacts]:
        """Return the index's facts of the matching runs, in the query's order.

        Bodies are read only if the query has a text.
        """
        self.refresh()
        if query.text is None:
            return self.index.iterate(query)
        rows = self.index.iterate(query.model_copy(update={"limit": None}))
        return islice(self._with_text(rows, query.text), query.limit)

    def runs_by_id(self, run_ids: Iterable[str]) -> Iterator[Run]:
        """Yield runs with their calls, in this order, without unknown and unreadable ones."""
        self.refresh()
        ids = iter(run_ids)
        while some := list(islice(ids, PAGE)):
            yield from self._read(some, "full")

    def count(self, query: RunFilter) -> int:
        """Return the number of matching runs. Raises StoreError."""
        self.refresh()
        if query.text is None:
            return self.index.count(query)
        return sum(1 for _ in self.facts(RunQuery(**query.model_dump())))

    @property
    def problems(self) -> list[Damage]:
        """The damage met while reading, with its places."""
        return self.index.problems()

    def redacted(self, event: Event) -> Event:
        """Return an event as it is written, without sensitive text."""
        return event if self._redactor is None else self._redactor.apply(event)

    @property
    def commits(self) -> CommitCounts:
        """Groups and appends that this process put on the disk, and the seconds of that."""
        return self._writer.counts

    @property
    def index_lag(self) -> int:
        """Events of this process that are on the disk and not in the index yet."""
        return self._indexing.behind

    def has(self, event_id: str) -> bool:
        """Tell whether an event has this id and is not forgotten."""
        return event_id in self._pending or self.index.has(event_id)

    def known(self, event_id: str) -> bool:
        """Tell whether an event, forgotten or not, has this id, so that it cannot be appended."""
        return event_id in self._pending or self.index.known(event_id)

    def body(self, event_id: str) -> dict[str, Any]:
        """Return the body of an event, as it was appended. Raises KeyError."""
        self._wait_for_index()

        def read() -> dict[str, Any]:
            place = self.index.place(event_id)
            if place is None:
                raise KeyError(event_id)
            return next(self.bodies([place]))

        return self.retry(read)

    def _written_calls(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Return the readable calls of a run, as they are written, by id. Raises Moved.

        The last run's are kept: a page of a run is mostly followed by another one of it.
        """
        found = self.index.places([run_id]).get(run_id)
        key = run_id, found.calls if found else ()
        kept, events = self._last_read
        if kept != key:
            events = {event["id"]: event for event in map(event_in, self._readable(key[1]))}
            if len(events) == len(key[1]):
                self._last_read = key, events
        return events

    def _readable(self, places: Sequence[LinePlace]) -> Iterator[bytes]:
        """Yield the lines at places, without damaged ones."""
        try:
            yield from self.segments.fetch(places)
        except Corrupt:
            if len(places) > 1:
                for place in places:
                    yield from self._readable([place])

    def retry(self, read: Callable[[], Result]) -> Result:
        """Return what `read` returns; repeat it where compaction moved the events it reads.

        `read` looks up the places and fetches their lines. Raises StoreError.
        """
        for _ in range(TRIES):
            try:
                return read()
            except Moved:
                self.refresh()
        raise StoreError("the segments change faster than they can be read: try again")

    def refresh(self) -> None:
        """Read new events of all writers into the index."""
        self._wait_for_index()
        with undivided(), self._refreshing:
            for placed in catch_up(self.segments, self.index):
                for fact, _ in placed:
                    self._learn(fact)
                self._tell([fact for fact, _ in placed])

    def watch(self, tell: Tell | None) -> None:
        """Call `tell` with (run, "appended" or "forgotten") of new events; None ends it.

        It is called on the event loop for this store's own events, in any thread for others'.
        """
        self._watcher = tell

    def refresh_conversations(self) -> None:
        """Learn the requests that other processes recorded, so that they can be continued here.

        What this process reads from the segments it has learned already. The index also holds what
        other processes of this host have read.
        """
        self.refresh()
        since, newest = self._conversations_until - RECORDED_LATE, self._conversations_until
        for at, request, run_id, call_ids, text in self.index.conversations(since):
            newest = max(newest, at)
            self.conversations.learn_once(request, run_id, call_ids, text)
        self._conversations_until = newest

    def seal_orphans(self, older_than: float = ORPHANED) -> None:
        """Seal segments of writers gone for `older_than` seconds. Blocks. Raises StoreError."""
        seal_orphans(self.segments.directory, self._writer.holds, older_than)
        self.refresh()

    def check_room(self) -> None:
        """Prove that events could be written now. Blocks. Raises StoreError."""
        with store_errors("nothing can be recorded"):
            self.segments.directory.mkdir(parents=True, exist_ok=True)
            durable.check_room(self.segments.directory)

    async def close(self) -> None:
        """Wait for all writes, seal the segment, and close the index."""
        await self._writer.close()
        await asyncio.to_thread(self._indexing.close)
        self.index.close()
        self.segments.close()

    def _counting(self, query: RunFilter) -> AbstractContextManager[sqlite3.Connection]:
        if query.text is not None:
            raise BadInput("statistics cannot look for a text: only bodies tell", param="text")
        self.refresh()
        return self.index.reading()

    def _lines(self, events: Sequence[Event], new: bool) -> dict[str, _Line]:
        """Return the lines of those events whose id is unknown; the first of an id counts.

        An event of the same id that another append indexes meanwhile is written twice, and is one.
        """
        fresh: dict[str, Event] = {}
        newer: dict[str, list[KnownCall]] = {}
        for event in events:
            fresh.setdefault(event.id, event)
        known = self.index.known
        return {i: self._line(e, newer) for i, e in fresh.items() if new or not known(i)}

    def _line(self, event: Event, newer: dict[str, list[KnownCall]]) -> _Line:
        """Return the line of an event; `newer` has, by run, the calls that come before it."""
        event, call = self.redacted(event), None
        fact = _fact(event)
        if event.kind == "call":
            before = newer.setdefault(event.run_id, [])
            body, call = self._known_calls.shorten(event.body, before[-BRANCHES:])
            event = event.model_copy(update={"body": body})
            if call is not None:
                before.append(call)
        text = line_of(event)
        if call is not None:
            call.crc = text[-10:-2].decode()
        return _Line(fact, text, call)

    def _submit(self, lines: list[_Line]) -> "asyncio.Future[list[LinePlace]]":
        facts = [line.fact for line in lines]
        written = self._writer.submit([line.text for line in lines], facts)
        for fact in facts:
            self._pending[fact.id] = written
        written.add_done_callback(partial(self._on_written, lines))
        return written

    def _on_written(self, lines: list[_Line], written: "asyncio.Future[list[LinePlace]]") -> None:
        """Count and learn written events; runs on the loop, before the waiters go on."""
        facts = [line.fact for line in lines]
        if written.exception() is not None:
            for fact in facts:
                self._pending.pop(fact.id, None)
            return
        self._acknowledged += len(facts)
        for line in lines:
            self._learn(line.fact)
            if line.known is not None:
                self._known_calls.learn(line.known)
        self._tell(facts)

    def _tell(self, facts: Sequence[Fact]) -> None:
        if (tell := self._watcher) is not None:
            forgotten = ("appended", "forgotten")
            tell((fact.run_id, forgotten[fact.kind == "forget"]) for fact in facts)

    def _on_indexed(self, placed: list[Placed]) -> None:
        """Forget the writes of indexed events; runs in the index thread."""
        for fact, _ in placed:
            self._pending.pop(fact.id, None)

    def _wait_for_index(self) -> None:
        """Wait until all acknowledged events are in the index: at most about one group's time."""
        self._indexing.wait_for(self._acknowledged)

    def _newest_times(self, run_ids: Sequence[str]) -> dict[str, float]:
        self.refresh()
        return self.index.newest(run_ids)

    def _learn(self, fact: Fact) -> None:
        if fact.kind == "call" and "asked" in fact.about:
            call_ids, text = fact.about["said"]
            self.conversations.learn(fact.about["asked"], fact.run_id, call_ids, text)
        elif fact.kind == "forget":
            self._known_calls.forget(fact.run_id)

    def _with_text(self, rows: Iterator[RunFacts], text: str) -> Iterator[RunFacts]:
        needle = text.casefold()
        while some := list(islice(rows, PAGE)):
            runs = self._read([row.run_id for row in some], "none")
            hits = {run.id: hit for run in runs if (hit := _find(run, needle)) is not None}
            yield from (row._replace(found=hits[row.run_id]) for row in some if row.run_id in hits)

    def _read(self, run_ids: Sequence[str], calls: Calls) -> list[Run]:
        """Read runs, in this order; unreadable ones are left out and noted as problems."""

        def read() -> list[Run]:
            places = self.index.places(run_ids)
            return self._assemble(
                [(i, _wanted_lines(places[i], calls)) for i in run_ids if i in places]
            )

        return self.retry(read)

    def _assemble(self, wanted: list[tuple[str, list[LinePlace]]]) -> list[Run]:
        try:
            lines = iter(self.segments.fetch([place for _, places in wanted for place in places]))
        except Corrupt:
            if len(wanted) > 1:  # read one by one to skip the damaged one
                return [run for one in wanted for run in self._assemble([one])]
            return self._skip(wanted[0][1][0], f"run {wanted[0][0]} cannot be read whole")
        runs = []
        for run_id, places in wanted:
            between_pieces()
            own = [next(lines) for _ in places]  # all at once, so that the next run's follow
            try:
                run, lost = _join(run_id, [event_in(line) for line in own])
                runs.append(run)
                if lost:
                    self._skip(places[0], f"run {run_id} is not whole ({'; '.join(lost)})")
            except (ValueError, Corrupt) as error:  # pydantic's error is a ValueError
                self._skip(places[0], f"run {run_id} is no run ({error})")
        return runs

    def _skip(self, place: LinePlace, message: str) -> list[Run]:
        self.index.note(place.segment, place.offset, -1, place.length, message)
        log.warning("%s at byte %d: %s", place.segment, place.offset, message)
        return []


def _fact(event: Event) -> Fact:
    try:
        return facts_of(vars(event))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"event {event.id} is no {event.kind}: {error!r}") from error


def _wanted_lines(places: Places, calls: Calls) -> list[LinePlace]:
    """Return the lines to read for a run. Without a description it is built from its calls."""
    described = [places.run] if places.run is not None else []
    with_calls = calls == "full" or not described
    return [*described, *(places.calls if with_calls else ()), *places.rewards]


def _join(run_id: str, events: list[dict[str, Any]]) -> tuple[Run, list[str]]:
    """Return a run, and what is lost of it."""
    bodies: dict[str, list[dict[str, Any]]] = {"run": [], "call": [], "reward": []}
    written, lost = {event["id"]: event for event in events}, []
    calls = WholeCalls(lambda _: written)
    for event in events:
        try:
            bodies[event["kind"]].append(calls.whole(event))
        except Corrupt as error:
            lost.append(str(error))
    described = bodies["run"][0] if bodies["run"] else None
    if described is None and not bodies["call"]:
        raise Corrupt("; ".join(lost))
    return assemble(run_id, described, bodies["call"], bodies["reward"]), lost


def _find(run: Run, needle: str) -> str | None:
    """Return what stands round a casefolded text in the input, output or messages of a run."""
    output = run.output if isinstance(run.output, str) else dump_json(run.output).decode()
    for text in (run.input, output, *map(text_of, run.trajectory.messages)):
        if (at := (folded := text.casefold()).find(needle)) >= 0:
            whole = text if len(text) == len(folded) else folded  # "ß" is folded to two letters
            return whole[max(0, at - ROUND) : at + len(needle) + ROUND]
    return None
