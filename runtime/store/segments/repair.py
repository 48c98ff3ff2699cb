"""Repair: seal what dead writers left, finish interrupted work, find damage and repair it.

An open segment without appends for an hour, by the file system's own clock, is first renamed. If
its writer still lives, it finds its path gone and writes to a new file (writer.py).

`repair` destroys nothing. The readable lines of a damaged segment go into a new one. It replaces
the old one like a compacted segment, so every host's index follows. The damaged file goes to
`segments/damaged/`. Only lost events change: they also leave the index, and can be sent again.

Called by store.py, which compaction.py and the command line call, and by runtime/fsck.py.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from cray_agents.errors import store_errors
from cray_agents.records import new_id
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    SEALED,
    Name,
    draft_of,
    is_draft,
    name_of,
)
from cray_agents.runtime.store.segments.reader import (
    BAD_LINE,
    Damage,
    Handle,
    Moved,
    SegmentLine,
    Segments,
    open_segment,
)
from cray_agents.runtime.store.segments.sealed import crc_of, seal, verify, write_sealed

ORPHANED = 3600.0  # seconds
STALE = 86400.0  # seconds after which a draft counts as abandoned

log = logging.getLogger(__name__)


def seal_orphans(
    directory: Path, is_own: Callable[[str], bool], older_than: float = ORPHANED
) -> list[Path]:
    """Seal the segments of dead writers. Return their sealed paths. Blocks: call it in a thread.

    `is_own` tells whether a stem belongs to this process, such as `SegmentWriter.holds`. This also
    finishes interrupted seals and compactions, removes replaced segments, and deletes drafts older
    than a day. Segments that cannot be sealed are logged and left for the next call. Raises
    StoreError if the directory cannot be read or written.
    """
    with store_errors(f"cannot look after {directory}"):
        names = sorted(durable.names_in(directory))
        now = file_system_time(directory) if names else 0.0
    sealed = []
    for name in names:
        path = directory / name
        try:
            if is_draft(name) and now - path.stat().st_mtime > STALE:
                path.unlink()
                log.info("removed %s, which was never finished", path)
            elif (left := _take_over(path, is_own, now - older_than)) is not None:
                sealed.append(seal(left))
                log.info("sealed %s, which its writer had left", left)
        except FileNotFoundError:  # another process does the same
            continue
        except OSError as error:
            log.warning("%s stays as it is: %s", path, error)
    remove_replaced(directory)
    return sealed


def remove_replaced(directory: Path) -> list[str]:
    """Remove the segments that others replace, as a compaction does at its end.

    The replacing segments are first read whole. Return the removed stems. Raises StoreError.
    """
    segments, replaced = Segments(directory), set[str]()
    for path in directory.glob(f"{COMPACTED}*{SEALED}"):
        try:
            replaces = segments.replaced_stems(path.name.removesuffix(SEALED))
            if any((directory / f"{stem}{SEALED}").exists() for stem in replaces):
                replaced.update(verify(path).replaces)
        except (FileNotFoundError, Moved):  # another process has replaced and removed it
            continue
        except OSError as error:
            log.warning("what %s replaces stays, too: %s", path, error)
    segments.close()
    gone = []
    for stem in sorted(replaced, key=lambda stem: stem.startswith(COMPACTED)):  # the oldest first
        path = directory / f"{stem}{SEALED}"
        with suppress(FileNotFoundError):
            path.unlink()
            gone.append(stem)
            log.info("removed %s, whose place another segment has taken", path)
    return gone


def file_system_time(directory: Path) -> float:
    """Return the file system's time, which may differ from this host's. Raises OSError."""
    probe = draft_of(directory / "clock")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _take_over(path: Path, is_own: Callable[[str], bool], before: float) -> Path | None:
    """Rename a dead writer's segment. Return the path to seal; None if there is nothing to seal."""
    named = name_of(path.name)
    if named is None or named.form == SEALED or is_own(named.stem):
        return None
    if named.form == LEFT or path.with_name(named.stem + SEALED).exists():
        return path
    if path.stat().st_mtime > before:
        return None
    left = path.with_name(named.stem + LEFT)
    path.rename(left)
    return left


DAMAGED = "damaged"  # the folder for damaged files, within that of the segments

