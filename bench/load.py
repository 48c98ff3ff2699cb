"""A client that keeps some connections busy, and notes when each piece of an answer came.

It is lean, for it shares two cores with what it measures: an asyncio.Protocol without a library.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast


@dataclass
class Load:
    """What came of some requests. Seconds: to the first piece of an answer, and between two."""

    rate: float = 0.0  # requests a second
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    refused: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def ask(port: int, body: bytes, connections: int, requests: int) -> Load:
    """Send `requests` in all over so many connections, each the next when it was answered."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer none"
    lines = f"{head}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    load, left = Load(), iter(range(requests))
    loop, ends, asking = asyncio.get_running_loop(), [], []
    for _ in range(connections):
        ends.append(asyncio.Event())
        connect = partial(_Connection, lines.encode() + body, left, ends[-1], load)
        asking.append((await loop.create_connection(connect, "127.0.0.1", port))[1])
    begun = time.perf_counter()
    for one in asking:
        one.ask()
    await asyncio.gather(*(end.wait() for end in ends))
    load.rate = requests / (time.perf_counter() - begun)
    if next(left, None) is not None or load.refused:
        raise RuntimeError(f"port {port}: {load.refused} refused, or connections were lost")
    return load


def summary(values: Sequence[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    return f"{1000 * statistics.median(values):.1f}, {1000 * percentile(values, 0.99):.1f}"


class _Connection(asyncio.Protocol):
    def __init__(
        self, request: bytes, left: Iterator[int], ended: asyncio.Event, load: Load
    ) -> None:
        self._request, self._left, self._ended, self._load = request, left, ended, load
        self._received = b""
        self._asked = self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    def ask(self) -> None:
        if next(self._left, None) is None:
            self._transport.close()
            return
        self._received, self._last = b"", 0.0
        self._asked = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        now = time.perf_counter()
        if body and self._last:
            self._load.gaps.append(now - self._last)
        elif body:
            self._load.firsts.append(now - self._asked)
        if body:
            self._last = now
        lower = head.lower()
        length = lower.partition(b"content-length:")[2].split(b"\r\n")[0]
        ended = body.endswith(b"0\r\n\r\n") if b"chunked" in lower else len(body) >= int(length)
        if ended:
            self._load.refused += not head.startswith(b"HTTP/1.1 200")
            self.ask()
