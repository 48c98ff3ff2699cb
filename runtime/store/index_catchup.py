"""Reads into the index what segments hold that it does not know yet. Called by store.py.

Sealed segments tell their facts in their footers; of others the lines are read. Damage is noted
with its place, and what can be read beyond it is. A segment that is gone was compacted: its events
are found where they went.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

from cray_agents.errors import Corrupt
from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.facts import facts_of
from cray_agents.runtime.store.segments.line_format import Placed, event_in
from cray_agents.runtime.store.segments.reader import Damage, Moved, Segment, Segments
from cray_agents.runtime.store.segments.sealed import COMPACTED

log = logging.getLogger(__name__)

TRIES = 3  # to tell a run anew while others write of it
BATCH = 5000  # events taken in at once: others may write to the index in between
BULK = 32 * 2**20  # bytes of segments from which on an empty index is filled in bulk
COMPLETE = 2**62  # the progress of a sealed segment of which nothing is left to read


def catch_up(segments: Segments, index: Index) -> Iterator[list[Placed]]:
    """Take in all that is new, and yield it batch by batch. Raises StoreError."""
    progress = index.progress()
    found = segments.list()
    much = not progress and sum(segment.size for segment in found) > BULK
    moving = False
    with index.bulk() if much else nullcontext():
        progress = index.progress()  # again: another process may have filled it meanwhile
        gone = progress.keys() - {segment.stem for segment in found}
        for segment in found:
            done = progress.get(segment.stem, 0)
            if done >= (COMPLETE if segment.sealed else segment.size):
                continue
            try:
                yield from _Reader(segments, index, segment, gone).read(done)
            except (Moved, _Behind):  # compacted in this moment: the next time finds where to
                moving = True
    if gone and not moving:
        index.drop(sorted(gone))
    for run_id in index.stale():
        _retell(segments, index, run_id)


def _retell(segments: Segments, index: Index, run_id: str) -> None:
    """A run of which some events were forgotten: what is left of it is told anew."""
    for _ in range(TRIES):
        places = index.live(run_id)
        try:
            events = map(event_in, segments.fetch(places))
            placed = [Placed(facts_of(e), at) for e, at in zip(events, places, strict=True)]
        except Corrupt as error:
            log.warning("run %s: %s", run_id, error)
            return
        if index.retell(run_id, placed):
            return


class _Behind(Exception):
    """The index has gone back since it was asked how far it is: ask it again."""


class _Reader:
    """Takes one segment in."""

    def __init__(self, segments: Segments, index: Index, segment: Segment, gone: set[str]) -> None:
        self._segments = segments
        self._index = index
        self._segment = segment
        self._gone = sorted(gone) if segment.stem.startswith(COMPACTED) else []
        self._done = 0

    def read(self, start: int) -> Iterator[list[Placed]]:
        """From so many bytes of its lines on."""
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
        """Damage at the end of an open segment may be a line that is being written: not yet."""
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
