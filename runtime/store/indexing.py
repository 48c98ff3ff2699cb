"""Indexing: bring events into the index, as they are written and from the segments.

`Indexing` adds written events in the background, so that commits do not wait. A transaction costs
as much as a model call's whole way through the gateway. So events gather for a moment first, unless
somebody waits for them.

`catch_up` reads new events of all writers. The facts of a sealed segment are read from its footer,
those of an open one from its lines. Damage is noted with its place, and reading goes on after it. A
missing segment was compacted; its events are read from the segment that replaced it. Called by
store.py.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.line_format import COMPACTED, Placed, event_in, facts_of
from cray_agents.runtime.store.segments.reader import Damage, Moved, Segment, Segments

GATHER_INTERVAL = 0.5  # seconds; who reads does not wait for its end
GATHERED = 2_000  # events of a transaction, about
MAX_BEHIND = 20_000  # events that may wait; then commits wait too

log = logging.getLogger(__name__)


class Indexing:
    """A queue of events for the index. `done`, run in the thread, gets each batch of them."""

    def __init__(self, index: Index, done: Callable[[list[Placed]], None]) -> None:
        self._index = index
        self._done = done
        self._waiting: deque[list[Placed]] = deque()
        self._behind = 0  # events
        self._taken = 0  # events, ever
        self._busy = False
        self._hurry = 0  # callers that wait for the gathered events
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    @property
    def behind(self) -> int:
        """Events that are on the disk and not in the index yet."""
        return self._behind

    def submit(self, placed: list[Placed]) -> None:
        """Queue events of one segment, in its order. Wait while the index is too far behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._behind < MAX_BEHIND)
            self._waiting.append(placed)
            self._behind += len(placed)
            if not self._busy:
                self._start_next()

    def wait_for(self, count: int) -> None:
        """Wait until `count` events, counted from the start, are in the index."""
        if self._taken < count:
            self._wait_until(lambda: self._taken >= count)

    def close(self) -> None:
        """Wait until everything queued is in the index, and end the thread."""
        self._wait_until(lambda: not self._busy)
        self._thread.shutdown()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            self._changed.wait_for(condition)
            self._hurry -= 1

    def _work(self) -> None:
        """Run one transaction, then start the next one, also after an error."""
        placed = self._next()
        try:
            self._take_in(placed)
        except OSError as error:  # StoreError is one; it is read from the segments later
            log.warning("not indexed yet: %s", error)
        finally:
            self._done(placed)
            with self._changed:
                self._taken += len(placed)
                self._behind -= len(placed)
                self._start_next()
                self._changed.notify_all()

    def _start_next(self) -> None:
        """Start a transaction if events wait. Call with the lock held."""
        self._busy = bool(self._waiting)
        if self._busy:
            self._thread.submit(self._work).add_done_callback(_report)

    def _next(self) -> list[Placed]:
        """Take groups of one segment from the queue, up to about GATHERED events."""
        with self._changed:
            self._changed.wait_for(lambda: self._hurry or self._behind >= GATHERED, GATHER_INTERVAL)
            placed = self._waiting.popleft()
            segment = placed[0].place.segment
            while (
                self._waiting
                and len(placed) < GATHERED
                and self._waiting[0][0].place.segment == segment
            ):
                placed = placed + self._waiting.popleft()
            return placed

    def _take_in(self, placed: list[Placed]) -> None:
        first = placed[0].place
        if self._index.add(first.segment, first.offset, placed[-1].place.end, placed) < 0:
            log.info("the index is behind in %s: it will be read on", first.segment)


def _report(work: "Future[None]") -> None:
    """Log an unexpected error of the thread, for nobody waits for its future."""
    if (error := work.exception()) is not None:
        log.error("not indexed: %r", error, exc_info=error)


TRIES = 3  # to rebuild a run while others write events of it
BATCH = 5000  # events of a transaction: others may write to the index in between
MUCH = 32 * 2**20  # bytes of segments: for more, the log says how far it is
LOG_INTERVAL = 5.0  # seconds between two such lines
COMPLETE = 2**62  # the progress of a sealed segment that was read whole


def catch_up(segments: Segments, index: Index) -> Iterator[list[Placed]]:
    """Index all new events, and yield them batch by batch. Raises StoreError."""
    progress = index.progress()
    listed = segments.list()
    much = not progress and sum(segment.size for segment in listed) > MUCH
    moving = False
    gone = progress.keys() - {segment.stem for segment in listed}
    for segment in _noted(listed) if much else listed:
        done = progress.get(segment.stem, 0)
        if done >= (COMPLETE if segment.sealed else segment.size):
            continue
        try:
            yield from _read(segments, index, segment, gone, done)
        except (Moved, _Behind):  # compacted meanwhile: the next call reads its successor
            moving = True
    if gone and not moving:
        index.drop(sorted(gone))
    for run_id in index.stale():
        _rebuild_run(segments, index, run_id)


def _noted(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Yield them; say in the log how far it is. A million runs take minutes."""
    whole = sum(segment.size for segment in segments)
    read, last = 0, time.monotonic()
    for segment in segments:
        yield segment
        read += segment.size
        if time.monotonic() - last >= LOG_INTERVAL:
            last = time.monotonic()
            log.warning(  # of a program that sets up no logging, people see these alone
                "this host's index of runs is made, once and after an upgrade: %d %% of %.1f GB",
                100 * read / whole,
                whole / 1e9,
            )


def _rebuild_run(segments: Segments, index: Index, run_id: str) -> None:
    """Rebuild the row of a run from its live events, after some were forgotten."""
    for _ in range(TRIES):
        places = index.live(run_id)
        try:
            events = map(event_in, segments.fetch(places))
            placed = [Placed(facts_of(e), at) for e, at in zip(events, places, strict=True)]
        except Corrupt as error:
            log.warning("run %s: %s", run_id, error)
            return
        if index.rebuild_run(run_id, placed):
            return


class _Behind(Exception):
    """The progress in the index went back meanwhile: read it again."""


def _read(
    segments: Segments, index: Index, segment: Segment, gone: set[str], done: int
) -> Iterator[list[Placed]]:
    """Index a segment from byte `done` of its lines, and yield the batches.

    Damage at the end of an open segment may be an unfinished line: skip it.
    """
    replaced = sorted(gone) if segment.stem.startswith(COMPACTED) else []
    damage: list[Damage] = []

    def take(batch: list[Placed], end: int) -> list[Placed]:
        nonlocal done
        if index.add(segment.stem, done, end, batch, replaced) < 0:
            raise _Behind
        done = end
        return batch

    batch: list[Placed] = []
    for line in segments.read(segment.stem, done):
        if isinstance(line, Damage):
            damage.append(line)
            continue
        while damage:
            index.note(*damage.pop())
        try:
            batch.append(Placed(facts_of(event_in(line.data)), line.place))
        except (Corrupt, NewerFormat, KeyError, TypeError, ValueError, AttributeError) as error:
            stem, offset, length = line.place
            damage = [Damage(stem, offset, -1, length, f"not an event ({error!r})")]
        if len(batch) == BATCH:
            yield take(batch, batch[-1].place.end)
            batch = []
    if batch:
        yield take(batch, batch[-1].place.end)
    if segment.sealed:
        while damage:
            index.note(*damage.pop())
        take([], COMPLETE)
