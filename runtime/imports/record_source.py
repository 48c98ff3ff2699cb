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
import zstandard

from cray_agents.errors import BadInput
from cray_agents.exact_json import load_json

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
    """A file to import. `done` of `size` bytes on disk have been read. Raises BadInput.

    `replaced` counts its records with half a character: see `load_json`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word = "line"  # the unit that `number` counts
        self.replaced = 0
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
                yield from self._lines(file)

    def _lines(self, file: IO[bytes]) -> Iterator[SourceRecord]:
        number = 0
        while line := file.readline(LONGEST):
            number += 1
            if not line.strip():
                continue
            if number == 1 and (whole := self._read_one_object(line, file)) is not None:
                yield SourceRecord(1, whole)
                return
            if len(line) == LONGEST and not line.endswith(b"\n"):
                yield SourceRecord(number, None, f"longer than {LONGEST} bytes")
                return
            try:
                yield SourceRecord(number, load_json(line, self._count_replaced))
            except ValueError as error:
                yield SourceRecord(number, None, f"not valid JSON: {error}")

    def _read_one_object(self, first: bytes, file: IO[bytes]) -> Any:
        """Return the object of a file that is one object over several lines, None for others."""
        if first.strip() not in (b"{",) and not first.rstrip().endswith((b",", b"{", b"[")):
            return None
        rest = file.read(LONGEST)
        try:
            return load_json(first + rest, self._count_replaced)
        except ValueError as error:
            problem = f"not one JSON object over several lines: {error}"
            raise BadInput(problem, param="file") from error

    def _count_replaced(self) -> None:
        self.replaced += 1


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
        if "integer overflow" in problem:
            problem += " (an array holds no whole number beyond 64 bits: write a record per line)"
        yield SourceRecord(number + 1, None, f"not valid JSON: {problem}")
