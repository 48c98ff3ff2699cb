"""What is read is what was written: JSON records with a checksum, and files that a hash names.

    {"id":"file-1","purpose":"batch","crc":"0a1b2c3d"}

`crc` is zlib's CRC-32 over the bytes before `,"crc"`, as 8 hex digits. To every other reader a
record stays plain JSON. A line of a journal has the same form. Records from before there were
checksums have no such key, and are read as they are.

Every reader of the shared root calls this module; damage is Corrupt, which names the file. fsck.py
reads the whole root with it. Who writes: durable.py, with `with_crc`.
"""

import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from cray_agents.errors import Corrupt
from cray_agents.runtime.disk import durable

MARK = b',"crc":"'
END = b'"}'
TAIL = len(MARK) + 8 + len(END)  # bytes from the mark to the end of the text
ALIKE = 7  # bytes of mark and end that a damaged checksum still has; no other record has so many
REMEMBERED = 65536  # files whose hash this process knows

Kind = TypeVar("Kind", bound=BaseModel)


def with_crc(text: bytes) -> bytes:
    """A JSON object with its checksum as the last key; what has no keys stays as it is."""
    if text[-1:] != b"}" or text == b"{}":
        return text
    text = text[:-1]
    return b'%b%b%08x"}' % (text, MARK, zlib.crc32(text))


def is_whole(text: bytes) -> bool:
    """Whether a text has a checksum and is what that says."""
    start = len(text) - TAIL
    if start <= 0 or text[start:] != b'%b%08x"}' % (MARK, zlib.crc32(memoryview(text)[:start])):
        return False
    return text[0] == ord("{")


def proven(text: bytes, place: object) -> bytes:
    """The JSON that was given to `with_crc`; an older text is returned as it is.

    `place` is where it was read: a file, or a line of one. Raises Corrupt.
    """
    text = text.removesuffix(b"\n")
    if is_whole(text):
        return text[:-TAIL] + b"}"
    tail = text[-TAIL:]
    if sum(a == b for a, b in zip(tail[:8] + tail[-2:], MARK + END, strict=False)) >= ALIKE:
        raise Corrupt(f"{place} is damaged: it is not what its checksum says")
    return text


def parse(text: bytes, place: object) -> Any:
    """What a record or a line says. Raises Corrupt."""
    text = proven(text, place)
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise Corrupt(f"{place} is damaged: it is not JSON ({error})") from error


def parse_as(kind: type[Kind], text: bytes, place: object) -> Kind:
    """The same as one of our records. Raises Corrupt."""
    text = proven(text, place)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        field = ".".join(map(str, found["loc"]))
        at = f"{field}: {found['msg']}" if field else found["msg"]
        raise Corrupt(f"{place} cannot be read: {at}") from error


def read_json(path: Path) -> Any:
    """What a file with one record says. Raises FileNotFoundError, Corrupt."""
    return parse(path.read_bytes(), path)


def read_record(kind: type[Kind], path: Path) -> Kind:
    """The same as one of our records. Raises FileNotFoundError, Corrupt."""
    return parse_as(kind, path.read_bytes(), path)


def read_lines(path: Path) -> Iterator[Any]:
    """What the whole lines of a journal say; a last one that is being written is left out.

    Raises FileNotFoundError, Corrupt, which names the line.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if line:
            yield parse(line, f"{path}: line {number}")


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file's bytes: read once a process, unless the file changes.

    Raises FileNotFoundError.
    """
    found = path.stat()
    return _sha256_of(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def prove(path: Path, sha256: str) -> Path:
    """The path of a file that holds what its hash says. Raises Corrupt, also if it is missing."""
    try:
        found = sha256_of(path)
    except FileNotFoundError as error:
        raise Corrupt(f"{path} is missing") from error
    if found != sha256:
        raise Corrupt(f"{path} is damaged: its SHA-256 is {found}, and it was {sha256}")
    return path


@lru_cache(REMEMBERED)
def _sha256_of(path: Path, *changed: int) -> str:
    """`changed`: what would be another number, had the file changed."""
    return durable.sha256_file(path)
