"""Compaction: merge small segments into large ones, without forgotten and doubled events.

A compacted segment is published whole under its own name, and lists the segments that it replaces.
Only then are these removed. Readers of the old segments find the events in the new one. Several
compactors at once cost space but never lose events: a double is dropped only if its twin is in the
same new segment. Called by the platform at intervals (`keep_up`), and by `maintain compact`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.records import new_id
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store.index import sweep_caches
from cray_agents.runtime.store.segments.line_format import COMPACTED, event_in
from cray_agents.runtime.store.segments.reader import Damage, Moved, Segment
from cray_agents.runtime.store.segments.sealed import write_sealed
from cray_agents.runtime.store.store import Store

SMALL = 8 * 2**20  # bytes: smaller sealed files are worth merging
LARGE = 64 * 2**20  # bytes of sealed files merged into one, at most
MIN_MERGED = 8  # fewer small segments are left alone
FORGOTTEN_SHARE = 0.2  # of its events: a segment with more is rewritten, however large

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a group of segments; `into` is the new segment."""

    segments: tuple[str, ...]
    into: str
    bytes_before: int
    bytes_after: int
    forgotten: int
    doubled: int


def plan(store: Store, *, thorough: bool = False) -> list[list[Segment]]:
    """Return the groups of sealed segments worth rewriting.

    With `thorough`, these are all small ones and all with any forgotten event.
    """
    store.refresh()
    forgotten = store.index.forgotten()
    sealed = [segment for segment in store.segments.list() if segment.sealed]
    stale = {
        segment.stem
        for segment in sealed
        if (dead := forgotten.get(segment.stem))
        and (thorough or dead > FORGOTTEN_SHARE * (store.segments.lines(segment.stem) or dead))
    }
    small = [segment for segment in sealed if segment.size < SMALL]
    if len(small) < (2 if thorough else MIN_MERGED):
        small = []
    groups: list[list[Segment]] = []
    for segment in sealed:
        if segment not in small and segment.stem not in stale:
            continue
        if not groups or sum(s.size for s in groups[-1]) + segment.size > LARGE:
            groups.append([])
        groups[-1].append(segment)
    return [group for group in groups if len(group) > 1 or group[0].stem in stale]


def compact(store: Store, group: Sequence[Segment]) -> Compacted | None:
    """Rewrite a group as one segment.

    Return None if a segment is damaged (`fsck` repairs it), has events of a newer format, or is
    gone, as another process compacted it. Raises StoreError.
    """
    stem, dropped = COMPACTED + new_id("segment"), Counter[str]()
    lines, stems = _kept_lines(store, group, dropped), tuple(segment.stem for segment in group)
    try:
        path = write_sealed(store.segments.directory, stem, lines, stems)
    except (Corrupt, NewerFormat, Moved) as error:
        log.warning("not compacted: %s", error)
        return None
    store.refresh()
    for segment in group:
        with suppress(FileNotFoundError):  # another compactor was faster
            segment.path.unlink()
    durable.sync(store.segments.directory)
    return Compacted(
        stems,
        stem,
        sum(segment.size for segment in group),
        path.stat().st_size,
        dropped["forgotten"],
        dropped["doubled"],
    )


def _kept_lines(store: Store, group: Sequence[Segment], dropped: Counter[str]) -> Iterator[bytes]:
    """Yield the lines to keep, and count the others. Raises Corrupt, NewerFormat, Moved."""
    seen: set[str] = set()
    for segment in group:
        for line in store.segments.read(segment.stem):
            if isinstance(line, Damage):
                raise Corrupt(f"{segment.path} at byte {line.at}: {line.message}")
            event = event_in(line.data)
            name, kind = event["id"], event["kind"]
            if name in seen:
                dropped["doubled"] += 1
            elif kind != "forget" and store.index.known(name) and not store.index.has(name):
                dropped["forgotten"] += 1
            else:
                seen.add(name)
                yield line.data


TIDY_INTERVAL = 600.0  # seconds


async def keep_up(store: Store, every: float = TIDY_INTERVAL) -> None:
    """Tidy a store at intervals until cancelled. Raises StoreError, OSError."""
    while True:
        await asyncio.to_thread(tidy, store)
        await asyncio.sleep(every)


def tidy(store: Store) -> None:
    """Seal orphans, sweep index caches and compact, once. Raises StoreError, OSError."""
    store.seal_orphans()
    sweep_caches()
    for group in plan(store):
        done = compact(store, group)
        if done is not None:
            log.info("%d segments became %s", len(done.segments), done.into)
