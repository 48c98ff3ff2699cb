"""Journals: files of JSON lines that one process appends to and any process reads.

    {"event":"step","step":3,"format":1,"crc":"0a1b2c3d"}

A killed writer leaves half a line at the end of its file. No reader returns it, and no writer goes
on behind it: the next process begins a file of its own. Lines have checksums (checksums.py). Used
by the store's segments, batch results, the ledger, the audit log, the hardware sampler, and by all
readers of a training job's events, which trainers/job/journal.py writes.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, overload

import orjson

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.checksums import Kind

LINE_FORMAT = 1  # of a line, also of one that says none
Damaged = Literal["raise", "skip"]

log = logging.getLogger(__name__)


class LineSpan(NamedTuple):
    """A line of a file: `length` bytes from `offset`, without its newline."""

    path: str
    offset: int
    length: int


class LineFile:
    """A new file of lines that only this process appends to.

    A killed process thus leaves its torn line at the end of a file. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self.path = path
        self.size = 0
        self._file = os.open(path, flags, 0o666)  # less the umask
        self._close = weakref.finalize(self, os.close, self._file)
        self._inode = os.fstat(self._file).st_ino
        try:
            durable.sync(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> list[tuple[int, int]]:
        """Put lines (without newlines) on the disk. Return their (offset, length) in bytes.

        Raises OSError, after cutting off a half-written line if possible.
        """
        spans, offset = [], self.size
        for line in lines:
            spans.append((offset, len(line)))
            offset += len(line) + 1
        text = b"\n".join([*lines, b""])
        written = 0
        try:
            while written < len(text):
                written += os.write(self._file, memoryview(text)[written:])
        except OSError:  # such as a full disk; readers use whole lines only
            os.ftruncate(self._file, self.size + text.rfind(b"\n", 0, written) + 1)
            raise
        os.fdatasync(self._file)
        self.size = offset
        return spans

    def is_at_path(self) -> bool:
        """Tell whether the path still names this file: nobody renamed or removed it."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> bool:
        """Close the file and remove it if it is empty. Return whether it stays."""
        try:
            stays = os.fstat(self._file).st_size > 0
            if not stays and self.is_at_path():
                self.path.unlink()
        finally:
            self._close()
        return stays


class Journal:
    """One writer's files of lines; the first line makes the first file.

    Args:
        next_path: returns a new path for each file.
        roll: bytes after which a further file is begun; None: never.
    """

    def __init__(self, next_path: Callable[[], Path], roll: int | None = None) -> None:
        self._next_path, self._roll = next_path, roll
        self._file: LineFile | None = None

    @property
    def begins(self) -> bool:
        """True if the next line is the first one of a file."""
        return self._file is None

    def append(self, lines: Sequence[bytes]) -> list[LineSpan]:
        """Put lines (without newlines) on the disk and return where they are.

        Raises OSError. The next lines then begin another file: this one may end in half a line.
        """
        if self._file is not None and self._roll is not None and self._file.size > self._roll:
            self.close()
        try:
            if self._file is None:
                self._file = LineFile(self._next_path())
            name = str(self._file.path)
            return [LineSpan(name, *span) for span in self._file.append(lines)]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def line_of(value: Mapping[str, Any]) -> bytes:
    """Return a record's line, without newline; numbers that are not finite become null."""
    content = {**value, checksums.FORMAT: LINE_FORMAT}
    return checksums.with_crc(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


@overload
def parse_line(line: bytes, place: object) -> Any: ...
@overload
def parse_line(line: bytes, place: object, kind: type[Kind]) -> Kind: ...
def parse_line(line: bytes, place: object, kind: type[Any] | None = None) -> Any:
    """Return the record that a line was made of: JSON, or a pydantic record of this `kind`.

    Raises Corrupt, NewerFormat.
    """
    value = checksums.parse(line, place)
    if isinstance(value, dict):
        needs = value.get(checksums.NEEDS)
        checksums.check_version(value.pop(checksums.FORMAT, None), LINE_FORMAT, place, needs)
    return checksums.parse_as(kind, line, place) if kind else value


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of a journal; an unfinished last line is left out.

    A last line that is whole but for a damaged end was not cut off: it is among them, to be noticed
    by its parser.
    """
    *lines, rest = content.split(b"\n")
    return [*lines, rest] if checksums.is_whole(rest[:-1]) else lines


def spans(path: Path) -> Iterator[tuple[LineSpan, bytes]]:
    """Yield the lines of a file that may be large, undecoded, without an unfinished last one."""
    name, offset = str(path), 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield LineSpan(name, offset, len(line) - 1), line[:-1]
            offset += len(line)


@overload
def read(path: Path, *, damaged: Damaged = "raise") -> Iterator[Any]: ...
@overload
def read(path: Path, kind: type[Kind], *, damaged: Damaged = "raise") -> Iterator[Kind]: ...
def read(path: Path, kind: type[Any] | None = None, *, damaged: Damaged = "raise") -> Iterator[Any]:
    """Yield the decoded lines of a journal without an unfinished last one; none without a file.

    Args:
        kind: the pydantic record that each line is; None: JSON.
        damaged: raise Corrupt at a damaged line and NewerFormat at one of a newer version, or leave
            them out with a warning.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(split_lines(content), 1):
        if not line:
            continue
        place = f"{path}: line {number}"
        try:
            yield parse_line(line, place, kind) if kind else parse_line(line, place)
        except (Corrupt, NewerFormat) as error:
            if damaged == "raise":
                raise
            log.warning("left out: %s", error)


class Tail:
    """A reader of the new lines of a file that may grow, be replaced or be emptied.

    `replaced`: how often it was replaced or emptied. `most`: bytes before the end at which the
    first read begins; None: it begins at the start.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.replaced = 0
        self._path, self._most = path, most
        self._file: BinaryIO | None = None
        self._rest = b""  # the start of an unfinished line

    def read(self, *, last: bool = False) -> list[bytes]:
        """Return the whole lines since the last read; with `last`, an unfinished one too."""
        lines = self._read_new_lines()
        if self._file is not None and self._names_another(self._file):
            self._file.close()
            self._file = None
            self.replaced += 1
            lines += self._read_new_lines()
        if last and self._rest:
            lines.append(self._rest)
        return lines

    def _read_new_lines(self) -> list[bytes]:
        if self._file is None:
            if not self._path.exists():
                return []
            self._file, self._rest = self._path.open("rb"), b""
            size = os.fstat(self._file.fileno()).st_size
            if self._most is not None and size > self._most:
                self._file.seek(size - self._most)
                self._file.readline()
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
            self.replaced += 1
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def _names_another(self, file: BinaryIO) -> bool:
        """Tell whether the path names another file now; an open file keeps its inode number."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
