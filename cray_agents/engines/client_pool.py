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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WIDTH = 16  # requests at a time, before there is another client
MOST = 64  # clients


@dataclass
class _Client:
    """A client, and how many requests it has now."""

    client: "AsyncOpenAI"
    busy: int = 0


class ClientPool:
    """Clients, made when they are needed. Requests one after the other share a connection."""

    def __init__(self, make: Callable[[], "AsyncOpenAI"]) -> None:
        self._make = make
        # connections belong to the event loop that opened them
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Client]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def one(self) -> Iterator["AsyncOpenAI"]:
        """A client for one request, until that has ended."""
        chosen = self._chosen(self._open.setdefault(asyncio.get_running_loop(), []))
        chosen.busy += 1
        try:
            yield chosen.client
        finally:
            chosen.busy -= 1

    def _chosen(self, here: list[_Client]) -> _Client:
        """The first that has room; a new one; the least busy."""
        free = next((one for one in here if one.busy < WIDTH), None)
        if free is None and len(here) < MOST:
            free = _Client(self._make())
            here.append(free)
        return free or min(here, key=lambda one: one.busy)

    async def close(self) -> None:
        """Close this event loop's clients; the next request opens new ones."""
        for one in self._open.pop(asyncio.get_running_loop(), []):
            await one.client.close()
