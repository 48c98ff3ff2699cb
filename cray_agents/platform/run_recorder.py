"""Finished runs on their way to the platform, several a request. Called by platform.py.

While one request is under way, the next runs gather. A run that ends alone goes at once; of
hundreds that end within a second, a request of its own for each would cost the loop and the
platform more of the processor than the runs themselves do (BENCHMARKS.md).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cray_agents.errors import BadInput

MOST = 16  # runs a request: the platform, which reads them at once, keeps nobody waiting for long

Event = dict[str, Any]


class Recording:
    """Sends events in groups, one request after the other. Belongs to one event loop."""

    def __init__(self, send: Callable[[list[Event]], Awaitable[None]]) -> None:
        self._send = send
        self._group: list[Event] = []  # the one that gathers
        self._newest: asyncio.Task[None] | None = None  # ... and its request, once it has events

    async def put(self, event: Event) -> None:
        """Return when the event is stored. Raises what `send` raises of it."""
        sent = self._newest
        if sent is None or not self._group or len(self._group) == MOST:
            self._group = []
            sent = self._newest = asyncio.create_task(self._in_turn(self._group, sent))
        group = self._group
        group.append(event)
        try:
            await asyncio.shield(sent)
        except BadInput:
            if len(group) == 1:
                raise
            await self._send([event])  # it was for another one, or for their size together

    async def _in_turn(self, group: list[Event], before: asyncio.Task[None] | None) -> None:
        """Send a group after the one before, however that ended; it gathers until then."""
        if before is not None:
            await asyncio.wait({before})
        if self._group is group:
            self._group = []
        await self._send(group)
