"""Looks for damage in segments, and mends what can be. Called by `cray-agents runs fsck`.

Nothing is destroyed: what could be read of a damaged segment goes into a new one, which takes its
place as a compacted one does (so every host's index follows), and the damaged file goes to
`segments/damaged/`. Only what was lost changes: it is gone from the answers then, too, and can be
sent again.
"""

import os
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from cray_agents.errors import Corrupt, StoreError
from cray_agents.records import new_id
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store.segments import frames
from cray_agents.runtime.store.segments.handles import Handle, Moved, open_segment
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    SEALED,
    Name,
    is_draft,
    name_of,
)
from cray_agents.runtime.store.segments.orphans import (
    ORPHANED,
    STALE,
    remove_replaced,
    seal_orphans,
)
from cray_agents.runtime.store.segments.reader import (
    BAD_LINE,
    BAD_MARK,
    Damage,
    SegmentLine,
    Segments,
)
from cray_agents.runtime.store.segments.sealed import write_sealed

DAMAGED = "damaged"  # the folder beside the segments for what was damaged

Kind = Literal[
    "bad_line",  # a line is not what its checksum says
    "bad_frame",  # up to 64 KiB of lines cannot be unpacked
    "bad_mark",  # what would be needed only if the footer were lost, too
    "bad_facts",  # the index would have to read the lines instead
    "bad_footer",  # likewise; and the frames have to be searched
    "truncated",  # the file ends before its lines do
    "changed",  # bytes that nobody reads are not what they were
    "torn_tail",  # a dead writer's last line is not whole; it was never acknowledged
    "not_sealed",  # a dead writer's segment
    "half_sealed",  # an open segment that has been sealed, and is still there
    "half_compacted",  # a segment that another replaces, and is still there
    "stale_draft",  # a file that was never finished
    "damaged",  # a file elsewhere under the root: see fsck.py
]


class Finding(NamedTuple):
    """Something wrong with a segment, or (fsck.py) with another file, which is in no segment.

    `offset`, `length`: which bytes of its lines are concerned (0, 0: none); `at`: where in the
    file. `lost`: lines that cannot be read any more, None if that is not known.
    """

    segment: str
    path: str
    kind: Kind
    offset: int
    at: int
    length: int
    message: str
    repairable: bool
    lost: int | None


def check(directory: Path, older_than: float = ORPHANED) -> Iterator[Finding]:
    """Read every segment whole, and tell what is wrong, segment by segment. Changes nothing.

    `older_than`: seconds after which the writer of an open segment is taken for dead. Raises
    StoreError.
    """
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  names are all that is needed
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror or error}") from error
    segments = Segments(directory)
    counting = {segment.stem for segment in segments.list()}
    there = set(names)
    for name in names:
        named, path = name_of(name), directory / name
        try:
            if is_draft(name):
                yield from _of_draft(path)
            elif named is None:
                continue
            elif named.form != SEALED and named.stem + SEALED in there:
                yield _about(named, path, "half_sealed", "it is sealed, and was not removed")
            elif named.stem not in counting and segments.find(named.stem) is not None:
                yield _about(named, path, "half_compacted", "another segment has taken its place")
            elif named.form == SEALED:
                yield from _of_sealed(segments, named, path)
            else:
                yield from _of_open(segments, named, path, older_than)
        except (FileNotFoundError, Moved):  # sealed or compacted in this moment
            continue
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def repair(directory: Path, finding: Finding, older_than: float = ORPHANED) -> str:
    """Mend what a finding tells of; returns what was done. May be asked again. Raises StoreError.

    The other findings about the same segment are mended with it.
    """
    if not finding.repairable:
        return "left as it is"
    if finding.kind == "stale_draft":
        Path(finding.path).unlink(missing_ok=True)
        return "removed"
    segments = Segments(directory)
    try:
        if finding.kind == "half_compacted":
            gone = remove_replaced(directory)
            return "removed" if finding.segment in gone else "left as it is: it may be needed"
        there = segments.find(finding.segment)
        if there is None:
            return "mended already"
        if not there.sealed or finding.kind == "half_sealed":
            stem = finding.segment
            seal_orphans(directory, lambda other: other != stem, older_than)
            there = segments.find(stem)
            if there is None or not there.sealed:
                return "left as it is: its writer may live"
        return _rewrite(segments, finding.segment) or "sealed"
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot mend {finding.path}: {error.strerror or error}") from error
    finally:
        segments.close()


