"""Reader: read open and sealed segments by place, in order, or their facts only.

Every returned line is verified by its checksum. Damage is reported with its place, and reading goes
on behind it. Called by store.py, index_catchup.py, compaction.py and salvage.py. Read next:
frames.py (layout of sealed segments), handles.py (open files).
"""

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import Corrupt, StoreError
from cray_agents.runtime.disk.checksums import is_whole
from cray_agents.runtime.store.segments import frames
from cray_agents.runtime.store.segments.facts import FACTS
from cray_agents.runtime.store.segments.handles import Handle, Handles, Moved, open_segment
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    FORMS,
    OPEN,
    SEALED,
    LinePlace,
    Placed,
    name_of,
)

BLOCK = 2**20  # bytes of an open segment read at a time
LISTINGS = 8  # tries to list a changing directory twice alike
BAD_MARK = "the mark before a frame is damaged"
BAD_LINE = "a line is not what its checksum says"

__all__ = ["BAD_LINE", "BAD_MARK", "Damage", "Moved", "Segment", "SegmentLine", "Segments"]


class Segment(NamedTuple):
    """A segment in use. `size` is the bytes of its file, for an open one so far."""

    stem: str
    path: Path
    sealed: bool
    size: int


class SegmentLine(NamedTuple):
    """A line verified by its checksum; `data` is without the newline."""

    place: LinePlace
    data: bytes


class Damage(NamedTuple):
    """An unreadable stretch of a segment; reading goes on after it.

    `offset` and `length` are the lost bytes of the lines; length 0 means none, or unknown.
    `at` is the byte of the file at which the damage begins.
    """

    segment: str
    offset: int
    at: int
    length: int
    message: str


# aliases, since `list` is a method within the class
Listing = list[Segment]
Lines = list[bytes]
Batch = list[Placed]
Stems = list[str]
Wanted = list[tuple[int, LinePlace]]  # with the index of each in the result
Known = tuple[int, list[str]]  # of a sealed segment: its size, and the stems that it replaces


