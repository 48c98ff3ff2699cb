"""RecordSource: read the records of a foreign file of JSON lines, or of one JSON array or object.

The file may be compressed (.zst, .gz). A record has at most LONGEST bytes of text, and its values
at most MOST_MEMORY (exact_json.py): memory stays flat for a file of any size. Here too: `lines_of`
and `read_whole`, for files of other forms. Called by readers.py, and by runtime/imports.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, AnyStr, NamedTuple

from cray_agents.errors import BadInput, SetupError
from cray_agents.exact_json import DEEPEST_FOREIGN, MOST_CONTAINERS, parse_json

LONGEST = 64 * 2**20  # bytes of one record, or characters of a line of text
HEAD = 64 * 2**10  # bytes of the file that must hold its first character
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # UTF-8 byte order mark, which some editors write
_SKIPPED = r'[^"\[\]{}%s]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}%s]*+)*+'  # texts, and no mark
_BRACKET = re.compile((_SKIPPED.replace("%s", "") + r"([\[\]{}])").encode(), re.DOTALL)
_SEPARATOR = re.compile((_SKIPPED.replace("%s", ",") + r"([\[\]{},])").encode(), re.DOTALL)


class SourceRecord(NamedTuple):
    """A record of a file, or its problem. `number` is its line, or its position in the array."""

    number: int
    value: Any
    problem: str | None = None


class RecordSource:
    """A file to read. `done` of `size` bytes on disk have been read. Raises BadInput for `param`.

    `name`, by default the path's, tells whether it is compressed. `replaced` counts its records
    with half a character: see `load_json`.
    """

    def __init__(self, path: Path, param: str = "file", name: str = "") -> None:
        self.path = path
        self._name = name or path.name
        self.word = "line"  # the unit that `number` counts
        self.replaced = 0
        self._param = param
        try:
            self._raw = path.open("rb")
            self.size = path.stat().st_size
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise BadInput(message, param=param) from error

    @property
    def done(self) -> int:
        """Bytes read so far, as stored on disk."""
        return self._raw.tell() if not self._raw.closed else self.size

    def records(self) -> Iterator[SourceRecord]:
        """Yield all records in order. Invalid JSON in an array ends them: the rest is lost.

        So does a record that is longer than LONGEST.
        """
        with self._opened() as file:
            if file.peek(HEAD).lstrip(_SPACE).startswith(b"["):
                self.word = "item"
                yield from self._items(file)
            else:
                yield from self._lines(file)

    def texts(self) -> Iterator[SourceRecord]:
        """Yield the lines of a text in UTF-8, without their ends. A problem ends them."""
        number = 0
        with self._opened() as file:
            try:
                for number, line in lines_of(file):
                    yield SourceRecord(number, line.decode().rstrip("\r\n"))
            except TooLong as error:
                yield SourceRecord(number + 1, None, str(error))
            except UnicodeDecodeError as error:
                yield SourceRecord(number, None, f"not UTF-8: {error}")

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        """Open the content, behind a byte order mark."""
        with self._raw, _decompressed(self.path, self._name, self._raw, self._param) as opened:
            file = io.BufferedReader(opened, HEAD)
            if file.peek(len(_MARK)).startswith(_MARK):
                file.read(len(_MARK))
            yield file

    def _lines(self, file: IO[bytes]) -> Iterator[SourceRecord]:
        number = 0
        try:
            for number, line in lines_of(file):
                if line.isspace():
                    continue
                if number == 1 and (whole := self._read_one_object(line, file)) is not None:
                    yield SourceRecord(1, whole)
                    return
                yield self._parse(number, line)
        except TooLong as error:
            yield SourceRecord(number + 1, None, str(error))

    def _read_one_object(self, first: bytes, file: IO[bytes]) -> Any:
        """Return the object of a file that is one object over several lines, None for others."""
        if first.strip() not in (b"{",) and not first.rstrip().endswith((b",", b"{", b"[")):
            return None
        rest = file.read(LONGEST)
        if len(rest) == LONGEST:
            raise BadInput(f"{self.path}: {TooLong()}", param=self._param)
        try:
            return parse_json(first + rest, DEEPEST_FOREIGN, self._count_replaced)
        except ValueError as error:
            problem = f"not one JSON object over several lines: {error}"
            raise BadInput(problem, param=self._param) from error

    def _items(self, file: IO[bytes]) -> Iterator[SourceRecord]:
        number = 0
        try:
            for number, item in enumerate(_split_array(file), 1):
                record = self._parse(number, item)
                yield record
                if record.problem is not None:
                    return
        except (TooLong, ValueError) as error:
            yield SourceRecord(number + 1, None, str(error))

    def _parse(self, number: int, text: bytes) -> SourceRecord:
        try:
            return SourceRecord(number, parse_json(text, DEEPEST_FOREIGN, self._count_replaced))
        except ValueError as error:
            return SourceRecord(number, None, f"not valid JSON: {error}")

    def _count_replaced(self) -> None:
        self.replaced += 1


class TooLong(BadInput):
    """A record is longer than LONGEST."""

    def __init__(self) -> None:
        super().__init__(f"longer than {LONGEST >> 20} MiB, which is the most that is read")


def lines_of(file: IO[AnyStr]) -> Iterator[tuple[int, AnyStr]]:
    """Yield the lines of a file, numbered from 1. Raises TooLong for one longer than LONGEST."""
    number = 0
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise TooLong
        number += 1
        yield number, line


def read_whole(path: Path, most: int = LONGEST) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises BadInput, OSError."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadInput(f"{path} is longer than {most >> 20} MiB", param="path")
    return content


def _split_array(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the text of each item of a JSON array. Raises TooLong, ValueError.

    It looks at brackets, texts and commas alone: whether an item is JSON is left to its reader.
    """
    data, start, at, depth, items, opened = b"", 0, 0, 0, 0, 0
    while more := file.read(max(HEAD, len(data) - start)):
        data, start, at = data[start:] + more, 0, at - start
        while match := (_SEPARATOR if depth == 1 else _BRACKET).match(data, at):
            at, mark = match.end(), match[1]
            if mark in b"{[":
                depth, opened = depth + 1, opened + (depth > 0)
                start = at if depth == 1 else start
                if opened > MOST_CONTAINERS:
                    yield data[start:at]  # its reader refuses it
                    return
            elif mark == b"," or depth == 1:  # an item has ended
                item = data[start : at - (mark != b"}")]  # with a "}" it is no JSON
                if mark == b"," or items or item.strip():
                    items, opened, start = items + 1, 0, at
                    yield item
                if mark != b",":
                    _refuse_more(data[at:], file)
                    return
            else:
                depth -= 1
        if len(data) - start > LONGEST:
            raise TooLong
    if data[start:].strip():
        yield data[start:]
    raise ValueError("not valid JSON: the array is not closed")


def _refuse_more(rest: bytes, file: IO[bytes]) -> None:
    while not rest.strip(_SPACE):
        if not (rest := file.read(HEAD)):
            return
    raise ValueError("not valid JSON: there is more after the end of the array")


@contextmanager
def _decompressed(path: Path, name: str, raw: IO[bytes], param: str) -> Iterator[Any]:
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    opened: Any = raw
    if name.endswith(".gz"):
        opened = gzip.GzipFile(fileobj=raw)
    elif name.endswith(".zst"):
        try:
            import zstandard
        except ImportError as error:
            what = "files ending in .zst are read with zstandard: pip install 'cray-agents[export]'"
            raise SetupError(what) from error
        broken += (zstandard.ZstdError,)
        opened = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    try:
        yield opened
    except broken as error:
        raise BadInput(f"cannot read {path}: {error}", param=param) from error
