"""The lines of a root's segments, read by zstandard and orjson alone, without the store's code."""

import io
from collections.abc import Iterator
from typing import Any

import orjson
import zstandard

from cray_agents.paths import Home


def lines_of(home: Home) -> Iterator[bytes]:
    """Every whole line of every segment, sealed or open."""
    for path in sorted(home.segments.glob("*.jsonl*")):
        if path.name.startswith("."):  # a draft
            continue
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(
                io.BytesIO(data), read_across_frames=True
            ).read()  # fmt: skip
        yield from data.split(b"\n")[:-1]


def events_of(home: Home) -> Iterator[dict[str, Any]]:
    """The events of these lines."""
    return map(orjson.loads, lines_of(home))