class Segments:
    """A reader of the segments of a directory, for any number of threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles = Handles(directory)
        self._sealed: dict[str, Known] = {}

    def list(self) -> Listing:
        """List the segments that no other replaces, by stem. Raises StoreError."""
        try:
            forms = self._current_forms()
            pairs = ((stem, self._known(stem)) for stem in forms if forms[stem] == SEALED)
            sealed = self._sealed = {stem: known for stem, known in pairs if known}
            replaced = {stem for _, replaces in sealed.values() for stem in replaces}
            segments = []
            for stem in sorted(forms.keys() - replaced):
                if stem in sealed:
                    path = self.directory / f"{stem}{SEALED}"
                    segments.append(Segment(stem, path, True, sealed[stem][0]))
                elif forms[stem] != SEALED and (segment := self.find(stem)):
                    segments.append(segment)
        except OSError as error:
            raise _read_error(self.directory, error) from error
        self._handles.drop_open({segment.stem for segment in segments if not segment.sealed})
        return segments

    def find(self, stem: str) -> Segment | None:
        """Return the segment of a stem, also one that another replaces; None if it is gone."""
        for form in (SEALED, *reversed(FORMS)):
            path = self.directory / f"{stem}{form}"
            try:
                return Segment(stem, path, form == SEALED, path.stat().st_size)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _read_error(path, error) from error
        return None

    def replaced_stems(self, stem: str) -> Stems:
        """Return the stems of the segments that a sealed one replaces. Raises Moved, StoreError."""
        footer = self.footer(stem) if stem.startswith(COMPACTED) else None
        return footer.replaces if footer else []

    def footer(self, stem: str) -> frames.Footer | None:
        """Return the footer of a sealed segment; None if it is damaged or the segment is open.

        Raises Moved, StoreError.
        """
        try:
            with self._handles.use(stem) as handle:
                return handle.table.footer if handle.sealed else None
        except StoreError:
            raise
        except OSError as error:
            raise _read_error(self.directory / stem, error) from error

    def lines(self, stem: str) -> int | None:
        """Return the number of lines of a sealed segment; None as for `footer`."""
        footer = self.footer(stem)
        return footer.lines if footer else None

    def fetch(self, places: Sequence[LinePlace]) -> Lines:
        """Return the lines at some places, in their order, each verified by its checksum.

        Raises Moved if a segment is gone, Corrupt if a line is damaged, StoreError.
        """
        lines = [b""] * len(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        for stem, group in groupby(order, key=lambda index: places[index].segment):
            wanted = [(index, places[index]) for index in group]
            try:
                self._fetch(stem, wanted, lines)
            except Moved:
                raise
            except OSError:  # the file under the handle is gone, replaced, or cached in part
                try:
                    self._fetch(stem, wanted, lines, fresh=True)
                except StoreError:
                    raise
                except OSError as error:
                    raise _read_error(self.directory / stem, error) from error
        return lines

    def read(self, stem: str, offset: int = 0) -> Iterator[SegmentLine | Damage]:
        """Yield the lines and the damage of a segment, from the offset of a line's start on.

        An open segment ends before its torn last line. It also ends before a line with zero bytes,
        which other hosts see before the data arrives. Raises Moved, StoreError.
        """
        try:
            handle = open_segment(self.directory, stem)
            try:
                lines = _lines_of_sealed if handle.sealed else _lines_of_open
                yield from lines(stem, handle, offset)
            finally:
                handle.close()
        except StoreError:
            raise
        except OSError as error:
            raise _read_error(self.directory / stem, error) from error

    def facts(self, stem: str) -> Iterator[Batch] | None:
        """Return the facts of a sealed segment's lines, in batches of at most 5,000.

        Return None if it is open, its footer is damaged, or its facts are of another FACTS version.
        The iterator raises Corrupt on damaged facts. In these cases read the lines. Raises Moved,
        StoreError.
        """
        footer = self.footer(stem)
        if footer is None or footer.facts_version != FACTS:
            return None
        return self._facts(stem, footer)

    def close(self) -> None:
        """Close the files. Later reads open them again."""
        self._handles.close()

    def _current_forms(self) -> dict[str, str]:
        """Return the current form of each segment by stem.

        A directory that changes while it is listed may show neither the old name of a file nor
        the new one. So it is listed until two listings agree.
        """
        forms = self._list_forms()
        for _ in range(LISTINGS):
            before, forms = forms, self._list_forms()
            if forms.keys() == before.keys():
                break
        return forms

    def _list_forms(self) -> dict[str, str]:
        forms: dict[str, str] = {}
        try:
            names = os.listdir(self.directory)  # noqa: PTH208  only names are used
        except FileNotFoundError:
            return forms
        for name in names:
            named = name_of(name)
            if named and FORMS.index(named.form) <= FORMS.index(forms.get(named.stem, OPEN)):
                forms[named.stem] = named.form
        return forms

    def _known(self, stem: str) -> Known | None:
        """Return the size of a sealed segment and the stems it replaces; None if it is gone."""
        known = self._sealed.get(stem)
        if known is not None:
            return known
        try:
            return (self.directory / f"{stem}{SEALED}").stat().st_size, self.replaced_stems(stem)
        except (FileNotFoundError, Moved):
            return None

    def _fetch(self, stem: str, wanted: Wanted, lines: Lines, fresh: bool = False) -> None:
        """Read lines of one segment, with places in order, into `lines` at their indexes."""
        with self._handles.use(stem, fresh) as handle:
            if not handle.sealed:
                for index, place in wanted:
                    line = os.pread(handle.file, place.length, place.offset)
                    lines[index] = _verify(line, place, handle)
                return
            start = end = 0
            data = b""
            for index, place in wanted:
                if not start <= place.offset < end:
                    number = handle.table.find(place.offset)
                    data = self._handles.frame(handle, number) if number >= 0 else b""
                    start = handle.table[number].offset if number >= 0 else 0
                    end = start + len(data)
                at = place.offset - start
                lines[index] = _verify(data[at : at + place.length], place, handle)

    def _facts(self, stem: str, footer: frames.Footer) -> Iterator[Batch]:
        try:
            with self._handles.use(stem) as handle:
                at = handle.table.facts_at
                for size, _ in footer.facts:
                    batch = frames.decode_facts(stem, os.pread(handle.file, size, at))
                    at += size
                    if batch:
                        yield batch
        except StoreError:
            raise
        except OSError as error:
            raise _read_error(self.directory / stem, error) from error


def _verify(line: bytes, place: LinePlace, handle: Handle) -> bytes:
    if len(line) != place.length or not is_whole(line):
        raise Corrupt(f"{handle.path}: the line at {place.offset} is not what its checksum says")
    return line


def _read_error(path: Path, error: OSError) -> StoreError:
    if error.errno == errno.ESTALE:
        return Moved(f"{path} is gone: another host has removed it")
    return StoreError(f"cannot read {path}: {error.strerror or error}")


def _lines_of_open(stem: str, handle: Handle, offset: int) -> Iterator[SegmentLine | Damage]:
    with os.fdopen(os.dup(handle.file), "rb", buffering=BLOCK) as file:
        file.seek(offset)
        for data in file:
            if not data.endswith(b"\n"):
                return
            line = data[:-1]
            if is_whole(line):
                yield SegmentLine(LinePlace(stem, offset, len(line)), line)
            elif handle.form == OPEN and b"\0" in line:
                return
            else:
                yield _bad_line(stem, offset, offset, len(data))
            offset += len(data)


def _lines_of_sealed(stem: str, handle: Handle, offset: int) -> Iterator[SegmentLine | Damage]:
    table, unpacker = handle.table, frames.Unpacker()
    if table.gap and offset == 0:
        yield Damage(stem, table.gap.offset, table.gap.at, table.gap.length, table.gap.message)
    for number in range(max(0, table.find(offset)), len(table)):
        frame = table[number]
        mark = os.pread(handle.file, frames.MARK_SIZE, frame.at - frames.MARK_SIZE)
        if mark != frames.encode_mark(frame):
            at = frame.at - frames.MARK_SIZE
            yield Damage(stem, frame.offset, at, 0, BAD_MARK)
        try:
            data = handle.unpack(frame, unpacker)
        except Corrupt as error:
            yield Damage(stem, frame.offset, frame.at, frame.length, str(error))
            continue
        yield from _lines_of_frame(stem, frame, data, offset)


def _lines_of_frame(
    stem: str, frame: frames.Frame, data: bytes, start: int
) -> Iterator[SegmentLine | Damage]:
    offset = frame.offset
    for line in data[:-1].split(b"\n"):
        if offset < start:
            pass
        elif is_whole(line):
            yield SegmentLine(LinePlace(stem, offset, len(line)), line)
        else:
            yield _bad_line(stem, offset, frame.at, len(line) + 1)
        offset += len(line) + 1


def _bad_line(stem: str, offset: int, at: int, length: int) -> Damage:
    return Damage(stem, offset, at, length, BAD_LINE)
