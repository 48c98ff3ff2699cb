"""Reading segments, open and sealed ones alike: by place, in order, or what they tell of it.

Nothing is returned that its checksum does not prove. What is damaged is told with its place, and
reading goes on behind it. Called by store.py, catching_up.py, compaction.py and salvage.py. Read
next: frames.py (how sealed segments lie), handles.py (open files).
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
LOOKS = 8  # at a directory whose names change, before the last look has to do
BAD_MARK = "the mark before a frame is damaged"
BAD_LINE = "a line is not what its checksum says"

__all__ = ["BAD_LINE", "BAD_MARK", "Damage", "Moved", "Segment", "SegmentLine", "Segments"]


class Segment(NamedTuple):
    """A segment that counts. `size`: bytes of its file (of an open one: so far)."""

    stem: str
    path: Path
    sealed: bool
    size: int


class SegmentLine(NamedTuple):
    """A whole line that its checksum proves; `data` is without the newline."""

    place: LinePlace
    data: bytes


class Damage(NamedTuple):
    """Something in a segment that cannot be read; reading goes on behind it.

    `offset` and `length`: which bytes of the lines are lost (length 0: none, or not known).
    `at`: where in the file the damage lies.
    """

    segment: str
    offset: int
    at: int
    length: int
    message: str


# within the class, `list` is something else
Found = list[Segment]
Lines = list[bytes]
Batch = list[Placed]
Stems = list[str]
Wanted = list[tuple[int, LinePlace]]  # with an index into what is found
Known = tuple[int, list[str]]  # of a sealed segment: its size, and what it replaces


class Segments:
    """The segments of a directory, for any number of threads. Only reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles = Handles(directory)
        self._sealed: dict[str, Known] = {}

    def list(self) -> Found:
        """The segments that count, by stem. No directory is no segments. Raises StoreError."""
        try:
            forms = self._forms()
            told = ((stem, self._known(stem)) for stem in forms if forms[stem] == SEALED)
            sealed = self._sealed = {stem: known for stem, known in told if known}
            replaced = {stem for _, replaces in sealed.values() for stem in replaces}
            found = []
            for stem in sorted(forms.keys() - replaced):
                if stem in sealed:
                    path = self.directory / f"{stem}{SEALED}"
                    found.append(Segment(stem, path, True, sealed[stem][0]))
                elif forms[stem] != SEALED and (segment := self.find(stem)):
                    found.append(segment)
        except OSError as error:
            raise _unread(self.directory, error) from error
        self._handles.drop_open({segment.stem for segment in found if not segment.sealed})
        return found

    def find(self, stem: str) -> Segment | None:
        """The segment of a stem as it is now (also one that another replaces), or None."""
        for form in (SEALED, *reversed(FORMS)):
            path = self.directory / f"{stem}{form}"
            try:
                return Segment(stem, path, form == SEALED, path.stat().st_size)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unread(path, error) from error
        return None

    def replaced(self, stem: str) -> Stems:
        """The segments whose place a sealed one takes. Raises Moved, StoreError."""
        footer = self.footer(stem) if stem.startswith(COMPACTED) else None
        return footer.replaces if footer else []

    def footer(self, stem: str) -> frames.Footer | None:
        """What a sealed segment tells of itself; None for an open one, or if that is damaged.

        Raises Moved, StoreError.
        """
        try:
            with self._handles.use(stem) as handle:
                return handle.table.footer if handle.sealed else None
        except StoreError:
            raise
        except OSError as error:
            raise _unread(self.directory / stem, error) from error

    def lines(self, stem: str) -> int | None:
        """How many lines a sealed segment has; None as for `footer`."""
        footer = self.footer(stem)
        return footer.lines if footer else None

    def fetch(self, places: Sequence[LinePlace]) -> Lines:
        """The lines at some places, in their order, each proven by its checksum.

        Raises Moved where a segment is gone, Corrupt where a line is not what it was, StoreError.
        """
        found = [b""] * len(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        for stem, group in groupby(order, key=lambda index: places[index].segment):
            wanted = [(index, places[index]) for index in group]
            try:
                self._fetch(stem, wanted, found)
            except Moved:
                raise
            except OSError:  # the file under the handle is gone, replaced, or cached in part
                try:
                    self._fetch(stem, wanted, found, fresh=True)
                except StoreError:
                    raise
                except OSError as error:
                    raise _unread(self.directory / stem, error) from error
        return found

    def read(self, stem: str, offset: int = 0) -> Iterator[SegmentLine | Damage]:
        """The lines of a segment from an offset (the start of a line) on, and what is damaged.

        An open segment ends before its torn last line, and before a line with bytes that are zero:
        those are not written yet, as other hosts see it. Raises Moved, StoreError.
        """
        try:
            handle = open_segment(self.directory, stem)
            try:
                lines = _lines_of_sealed if handle.sealed else _lines_of_open
                yield from lines(stem, handle, offset)
            finally:
                os.close(handle.file)
        except StoreError:
            raise
        except OSError as error:
            raise _unread(self.directory / stem, error) from error

    def facts(self, stem: str) -> Iterator[Batch] | None:
        """What a sealed segment tells of its lines, in batches of at most 5,000; else None.

        None: it is open, its footer is damaged, or it was sealed with another FACTS version: then
        read the lines. The iterator raises Corrupt where it is damaged itself (read the lines).
        Raises Moved, StoreError.
        """
        footer = self.footer(stem)
        if footer is None or footer.facts_version != FACTS:
            return None
        return self._facts(stem, footer)

    def close(self) -> None:
        """Close the files. What is fetched afterwards opens them again."""
        self._handles.close()

    def _forms(self) -> dict[str, str]:
        """By stem, the form that counts.

        A directory that changes while it is listed may show neither the old name of a file nor
        the new one: it is looked at until two looks agree on what is there.
        """
        forms = self._look()
        for _ in range(LOOKS):
            before, forms = forms, self._look()
            if forms.keys() == before.keys():
                break
        return forms

    def _look(self) -> dict[str, str]:
        forms: dict[str, str] = {}
        try:
            names = os.listdir(self.directory)  # noqa: PTH208  names are all that is needed
        except FileNotFoundError:
            return forms
        for name in names:
            named = name_of(name)
            if named and FORMS.index(named.form) <= FORMS.index(forms.get(named.stem, OPEN)):
                forms[named.stem] = named.form
        return forms

    def _known(self, stem: str) -> Known | None:
        """The size of a sealed segment and what it replaces; None if it is gone by now."""
        known = self._sealed.get(stem)
        if known is not None:
            return known
        try:
            return (self.directory / f"{stem}{SEALED}").stat().st_size, self.replaced(stem)
        except (FileNotFoundError, Moved):
            return None

    def _fetch(self, stem: str, wanted: Wanted, found: Lines, fresh: bool = False) -> None:
        """Put the lines of one segment, whose places are in order, where they belong in `found`."""
        with self._handles.use(stem, fresh) as handle:
            if not handle.sealed:
                for index, place in wanted:
                    line = os.pread(handle.file, place.length, place.offset)
                    found[index] = _proven(line, place, handle)
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
                found[index] = _proven(data[at : at + place.length], place, handle)

    def _facts(self, stem: str, footer: frames.Footer) -> Iterator[Batch]:
        try:
            with self._handles.use(stem) as handle:
                at = handle.table.facts_at
                for size, _ in footer.facts:
                    batch = frames.facts_in(stem, os.pread(handle.file, size, at))
                    at += size
                    if batch:
                        yield batch
        except StoreError:
            raise
        except OSError as error:
            raise _unread(self.directory / stem, error) from error


def _proven(line: bytes, place: LinePlace, handle: Handle) -> bytes:
    if len(line) != place.length or not is_whole(line):
        raise Corrupt(f"{handle.path}: the line at {place.offset} is not what its checksum says")
    return line


def _unread(path: Path, error: OSError) -> StoreError:
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
        if mark != frames.mark_of(frame):
            at = frame.at - frames.MARK_SIZE
            yield Damage(stem, frame.offset, at, 0, BAD_MARK)
        try:
            data = handle.unpack(frame, unpacker)
        except Corrupt as error:
            yield Damage(stem, frame.offset, frame.at, frame.length, str(error))
            continue
        yield from _lines_in(stem, frame, data, offset)


def _lines_in(
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
