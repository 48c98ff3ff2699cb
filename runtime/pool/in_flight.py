"""Requests in flight: count them at a replica, by the version that answers them.

pool.py counts each request. replica_slot.py and lora_adapters.py wait until a version that they
unload has none left.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cray_agents.errors import Overtaken


class ChangeNotifier:
    """Wake every waiter on each change. Unlike asyncio.Condition, notify() needs no lock."""

    def __init__(self) -> None:
        self._rollbacks_waiting = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake every waiter."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._next.wait()

    @contextmanager
    def rollback_waiting(self) -> Iterator[None]:
        """Count one more waiting rollback, and wake every waiter so that it aborts."""
        self._rollbacks_waiting += 1
        self.notify()
        try:
            yield
        finally:
            self._rollbacks_waiting -= 1

    def abort_if_rollback_waits(self, version: str) -> None:
        """Raise Overtaken where a rollback waits; the message names the version not loaded."""
        if self._rollbacks_waiting:
            raise Overtaken(f"{version} was not loaded: a rollback came first. Ask again")

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return when the condition holds. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.wait()


class InFlightRequests:
    """Counts of requests by version; `notifier` fires when a version's last request has ended."""

    def __init__(self, notifier: ChangeNotifier) -> None:
        self._notifier = notifier
        self._requests = Counter[str]()
        self._busy, self._busy_since = 0.0, 0.0

    @property
    def total(self) -> int:
        """Requests in flight."""
        return self._requests.total()

    def count_for(self, version: str) -> int:
        """Return how many requests in flight a version answers."""
        return self._requests[version]

    @property
    def busy_seconds(self) -> float:
        """Seconds so far with at least one request in flight."""
        return self._busy + (time.monotonic() - self._busy_since if self.total else 0.0)

    @contextmanager
    def track(self, version: str) -> Iterator[None]:
        """Count a request as in flight while the block runs."""
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
                self._notifier.notify()
