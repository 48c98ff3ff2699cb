"""RecordSource: read the records of a file of JSON lines, or of one JSON array or object.

The file may be compressed (.zst, .gz). Memory stays flat for a file of any size. Called by
import_file.py.
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

LONGEST = 256 * 2**20  # bytes of one record; a conversation is never longer
HEAD = 64 * 2**10  # bytes of the file that must hold its first character
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # UTF-8 byte order mark, which some editors write


class SourceRecord(NamedTuple):
    """A record of a file, or its problem. `number` is its line, or its position in the array."""

    number: int
    value: Any
    problem: str | None = None


class RecordSource:
    """A file to import. `done` of `size` bytes on disk have been read. Raises BadInput."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word = "line"  # the unit that `number` counts
        try:
            self._raw = path.open("rb")
            self.size = path.stat().st_size
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise BadInput(message, param="file") from error

    @property
    def done(self) -> int:
        """Bytes read so far, as stored on disk."""
        return self._raw.tell() if not self._raw.closed else self.size

    def records(self) -> Iterator[SourceRecord]:
        """Yield all records in order. Invalid JSON in an array ends them: the rest is lost."""
        with self._raw, _errors_as_bad_input(self.path):
            file = io.BufferedReader(_decompress(self.path, self._raw), HEAD)
            if file.peek(len(_MARK)).startswith(_MARK):
                file.read(len(_MARK))
            if file.peek(HEAD).lstrip(_SPACE).startswith(b"["):
                self.word = "item"
                yield from _items(file)
            else:
                yield from _lines(file)


@contextmanager
def _errors_as_bad_input(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise BadInput(f"cannot read {path}: {error}", param="file") from error


def _decompress(path: Path, raw: IO[bytes]) -> Any:
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
        problem = " ".join(str(error).split())
        yield SourceRecord(number + 1, None, f"not valid JSON: {problem}")


def _lines(file: IO[bytes]) -> Iterator[SourceRecord]:
    number = 0
    while line := file.readline(LONGEST):
        number += 1
        if not line.strip():
            continue
        if number == 1 and (whole := _read_one_object(line, file)) is not None:
            yield SourceRecord(1, whole)
            return
        if len(line) == LONGEST and not line.endswith(b"\n"):
            yield SourceRecord(number, None, f"longer than {LONGEST} bytes")
            return
        try:
            yield SourceRecord(number, orjson.loads(line))
        except orjson.JSONDecodeError as error:
            yield SourceRecord(number, None, f"not valid JSON: {error}")


def _read_one_object(first: bytes, file: IO[bytes]) -> Any:
    """Return the object of a file that is one object over several lines, None for other files."""
    if first.strip() not in (b"{",) and not first.rstrip().endswith((b",", b"{", b"[")):
        return None
    rest = file.read(LONGEST)
    try:
        return orjson.loads(first + rest)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"not one JSON object over several lines: {error}", param="file") from error
