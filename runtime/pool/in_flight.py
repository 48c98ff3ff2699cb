"""Occupancy: the requests in flight at a replica, by the version that answers them.

pool.py enters one for each request; seat.py and adapters.py wait for those to end whose version is
to go.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cray_agents.errors import Overtaken


class News:
    """Wakes all who wait, each time something changed. Not a Condition: telling never waits."""

    def __init__(self) -> None:
        self.overtaking = 0  # rollbacks that wait for their turn
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()

    def give_way(self, version: str) -> None:
        """Raises Overtaken where a rollback waits: the version was not loaded."""
        if self.overtaking:
            raise Overtaken(f"{version} was not loaded: a rollback came first. Ask again")

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return when it holds. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.wait()


class Occupancy:
    """Counts requests; `news` is told when the last one of a version has ended."""

    def __init__(self, news: News) -> None:
        self._news = news
        self._requests = Counter[str]()
        self._busy, self._busy_since = 0.0, 0.0

    @property
    def total(self) -> int:
        """Requests in flight."""
        return self._requests.total()

    def under(self, version: str) -> int:
        """Requests in flight that a version answers."""
        return self._requests[version]

    @property
    def busy_seconds(self) -> float:
        """Seconds with a request in flight, so far."""
        return self._busy + (time.monotonic() - self._busy_since if self.total else 0.0)

    @contextmanager
    def occupied(self, version: str) -> Iterator[None]:
        """A request is in flight."""
        if not self.total:
            self._busy_since = time.monotonic()
        self._requests[version] += 1
        try:
            yield
        finally:
            busy = self.busy_seconds
            self._requests[version] -= 1
            if not self.total:
                self._busy = busy
            if not self._requests[version]:
                del self._requests[version]
                self._news.tell()
