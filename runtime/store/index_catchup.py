"""Index catch-up: read new events from the segments into the index. Called by store.py.

The facts of a sealed segment are read from its footer, those of an open one from its lines. Damage
is noted with its place, and reading goes on after it. A missing segment was compacted; its events
are read from the segment that replaced it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from cray_agents.errors import Corrupt
from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.facts import facts_of
from cray_agents.runtime.store.segments.line_format import Placed, event_in
from cray_agents.runtime.store.segments.reader import Damage, Moved, Segment, Segments
from cray_agents.runtime.store.segments.sealed import COMPACTED

log = logging.getLogger(__name__)

TRIES = 3  # to rebuild a run while others write events of it
BATCH = 5000  # events of a transaction: others may write to the index in between
BULK = 32 * 2**20  # bytes of segments: for more, an empty index is filled in bulk
NOTED = 5.0  # seconds between two lines of the log while it is filled
COMPLETE = 2**62  # the progress of a sealed segment that was read whole


def catch_up(segments: Segments, index: Index) -> Iterator[list[Placed]]:
    """Index all new events, and yield them batch by batch. Raises StoreError."""
    progress = index.progress()
    listed = segments.list()
    much = not progress and sum(segment.size for segment in listed) > BULK
    moving = False
    with index.bulk() if much else nullcontext():
        progress = index.progress()  # again, for another process may have filled the index
        gone = progress.keys() - {segment.stem for segment in listed}
        for segment in _noted(listed) if much and not progress else listed:
            done = progress.get(segment.stem, 0)
            if done >= (COMPLETE if segment.sealed else segment.size):
                continue
            try:
                yield from _Reader(segments, index, segment, gone).read(done)
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
        if time.monotonic() - last >= NOTED:
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


class _Reader:
    """A reader of one segment into the index."""

    def __init__(self, segments: Segments, index: Index, segment: Segment, gone: set[str]) -> None:
        self._segments = segments
        self._index = index
        self._segment = segment
        self._gone = sorted(gone) if segment.stem.startswith(COMPACTED) else []
        self._done = 0

    def read(self, start: int) -> Iterator[list[Placed]]:
        """Index the segment from byte `start` of its lines, and yield the batches."""
        self._done = start
        facts = self._segments.facts(self._segment.stem) if start == 0 else None
        if facts is not None:
            try:
                yield from self._facts(facts)
            except Corrupt:
                facts = None
        if facts is None:
            yield from self._lines()
        if self._segment.sealed:
            self._take([], COMPLETE)

    def _facts(self, batches: Iterator[list[Placed]]) -> Iterator[list[Placed]]:
        for batch in batches:
            yield self._take(batch, _end(batch[-1]))

    def _lines(self) -> Iterator[list[Placed]]:
        """Index lines. Damage at the end of an open segment may be an unfinished line: skip it."""
        batch: list[Placed] = []
        damage: list[Damage] = []
        for line in self._segments.read(self._segment.stem, self._done):
            if isinstance(line, Damage):
                damage.append(line)
                continue
            self._note(damage)
            try:
                batch.append(Placed(facts_of(event_in(line.data)), line.place))
            except (Corrupt, KeyError, TypeError, ValueError, AttributeError) as error:
                place = line.place
                message = f"not an event ({error!r})"
                damage = [Damage(place.segment, place.offset, -1, place.length, message)]
            if len(batch) == BATCH:
                yield self._take(batch, _end(batch[-1]))
                batch = []
        if batch:
            yield self._take(batch, _end(batch[-1]))
        if self._segment.sealed:
            self._note(damage)

    def _take(self, batch: list[Placed], end: int) -> list[Placed]:
        if self._index.add(self._segment.stem, self._done, end, batch, self._gone) < 0:
            raise _Behind
        self._done = end
        return batch

    def _note(self, damage: list[Damage]) -> None:
        while damage:
            self._index.note(*damage.pop())


def _end(placed: Placed) -> int:
    return placed.place.offset + placed.place.length + 1