Kind = Literal[
    "lost",  # lines cannot be read
    "damaged",  # bytes that hold no lines, or a file elsewhere under the root
    "unfinished",  # a dead writer's segment, not sealed or not removed; a torn last line
    "leftover",  # a draft, or a segment whose place another has taken
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
    with store_errors(f"cannot read {directory}"):
        existing = durable.names_in(directory)
    segments = Segments(directory)
    in_use = {segment.stem for segment in segments.list()} if existing else set()
    for name in sorted(existing):
        named, path = name_of(name), directory / name
        with store_errors(f"cannot read {path}"), suppress(FileNotFoundError, Moved):
            # these two: sealed or compacted meanwhile
            if is_draft(name):
                if time.time() - path.stat().st_mtime > STALE:
                    message = "a file that was never finished"
                    yield Finding("", str(path), "leftover", 0, 0, 0, message, True, 0)
            elif named is None:
                continue
            elif named.form != SEALED and named.stem + SEALED in existing:
                yield _finding(named, path, "unfinished", "it is sealed, and was not removed")
            elif named.stem not in in_use and segments.find(named.stem) is not None:
                yield _finding(named, path, "leftover", "another segment has taken its place")
            elif named.form == SEALED:
                yield from _check_sealed(segments, named, path)
            else:
                yield from _check_open(segments, named, path, older_than)


def repair(directory: Path, finding: Finding, older_than: float = ORPHANED) -> str:
    """Repair a finding, and all others of its segment. Return a note of the repair.

    Repeated calls are safe. Raises StoreError.
    """
    if not finding.repairable:
        return "left as it is"
    stem = finding.segment
    with store_errors(f"cannot mend {finding.path}"), closing(Segments(directory)) as segments:
        if finding.kind == "leftover" and not stem:
            Path(finding.path).unlink(missing_ok=True)
            return "removed"
        if finding.kind == "leftover":
            gone = remove_replaced(directory)
            return "removed" if stem in gone else "left as it is: it may be needed"
        segment = segments.find(stem)
        if segment is None:
            return "mended already"
        if not segment.sealed or finding.kind == "unfinished":
            seal_orphans(directory, lambda other: other != stem, older_than)
            segment = segments.find(stem)
            if segment is None or not segment.sealed or Path(finding.path).exists():
                return "left as it is: its writer may live, or a newer version has sealed it"
        return _rewrite(segments, stem) or "sealed"


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
            yield _finding(named, path, "lost", message, span, 1, dead)
        else:
            end = item.place.end
    if dead and end < state.st_size:
        message = "the last line is not whole: it was never acknowledged"
        yield _finding(named, path, "unfinished", message, (end, end, state.st_size - end))
    if dead:
        yield _finding(named, path, "unfinished", "nobody appends to it any more")


def _check_sealed(segments: Segments, named: Name, path: Path) -> Iterator[Finding]:
    with closing(open_segment(segments.directory, named.stem)) as handle:
        if not handle.sealed:
            return
        if (gap := handle.table.gap) is not None and gap.newer:
            yield _finding(named, path, "damaged", gap.message, lost=None, repairable=False)
            return
        intact = True
        for finding in chain(_check_end(named, handle), _check_lines(segments, named, handle)):
            intact = False
            yield finding
        footer, at = handle.table.footer, handle.table.end
        if intact and footer is not None and crc_of(handle.file, at) != footer.crc:
            message = "some bytes that nobody reads are damaged"
            yield _finding(named, handle.path, "damaged", message)


def _check_end(named: Name, handle: Handle) -> Iterator[Finding]:
    gap = handle.table.gap
    if gap is None:
        return
    span = (gap.offset, gap.at, 0)
    if gap.lines:
        yield _finding(named, handle.path, "lost", gap.message, span, None)
    else:
        yield _finding(named, handle.path, "damaged", gap.message, span)


def _check_lines(segments: Segments, named: Name, handle: Handle) -> Iterator[Finding]:
    table = handle.table
    for item in segments.read(named.stem):
        if not isinstance(item, Damage) or (table.gap and item.at == table.gap.at):
            continue
        span = (item.offset, item.at, item.length)
        alone = item.message == BAD_LINE
        lost = 1 if alone else table[table.find(item.offset)].lines
        yield _finding(named, handle.path, "lost", item.message, span, lost)
