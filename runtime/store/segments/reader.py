"""Reader: read open and sealed segments by place or in order.

Every returned line is verified by its checksum. Damage is reported with its place, and reading goes
on behind it. A few files are kept open for the next read, with their tables and recently unpacked
frames. Called by store.py, indexing.py, compaction.py and repair.py. Read next: sealed.py (layout
of sealed segments).
"""

import errno
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import Corrupt, StoreError, store_errors
from cray_agents.runtime.disk.checksums import is_whole
from cray_agents.runtime.disk.durable import names_in
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    FORMS,
    LEFT,
    OPEN,
    SEALED,
    LinePlace,
    name_of,
)
from cray_agents.runtime.store.segments.sealed import Footer, Frame, Table, Unpacker, read_table

MAX_OPEN = 64  # files kept open
MAX_UNPACKED = 16 * 2**20  # bytes of unpacked frames that are kept


class Moved(StoreError):
    """A segment is gone because it was compacted. Get the places from the index again."""


class Handle:
    """A segment's open file, in one of its forms. `users` counts its readers."""

    def __init__(self, path: Path, file: int, form: str) -> None:
        self.path = path
        self.file = file
        self.close = weakref.finalize(self, os.close, file)  # also where nobody closes it
        self.form = form
        self.users = 0
        self.kept = True
        self._table: Table | None = None

    @property
    def sealed(self) -> bool:
        """True for a sealed segment, which has a table."""
        return self.form == SEALED

    @property
    def table(self) -> Table:
        """The table of a sealed segment's frames. Raises OSError."""
        if self._table is None:
            self._table = read_table(self.file)
        return self._table

    def unpack(self, frame: Frame, unpacker: Unpacker) -> bytes:
        """Read and unpack the lines of a frame. Raises Corrupt, OSError."""
        data = os.pread(self.file, frame.size, frame.at)
        try:
            return unpacker.unpack(data, frame.length)
        except Corrupt as error:
            raise Corrupt(f"{self.path} at byte {frame.at}: {error}") from error


class Handles:
    """The open files of a directory's segments, for any number of threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()  # by handle, index
        self._unpacked = 0  # bytes of these frames
        self._unpacker = Unpacker()

    @contextmanager
    def use(self, stem: str, fresh: bool = False) -> Iterator[Handle]:
        """Borrow a segment's file; with `fresh`, open it anew. Raises Moved, OSError."""
        with self._lock:
            if fresh:
                self._drop(stem)
            handle = self._handles.get(stem)
            if handle is not None:
                handle.users += 1
                self._handles.move_to_end(stem)
        if handle is None:
            handle = self._open(stem)
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                self._close_unused(handle)

    def frame(self, handle: Handle, index: int) -> bytes:
        """Return the lines of a sealed segment's frame. Raises Corrupt, OSError."""
        key = (id(handle), index)
        with self._lock:
            data = self._frames.get(key)
            if data is not None:
                self._frames.move_to_end(key)
                return data
        data = handle.unpack(handle.table[index], self._unpacker)
        with self._lock:
            if handle.kept and key not in self._frames:
                self._frames[key] = data
                self._unpacked += len(data)
                while self._unpacked > MAX_UNPACKED:
                    self._unpacked -= len(self._frames.popitem(last=False)[1])
        return data

    def drop_open(self, open_stems: set[str]) -> None:
        """Forget files of segments no longer open: they may be sealed or gone."""
        with self._lock:
            for stem, handle in list(self._handles.items()):
                if not handle.sealed and stem not in open_stems:
                    self._drop(stem)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for stem in list(self._handles):
                self._drop(stem)

    def _open(self, stem: str) -> Handle:
        handle = open_segment(self._directory, stem)
        handle.users = 1
        with self._lock:
            if stem in self._handles:  # another thread was faster: keep that one, use this once
                handle.kept = False
                return handle
            self._handles[stem] = handle
            while len(self._handles) > MAX_OPEN:
                self._drop(next(iter(self._handles)))
        return handle

    def _drop(self, stem: str) -> None:
        handle = self._handles.pop(stem, None)
        if handle is None:
            return
        handle.kept = False
        for key in [key for key in self._frames if key[0] == id(handle)]:
            self._unpacked -= len(self._frames.pop(key))
        self._close_unused(handle)

    @staticmethod
    def _close_unused(handle: Handle) -> None:
        if not handle.kept and handle.users == 0:
            handle.close()


