"""An event as a line of a segment: its JSON, whose last key is a checksum of what stands before.

    {"id":"...","run_id":"...","kind":"call","time":1.5,"body":{...},"crc":"0a1b2c3d"}

`crc` is zlib's CRC-32 over the line's bytes before `,"crc"`, as 8 hex digits: a line proves itself
wherever it lies, and is still plain JSON. Made by store.py, read by reading.py and sealed.py.
"""

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import Corrupt, StoreError
from cray_agents.records import Event, new_id
from cray_agents.runtime.disk.checksums import is_whole, with_crc
from cray_agents.runtime.store.segments.facts import Fact

SHOWN = 60  # bytes of a bad line that a message tells


class LinePlace(NamedTuple):
    """Where a line lies: `length` bytes (its newline not counted) from `offset` in the segment.

    The offset counts the bytes of the lines, not those of a compressed file: a place is the same
    before and after its segment is sealed.
    """

    segment: str
    offset: int
    length: int


class Placed(NamedTuple):
    """What is told of an event, and where its line lies."""

    fact: Fact
    place: LinePlace


def line_of(event: Event) -> bytes:
    """The line of an event, without a newline. Raises StoreError if its body is not JSON."""
    plain = {
        "id": event.id,
        "run_id": event.run_id,
        "kind": event.kind,
        "time": event.time,
        "body": event.body,
    }
    try:
        text = orjson.dumps(plain)
    except TypeError as error:  # orjson's JSONEncodeError is one
        raise StoreError(f"event {event.id} is not JSON: {error}") from error
    return with_crc(text)


def event_in(line: bytes) -> dict[str, Any]:
    """The event of a line: keys id, run_id, kind, time, body, crc. Raises Corrupt."""
    if not is_whole(line):
        raise Corrupt(f"not an event, or a damaged one: {line[:SHOWN]!r}")
    try:
        event: dict[str, Any] = orjson.loads(line)
    except ValueError as error:
        raise Corrupt(f"not an event ({error}): {line[:SHOWN]!r}") from error
    return event


OPEN, LEFT, SEALED = ".jsonl", ".left.jsonl", ".jsonl.zst"
FORMS = (SEALED, LEFT, OPEN)  # LEFT before OPEN, whose ending it has
COMPACTED = "compacted_"  # how the stem of a segment begins that replaces others


class Name(NamedTuple):
    """A segment, and which of its forms (OPEN, LEFT, SEALED) a file is."""

    stem: str
    form: str


def name_of(name: str) -> Name | None:
    """What a file's name says; None for drafts and what is no segment."""
    if name.startswith("."):
        return None
    for form in FORMS:
        if name.endswith(form) and len(name) > len(form):
            return Name(name.removesuffix(form), form)
    return None


def draft_of(target: Path) -> Path:
    """A new name for a draft of a file."""
    return target.with_name(f".{target.name}.{new_id('draft')}")


def is_draft(name: str) -> bool:
    """Whether a file is one that is not finished yet, or never was."""
    return name.startswith(".") and ".draft_" in name
