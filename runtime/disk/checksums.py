"""Checksums: prove that JSON records, journal lines and hashed files are read as written.

    {"id":"file-1","purpose":"batch","crc":"0a1b2c3d"}

`crc` is zlib's CRC-32 over the bytes before `,"crc"`, as 8 hex digits. A record stays plain JSON
to every other reader. A line of a journal has the same form. Records older than the checksums lack
the key, and are read unchecked.

A format may have a whole number, in the key FORMAT of its records or lines. It is raised by each
change that older code would misread; fields that are only added leave it as it is. What has none is
of version 1. A newer one is refused by name, before any other field is looked at but NEEDS: the
first cray-agents that reads it, as in "0.2.0". The code that raises a format writes both.

A whole file is hashed: by SHA-256, written as 64 hex digits, or by BLAKE3, written as `blake3:` and
64 hex digits. BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) is a tree of hashes, of which a
core computes several at once. The trainer's files of weights have it.

Every reader of the shared root calls this module. Damage raises Corrupt, which names the file.
runtime/fsck.py reads the whole root with it. Writers add the checksum with `with_crc` and write
with durable.py.
"""

import hashlib
import importlib.metadata
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.exact_json import dump_json, load_json

MARK = b',"crc":"'
END = b'"}'
TAIL = len(MARK) + 8 + len(END)  # bytes from the mark to the end of the text
ALIKE = 7  # bytes of mark and end left in a damaged checksum; other records have fewer
FORMAT, NEEDS = "format", "needs"
CACHED_HASHES = 65536  # files whose hash this process remembers
HASHED_TOGETHER = 1 << 20  # bytes
BLAKE3 = "blake3:"  # begins a hash that is not a SHA-256

Kind = TypeVar("Kind", bound=BaseModel)
Row = TypeVar("Row")


def with_crc(text: bytes) -> bytes:
    """Return a JSON object with its checksum as the last key; other texts unchanged."""
    if text[-1:] != b"}" or text == b"{}":
        return text
    text = text[:-1]
    return b'%b%b%08x"}' % (text, MARK, zlib.crc32(text))


def record_text(record: BaseModel) -> bytes:
    """Return a record as JSON with its checksum."""
    return with_crc(record.model_dump_json().encode())


def is_whole(text: bytes) -> bool:
    """Tell whether a text ends in a checksum and matches it."""
    start = len(text) - TAIL
    if start <= 0 or text[start:] != b'%b%08x"}' % (MARK, zlib.crc32(memoryview(text)[:start])):
        return False
    return text[0] == ord("{")


def verify_crc(text: bytes, place: object) -> bytes:
    """Check a text and return it without its checksum; a text without one is returned unchanged.

    `place` names the file or line in the error. Raises Corrupt.
    """
    text = text.removesuffix(b"\n")
    if is_whole(text):
        return text[:-TAIL] + b"}"
    tail = text[-TAIL:]
    if sum(a == b for a, b in zip(tail[:8] + tail[-2:], MARK + END, strict=False)) >= ALIKE:
        raise Corrupt(f"{place} is damaged: it is not what its checksum says")
    return text


def parse(text: bytes, place: object) -> Any:
    """Verify and decode a record or a line. Raises Corrupt."""
    text = verify_crc(text, place)
    try:
        return load_json(text)
    except ValueError as error:
        raise Corrupt(f"{place} is damaged: it is not JSON ({error})") from error


def parse_as(kind: type[Kind], text: bytes, place: object) -> Kind:
    """Verify a text and decode it as a pydantic record. Raises Corrupt."""
    text = verify_crc(text, place)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        at = f"{field}: {first['msg']}" if field else first["msg"]
        raise Corrupt(f"{place} cannot be read: {at}") from error


def read_json(path: Path, known: int = 1) -> Any:
    """Read a file of one JSON record, whose format is at most `known`.

    Raises FileNotFoundError, Corrupt, NewerFormat.
    """
    return _parse_known(path.read_bytes(), known, path)


def read_record(kind: type[Kind], path: Path, known: int = 1) -> Kind:
    """Read a file of one pydantic record, whose format is at most `known`.

    Raises FileNotFoundError, Corrupt, NewerFormat.
    """
    text = path.read_bytes()
    if b'"format":' in text:
        content = _parse_known(text, known, path)
        if isinstance(content, dict) and FORMAT not in kind.model_fields:
            content.pop(FORMAT, None)  # some kinds take no other fields
        text = dump_json(content)
    return parse_as(kind, text, path)


