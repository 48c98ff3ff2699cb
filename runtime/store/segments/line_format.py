"""Line format: an event as a line of JSON whose last key is a checksum of the line.

    {"id":"...","run_id":"...","kind":"call","time":1.5,"body":{...},"crc":"0a1b2c3d"}

`crc` is zlib's CRC-32 over the line's bytes before `,"crc"`, as 8 hex digits. A line can thus be
verified anywhere, and is still plain JSON. Written by store.py; read by store.py, indexing.py
and compaction.py. The names of segment files are parsed here too.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
from pydantic_core import from_json

from cray_agents.errors import Corrupt, StoreError
from cray_agents.exact_json import dump_json
from cray_agents.records import Event, new_id
from cray_agents.runtime.disk.checksums import is_whole, with_crc
from cray_agents.runtime.store.segments.facts import Fact

QUOTED = 60  # bytes of a bad line that a message quotes


class LinePlace(NamedTuple):
    """The place of a line: `length` bytes (without its newline) from `offset` in the segment.

    The offset counts uncompressed bytes, so a place stays the same when its segment is sealed.
    """

    segment: str
    offset: int
    length: int


class Placed(NamedTuple):
    """The facts of an event, with the place of its line."""

    fact: Fact
    place: LinePlace


def line_of(event: Event) -> bytes:
    """Return the line of an event, without newline. Raises StoreError if its body is not JSON."""
    plain = {
        "id": event.id,
        "run_id": event.run_id,
        "kind": event.kind,
        "time": event.time,
        "body": event.body,
    }
    try:
        text = dump_json(plain)
    except TypeError as error:  # orjson's JSONEncodeError is one
        raise StoreError(f"event {event.id} is not JSON: {error}") from error
    return with_crc(text)


def event_in(line: bytes) -> dict[str, Any]:
    """Decode a line: keys id, run_id, kind, time, body, crc. Raises Corrupt."""
    if not is_whole(line):
        raise Corrupt(f"not an event, or a damaged one: {line[:QUOTED]!r}")
    try:
        return parse_line(line)
    except ValueError as error:
        raise Corrupt(f"not an event ({error}): {line[:QUOTED]!r}") from error


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line; whole numbers keep all digits. Raises ValueError."""
    try:
        return cast("dict[str, Any]", from_json(line))
    except ValueError:  # it may be nested deeper than from_json reads
        return cast("dict[str, Any]", orjson.loads(line))


OPEN, LEFT, SEALED = ".jsonl", ".left.jsonl", ".jsonl.zst"
FORMS = (SEALED, LEFT, OPEN)  # LEFT before OPEN, since it ends the same
COMPACTED = "compacted_"  # prefix of the stem of a segment that replaces others


class Name(NamedTuple):
    """A parsed file name: the stem of a segment, and its form (OPEN, LEFT, SEALED)."""

    stem: str
    form: str


def name_of(name: str) -> Name | None:
    """Parse the name of a segment's file; None for drafts and other files."""
    if name.startswith("."):
        return None
    for form in FORMS:
        if name.endswith(form) and len(name) > len(form):
            return Name(name.removesuffix(form), form)
    return None


def draft_of(target: Path) -> Path:
    """Return a new name for a draft of a file."""
    return target.with_name(f".{target.name}.{new_id('draft')}")


def is_draft(name: str) -> bool:
    """Tell whether a file is a draft, which may still be written or was abandoned."""
    return name.startswith(".") and ".draft_" in name