def open_segment(directory: Path, stem: str) -> Handle:
    """Open a segment's file: the sealed one if there is one. Raises Moved, OSError."""
    for form in (SEALED, OPEN, LEFT, SEALED):  # in the order of renames, which may happen meanwhile
        path = directory / f"{stem}{form}"
        with suppress(FileNotFoundError):
            return Handle(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), form)
    raise Moved(f"there is no segment {stem} in {directory} any more")


BLOCK = 2**20  # bytes of an open segment read at a time
LISTINGS = 8  # tries to list a changing directory twice alike
BAD_LINE = "a line is not what its checksum says"


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
        with _reading(self.directory):
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
        self._handles.drop_open({segment.stem for segment in segments if not segment.sealed})
        return segments

    def find(self, stem: str) -> Segment | None:
        """Return the segment of a stem, also one that another replaces; None if it is gone."""
        for form in (SEALED, *reversed(FORMS)):
            path = self.directory / f"{stem}{form}"
            with _reading(path), suppress(FileNotFoundError):
                return Segment(stem, path, form == SEALED, path.stat().st_size)
        return None

    def replaced_stems(self, stem: str) -> Stems:
        """Return the stems of the segments that a sealed one replaces. Raises Moved, StoreError."""
        footer = self.footer(stem) if stem.startswith(COMPACTED) else None
        return footer.replaces if footer else []

    def footer(self, stem: str) -> Footer | None:
        """Return the footer of a sealed segment; None if it is damaged or the segment is open.

        Raises Moved, StoreError.
        """
        with _reading(self.directory / stem), self._handles.use(stem) as handle:
            return handle.table.footer if handle.sealed else None

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
                with _reading(self.directory / stem):
                    self._fetch(stem, wanted, lines, fresh=True)
        return lines

    def read(self, stem: str, offset: int = 0) -> Iterator[SegmentLine | Damage]:
        """Yield the lines and the damage of a segment, from the offset of a line's start on.

        An open segment ends before its torn last line. It also ends before a line with zero bytes,
        which other hosts see before the data arrives. Raises Moved, StoreError.
        """
        with (
            _reading(self.directory / stem),
            closing(open_segment(self.directory, stem)) as handle,
        ):
            lines = _lines_of_sealed if handle.sealed else _lines_of_open
            yield from lines(stem, handle, offset)

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
        for name in names_in(self.directory):
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


def _verify(line: bytes, place: LinePlace, handle: Handle) -> bytes:
    if len(line) != place.length or not is_whole(line):
        raise Corrupt(f"{handle.path}: the line at {place.offset} is not what its checksum says")
    return line


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise Moved or StoreError for a system error."""
    try:
        with store_errors(f"cannot read {path}"):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
            raise Moved(f"{path} is gone: another host has removed it") from error
        raise


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
    table, unpacker = handle.table, Unpacker()
    if table.gap and offset == 0:
        yield Damage(stem, table.gap.offset, table.gap.at, 0, table.gap.message)
    for number in range(max(0, table.find(offset)), len(table)):
        frame = table[number]
        try:
            data = handle.unpack(frame, unpacker)
        except Corrupt as error:
            yield Damage(stem, frame.offset, frame.at, frame.length, str(error))
            continue
        yield from _lines_of_frame(stem, frame, data, offset)


def _lines_of_frame(
    stem: str, frame: Frame, data: bytes, start: int
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
