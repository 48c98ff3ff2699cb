"""Salvage: find damage in segments and repair it. Called by `cray-agents maintain fsck`.

Nothing is destroyed. The readable lines of a damaged segment go into a new one. It replaces the old
one like a compacted segment, so every host's index follows. The damaged file goes to
`segments/damaged/`. Only lost events change: they also leave the index, and can be sent again.
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

DAMAGED = "damaged"  # the folder for damaged files, within that of the segments

Kind = Literal[
    "bad_line",  # a line does not match its checksum
    "bad_frame",  # up to 64 KiB of lines cannot be unpacked
    "bad_mark",  # the mark of a frame, used only without a footer
    "bad_facts",  # facts of lines: the index must read the lines instead
    "bad_footer",  # no facts either, and the frames have to be searched for
    "truncated",  # the file ends before its lines do
    "changed",  # bytes that are never read have changed
    "torn_tail",  # a dead writer's last line is torn; it was never acknowledged
    "not_sealed",  # a dead writer's segment
    "half_sealed",  # an open segment that was sealed but not removed
    "half_compacted",  # a segment that another replaces but was not removed
    "stale_draft",  # a file that was never finished
    "damaged",  # a file elsewhere under the root: see runtime/fsck.py
]


class Finding(NamedTuple):
    """A defect of a segment, or of another file (runtime/fsck.py; `segment` is then empty).

    `offset` and `length` are the affected bytes of its lines (0, 0: none), `at` is the byte of the
    file. `lost` is the number of unreadable lines, None if unknown.
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
    """Read every segment whole and yield its defects. Nothing is changed.

    A writer counts as dead `older_than` seconds after its last append. Raises StoreError.
    """
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  only names are used
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error.strerror or error}") from error
    segments = Segments(directory)
    in_use = {segment.stem for segment in segments.list()}
    existing = set(names)
    for name in names:
        named, path = name_of(name), directory / name
        try:
            if is_draft(name):
                yield from _check_draft(path)
            elif named is None:
                continue
            elif named.form != SEALED and named.stem + SEALED in existing:
                yield _finding(named, path, "half_sealed", "it is sealed, and was not removed")
            elif named.stem not in in_use and segments.find(named.stem) is not None:
                yield _finding(named, path, "half_compacted", "another segment has taken its place")
            elif named.form == SEALED:
                yield from _check_sealed(segments, named, path)
            else:
                yield from _check_open(segments, named, path, older_than)
        except (FileNotFoundError, Moved):  # sealed or compacted meanwhile
            continue
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def repair(directory: Path, finding: Finding, older_than: float = ORPHANED) -> str:
    """Repair a finding, and all others of its segment. Return a note of the repair.

    Repeated calls are safe. Raises StoreError.
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
        segment = segments.find(finding.segment)
        if segment is None:
            return "mended already"
        if not segment.sealed or finding.kind == "half_sealed":
            stem = finding.segment
            seal_orphans(directory, lambda other: other != stem, older_than)
            segment = segments.find(stem)
            if segment is None or not segment.sealed:
                return "left as it is: its writer may live"
        return _rewrite(segments, finding.segment) or "sealed"
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot mend {finding.path}: {error.strerror or error}") from error
    finally:
        segments.close()


def _rewrite(segments: Segments, stem: str) -> str | None:
    """Replace a sealed segment by its readable lines. Return None if it has no defect."""
    directory, path = segments.directory, segments.directory / f"{stem}{SEALED}"
    if not any(_check_sealed(segments, Name(stem, SEALED), path)):
        return None
    keep = directory / DAMAGED / path.name
    keep.parent.mkdir(exist_ok=True)
    if not keep.exists() or not keep.samefile(path):
        keep = keep if not keep.exists() else keep.with_name(f"{stem}.{new_id('again')}{SEALED}")
        os.link(path, keep)
        durable.sync(keep.parent)
    lines = (item.data for item in segments.read(stem) if isinstance(item, SegmentLine))
    replaces = [stem, *filter(segments.find, segments.replaced_stems(stem))]
    into = write_sealed(directory, COMPACTED + new_id("segment"), lines, replaces)
    path.unlink(missing_ok=True)
    durable.sync(directory)
    return f"what can be read is in {into.name}, the damaged file in {DAMAGED}/{keep.name}"


def _finding(
    named: Name,
    path: Path,
    kind: Kind,
    message: str,
    span: tuple[int, int, int] = (0, 0, 0),  # offset, at, length
    lost: int | None = 0,
    repairable: bool = True,
) -> Finding:
    return Finding(named.stem, str(path), kind, *span, message, repairable, lost)


def _check_draft(path: Path) -> Iterator[Finding]:
    if time.time() - path.stat().st_mtime > STALE:
        message = "a file that was never finished"
        yield Finding("", str(path), "stale_draft", 0, 0, 0, message, True, 0)


def _check_open(
    segments: Segments, named: Name, path: Path, older_than: float
) -> Iterator[Finding]:
    state = path.stat()
    dead = named.form == LEFT or time.time() - state.st_mtime > older_than
    end = 0
    for item in segments.read(named.stem):
        if isinstance(item, Damage):
            end = item.offset + item.length
            message = item.message if dead else f"{item.message}; its writer may live"
            span = (item.offset, item.at, item.length)
            yield _finding(named, path, "bad_line", message, span, 1, dead)
        else:
            end = item.place.offset + item.place.length + 1
    if dead and end < state.st_size:
        message = "the last line is not whole: it was never acknowledged"
        yield _finding(named, path, "torn_tail", message, (end, end, state.st_size - end))
    if dead:
        yield _finding(named, path, "not_sealed", "nobody appends to it any more")


def _check_sealed(segments: Segments, named: Name, path: Path) -> Iterator[Finding]:
    handle = open_segment(segments.directory, named.stem)
    try:
        if not handle.sealed:
            return
        intact = True
        for finding in chain(_check_end(named, handle), _check_lines(segments, named, handle)):
            intact = False
            yield finding
        if intact:
            yield from _check_unread_bytes(named, handle)
    finally:
        handle.close()


def _check_end(named: Name, handle: Handle) -> Iterator[Finding]:
    gap = handle.table.gap
    if gap is None:
        return
    all_lines = frames.is_after_lines(os.pread(handle.file, 8, gap.at))
    span = (gap.offset, gap.at, gap.length)
    if all_lines:
        yield _finding(named, handle.path, "bad_footer", gap.message, span)
    else:
        yield _finding(named, handle.path, "truncated", gap.message, span, None)


def _check_lines(segments: Segments, named: Name, handle: Handle) -> Iterator[Finding]:
    """Yield the defects of lines, frames and marks."""
    gap, count = handle.table.gap, _line_counter(handle)
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
        span = (item.offset, item.at, item.length)
        yield _finding(named, handle.path, kind, item.message, span, lost)


def _check_unread_bytes(named: Name, handle: Handle) -> Iterator[Finding]:
    """Yield the defects of a file whose lines are all readable."""
    footer, at = handle.table.footer, handle.table.facts_at
    assert footer is not None
    for size, _ in footer.facts:
        try:
            frames.decode_facts(named.stem, os.pread(handle.file, size, at))
        except Corrupt as error:
            yield _finding(named, handle.path, "bad_facts", str(error), (0, at, 0))
            return
        at += size
    crc = position = 0
    while position < at:
        data = os.pread(handle.file, min(durable.BLOCK, at - position), position)
        crc = zlib.crc32(data, crc)
        position += len(data)
    if crc != footer.crc:
        yield _finding(named, handle.path, "changed", "some bytes that nobody reads are damaged")


def _line_counter(handle: Handle) -> Callable[[int, int], int | None]:
    """Return a function that counts the lines between two offsets, from the facts' lengths."""

    def count(start: int, end: int) -> int | None:
        footer, at, lines = handle.table.footer, handle.table.facts_at, 0
        for size, _ in footer.facts if footer else ():
            try:
                offset, lengths = frames.decode_lengths(os.pread(handle.file, size, at))
            except Corrupt:
                return None
            at += size
            for length in lengths:
                lines += start <= offset < end
                offset += length + 1
        return lines if footer else None

    return count