def find_record(kind: type[Kind], path: Path, known: int = 1) -> Kind | None:
    """Read a file as `read_record` does; None where there is none. Raises Corrupt, NewerFormat."""
    try:
        return read_record(kind, path, known)
    except FileNotFoundError:
        return None


def _parse_known(text: bytes, known: int, path: Path) -> Any:
    content = parse(text, path)
    if isinstance(content, dict):
        check_version(content.get(FORMAT), known, path, content.get(NEEDS))
    return content


def check_version(version: Any, known: int, what: object, needs: str | None = None) -> int:
    """Return the version of a format, 1 for None.

    `known` is the newest that the caller reads; `what` names the file or line, `needs` the first
    cray-agents that reads it. Raises NewerFormat, or Corrupt if it is no version.
    """
    if version is None:
        return 1
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Corrupt(f"{what} is damaged: {version!r} is no version of a format")
    if version > known:
        to = f" to {needs} or newer" if needs else ""
        raise NewerFormat(
            f"{what} has format {version}, and {_this_package()} reads formats up to {known}: "
            f"upgrade it here{to} (pip install --upgrade cray-agents)"
        )
    return version


@lru_cache(1)
def _this_package() -> str:
    return f"cray-agents {importlib.metadata.version('cray-agents')}"


@dataclass(frozen=True)
class Listing(Generic[Row]):
    """The whole records of a list, in order. `damaged`: the others, each an `id` and a `reason`."""

    rows: list[Row]
    damaged: list[dict[str, str]]
    has_more: bool = False


def list_whole(
    names: Iterable[str], read: Callable[[str], Row], limit: int | None = None
) -> Listing[Row]:
    """Read records in the order of their names, until `limit` of them are whole.

    One that is damaged, of a newer format, or unreadable for its owner, ends no list.
    """
    rows: list[Row] = []
    damaged: list[dict[str, str]] = []
    for name in names:
        if limit is not None and len(rows) == limit:
            return Listing(rows, damaged, has_more=True)
        try:
            rows.append(read(name))
        except (Corrupt, NewerFormat, PermissionError, IsADirectoryError) as error:
            damaged.append({"id": name, "reason": str(error)})
    return Listing(rows, damaged)


class FileHash:
    """The hash of a file's bytes, which are given in order. It is of the kind of the hash `like`.

    Without one it is a SHA-256.
    """

    def __init__(self, like: str = "") -> None:
        self._kind = BLAKE3 if like.startswith(BLAKE3) else ""
        self._hasher: Any = _new_blake3() if self._kind else hashlib.sha256()

    def update(self, content: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._hasher.update(memoryview(content).cast("B"))

    def __str__(self) -> str:
        return self._kind + str(self._hasher.hexdigest())


def hash_of(path: Path, like: str = "") -> str:
    """Return a file's hash of the kind of `like`, cached for this process until the file changes.

    Raises FileNotFoundError.
    """
    stat = path.stat()
    kind = BLAKE3 if like.startswith(BLAKE3) else ""
    return _hash_of(path, kind, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def prove(path: Path, expected: str) -> Path:
    """Return the path if the file matches its hash. Raises Corrupt, also for a missing file."""
    try:
        actual = hash_of(path, expected)
    except FileNotFoundError as error:
        raise Corrupt(f"{path} is missing") from error
    if actual != expected:
        raise Corrupt(f"{path} is damaged: {describe(actual)}, and it was {expected}")
    return path


def describe(actual: str) -> str:
    """Say what a file's hash is, for an error."""
    return f"its {'BLAKE3' if actual.startswith(BLAKE3) else 'SHA-256'} is {actual}"


def _new_blake3() -> Any:
    from blake3 import blake3  # not needed by clients, which read no weights

    return blake3()  # in this thread alone: its own threads would be missing in a forked rank


@lru_cache(CACHED_HASHES)
def _hash_of(path: Path, kind: str, *changed: int) -> str:
    """Hash a file. `changed` are numbers of its stat, part of the cache key."""
    hasher = FileHash(kind)
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASHED_TOGETHER):
            hasher.update(block)
    return str(hasher)
