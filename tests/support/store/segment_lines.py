"""Events for tests of segments, and a reader that lists a segment's lines."""

import random
from collections.abc import Sequence
from pathlib import Path

from cray_agents.records import Event
from cray_agents.runtime.store.segments.line_format import Fact, LinePlace, facts_of, line_of
from cray_agents.runtime.store.segments.reader import Damage, SegmentLine, Segments


def event(number: int, size: int = 100) -> Event:
    """A reward whose line is about `size` bytes longer than it must be."""
    noise = random.Random(number).randbytes(size // 2).hex()
    body = {"name": noise, "value": number % 2, "source": "test", "time": 1.0}
    return Event(id=f"e{number}", run_id=f"r{number // 3}", kind="reward", body=body, time=number)


def line(number: int, size: int = 100) -> bytes:
    return line_of(event(number, size))


def fact(number: int, size: int = 100) -> Fact:
    return facts_of(event(number, size).model_dump())


def placed(stem: str, lines: Sequence[bytes]) -> list[SegmentLine]:
    """Where the lines lie that are the whole of a segment."""
    found, offset = [], 0
    for each in lines:
        found.append(SegmentLine(LinePlace(stem, offset, len(each)), each))
        offset += len(each) + 1
    return found


def write_open(directory: Path, stem: str, lines: Sequence[bytes], torn: bytes = b"") -> Path:
    """A segment as its writer leaves it when it is killed."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{stem}.jsonl"
    path.write_bytes(b"".join(each + b"\n" for each in lines) + torn)
    return path


def read_all(segments: Segments, stem: str) -> tuple[list[SegmentLine], list[Damage]]:
    """The lines that can be read, and the damage."""
    lines: list[SegmentLine] = []
    damage: list[Damage] = []
    for item in segments.read(stem):
        if isinstance(item, SegmentLine):
            lines.append(item)
        else:
            damage.append(item)
    return lines, damage
