"""The openai clients of an engine: one an event loop, and one more for every so many requests.

A client of httpx looks at each of its connections, at idle ones with a system call, whenever a
request begins or ends: with 512 at a time that cost more of the processor than all else about a
call did (BENCHMARKS.md). Several clients of few connections each do not. Called by
openai_engine.py and transport.py.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WIDTH = 16  # requests at a time, before there is another client
MOST = 64  # clients


@dataclass
class _Open:
    """What one event loop has: connections belong to the loop that opened them."""

    clients: list["AsyncOpenAI"] = field(default_factory=list)
    busy: int = 0


class Connections:
    """Clients, made when they are needed. Requests one after the other share a connection."""

    def __init__(self, make: Callable[[], "AsyncOpenAI"]) -> None:
        self._make = make
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def one(self) -> Iterator["AsyncOpenAI"]:
        """A client for one request, until that has ended."""
        here = self._open.setdefault(asyncio.get_running_loop(), _Open())
        number = min(here.busy // WIDTH, MOST - 1)
        while len(here.clients) <= number:
            here.clients.append(self._make())
        here.busy += 1
        try:
            yield here.clients[number]
        finally:
            here.busy -= 1

    async def close(self) -> None:
        """Close this event loop's clients; the next request opens new ones."""
        here = self._open.pop(asyncio.get_running_loop(), _Open())
        for client in here.clients:
            await client.close()