def _rewrite(segments: Segments, stem: str) -> str | None:
    """Put what can be read of a sealed segment in its place; None if nothing is wrong with it."""
    directory, path = segments.directory, segments.directory / f"{stem}{SEALED}"
    if not any(_of_sealed(segments, Name(stem, SEALED), path)):
        return None
    keep = directory / DAMAGED / path.name
    keep.parent.mkdir(exist_ok=True)
    if not keep.exists() or not keep.samefile(path):
        keep = keep if not keep.exists() else keep.with_name(f"{stem}.{new_id('again')}{SEALED}")
        os.link(path, keep)
        durable.sync(keep.parent)
    lines = (item.data for item in segments.read(stem) if isinstance(item, SegmentLine))
    replaces = [stem, *filter(segments.find, segments.replaced(stem))]
    into = write_sealed(directory, COMPACTED + new_id("segment"), lines, replaces)
    path.unlink(missing_ok=True)
    durable.sync(directory)
    return f"what can be read is in {into.name}, the damaged file in {DAMAGED}/{keep.name}"


def _about(
    named: Name,
    path: Path,
    kind: Kind,
    message: str,
    where: tuple[int, int, int] = (0, 0, 0),  # offset, at, length
    lost: int | None = 0,
    repairable: bool = True,
) -> Finding:
    return Finding(named.stem, str(path), kind, *where, message, repairable, lost)


def _of_draft(path: Path) -> Iterator[Finding]:
    if time.time() - path.stat().st_mtime > STALE:
        message = "a file that was never finished"
        yield Finding("", str(path), "stale_draft", 0, 0, 0, message, True, 0)


def _of_open(segments: Segments, named: Name, path: Path, older_than: float) -> Iterator[Finding]:
    state = path.stat()
    dead = named.form == LEFT or time.time() - state.st_mtime > older_than
    end = 0
    for item in segments.read(named.stem):
        if isinstance(item, Damage):
            end = item.offset + item.length
            message = item.message if dead else f"{item.message}; its writer may live"
            where = (item.offset, item.at, item.length)
            yield _about(named, path, "bad_line", message, where, 1, dead)
        else:
            end = item.place.offset + item.place.length + 1
    if dead and end < state.st_size:
        message = "the last line is not whole: it was never acknowledged"
        yield _about(named, path, "torn_tail", message, (end, end, state.st_size - end))
    if dead:
        yield _about(named, path, "not_sealed", "nobody appends to it any more")


def _of_sealed(segments: Segments, named: Name, path: Path) -> Iterator[Finding]:
    handle = open_segment(segments.directory, named.stem)
    try:
        if not handle.sealed:
            return
        found = False
        for finding in chain(_of_gap(named, handle), _of_lines(segments, named, handle)):
            found = True
            yield finding
        if not found:
            yield from _of_rest(named, handle)
    finally:
        os.close(handle.file)


def _of_gap(named: Name, handle: Handle) -> Iterator[Finding]:
    gap = handle.table.gap
    if gap is None:
        return
    whole = frames.is_after_lines(os.pread(handle.file, 8, gap.at))
    where = (gap.offset, gap.at, gap.length)
    if whole:
        yield _about(named, handle.path, "bad_footer", gap.message, where)
    else:
        yield _about(named, handle.path, "truncated", gap.message, where, None)


def _of_lines(segments: Segments, named: Name, handle: Handle) -> Iterator[Finding]:
    """What is wrong with lines, frames and marks."""
    gap, count = handle.table.gap, _counter(handle)
    for item in segments.read(named.stem):
        if not isinstance(item, Damage) or (gap and item.at == gap.at):
            continue
        kind: Kind = "bad_frame"
        lost: int | None = 0
        if item.message == BAD_LINE:
            kind, lost = "bad_line", 1
        elif item.message == BAD_MARK:
            kind = "bad_mark"
        else:
            lost = count(item.offset, item.offset + item.length)
        where = (item.offset, item.at, item.length)
        yield _about(named, handle.path, kind, item.message, where, lost)


def _of_rest(named: Name, handle: Handle) -> Iterator[Finding]:
    """What is wrong with a file all of whose lines can be read."""
    footer, at = handle.table.footer, handle.table.facts_at
    assert footer is not None
    for size, _ in footer.facts:
        try:
            frames.facts_in(named.stem, os.pread(handle.file, size, at))
        except Corrupt as error:
            yield _about(named, handle.path, "bad_facts", str(error), (0, at, 0))
            return
        at += size
    crc = position = 0
    while position < at:
        data = os.pread(handle.file, min(durable.BLOCK, at - position), position)
        crc = zlib.crc32(data, crc)
        position += len(data)
    if crc != footer.crc:
        yield _about(named, handle.path, "changed", "some bytes that nobody reads are damaged")


def _counter(handle: Handle) -> Callable[[int, int], int | None]:
    """Counts the lines between two offsets, from what the facts tell of their lengths."""

    def count(start: int, end: int) -> int | None:
        footer, at, lines = handle.table.footer, handle.table.facts_at, 0
        for size, _ in footer.facts if footer else ():
            try:
                offset, lengths = frames.lengths_in(os.pread(handle.file, size, at))
            except Corrupt:
                return None
            at += size
            for length in lengths:
                lines += start <= offset < end
                offset += length + 1
        return lines if footer else None

    return count
