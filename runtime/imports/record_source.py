"""The records of a file: lines of JSON, a JSON array, or one JSON object; also .zst and .gz.

A file of any size is read in flat memory. Called by importing.py.
"""

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import ijson
import orjson
import zstandard

from cray_agents.errors import BadInput

LONGEST = 256 * 2**20  # bytes of one record: more is no conversation
HEAD = 64 * 2**10  # bytes in which a file's first character must be
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors write


class SourceRecord(NamedTuple):
    """A record of a file, or what is wrong with it. `number`: its line, or place in the array."""

    number: int
    value: Any
    problem: str | None = None


class RecordSource:
    """A file to import. `done` bytes of `size` have been read, as they lie on the disk.

    Raises BadInput if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word = "line"  # what `number` counts
        try:
            self._raw = path.open("rb")
            self.size = path.stat().st_size
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise BadInput(message, param="file") from error

    @property
    def done(self) -> int:
        return self._raw.tell() if not self._raw.closed else self.size

    def records(self) -> Iterator[SourceRecord]:
        """All records, in order. After one of an array that is no JSON nothing can be read."""
        with self._raw, _wrong_as_bad_input(self.path):
            file = io.BufferedReader(_plain(self.path, self._raw), HEAD)
            if file.peek(len(_MARK)).startswith(_MARK):
                file.read(len(_MARK))
            if file.peek(HEAD).lstrip(_SPACE).startswith(b"["):
                self.word = "item"
                yield from _items(file)
            else:
                yield from _lines(file)


@contextmanager
def _wrong_as_bad_input(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise BadInput(f"cannot read {path}: {error}", param="file") from error


def _plain(path: Path, raw: IO[bytes]) -> Any:
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw


def _items(file: IO[bytes]) -> Iterator[SourceRecord]:
    number = 0
    try:
        for value in ijson.items(file, "item", use_float=True):
            number += 1
            yield SourceRecord(number, value)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        yield SourceRecord(number + 1, None, f"not valid JSON: {told}")


def _lines(file: IO[bytes]) -> Iterator[SourceRecord]:
    number = 0
    while line := file.readline(LONGEST):
        number += 1
        if not line.strip():
            continue
        if number == 1 and (whole := _whole(line, file)) is not None:
            yield SourceRecord(1, whole)
            return
        if len(line) == LONGEST and not line.endswith(b"\n"):
            yield SourceRecord(number, None, f"longer than {LONGEST} bytes")
            return
        try:
            yield SourceRecord(number, orjson.loads(line))
        except orjson.JSONDecodeError as error:
            yield SourceRecord(number, None, f"not valid JSON: {error}")


def _whole(first: bytes, file: IO[bytes]) -> Any:
    """The one object that a file is, laid out over many lines; None if it is another kind."""
    if first.strip() not in (b"{",) and not first.rstrip().endswith((b",", b"{", b"[")):
        return None
    rest = file.read(LONGEST)
    try:
        return orjson.loads(first + rest)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"not one JSON object over several lines: {error}", param="file") from error
