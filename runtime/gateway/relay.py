"""A stream from the engine to the client, recorded before it ends, whoever leaves first.

The engine's chunks are read by a task of their own: it outlives the client, so that a client that
goes away in mid-stream ends the request at the engine, and what was sampled is still recorded.
Called by chat.py.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cray_agents.errors import CrayError
from cray_agents.runtime.gateway.capture import Capture
from cray_agents.runtime.gateway.errors import error_json
from cray_agents.runtime.store import Store

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Line = bytes | CrayError | None  # an SSE line; why there are no more; the end


class Relay:
    """Reads `chunks` to their end into `capture` and the store, and queues lines for the client."""

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], capture: Capture, store: Store
    ) -> None:
        self._chunks = chunks
        self._capture = capture
        self._store = store
        self._ready: deque[Line] = deque()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def head(self, seconds: float) -> Line:
        """The first line, or a keep-alive if it does not come in time.

        Raises what the engine refused the request with: then nothing has been sent yet.
        """
        line = await self._next(seconds)
        if isinstance(line, CrayError):
            raise line
        if line is None:
            await self._task  # raises if the task broke
        return line

    async def lines(self, head: Line, seconds: float) -> AsyncIterator[bytes]:
        """The stream's bytes: `head`, what follows, and the end."""
        line = head
        while line is not None:
            if isinstance(line, CrayError):
                yield b"data: " + error_json(line) + b"\n\n"
                return
            yield line
            line = await self._next(seconds)
        await self._task
        yield DONE

    def stop(self) -> None:
        """The client has gone, or has everything."""
        self._task.cancel()

    def _put(self, line: Line) -> None:
        self._ready.append(line)
        self._wake.set()

    async def _next(self, seconds: float) -> Line:
        """What has come, as one piece: a send per token is what a stream costs most."""
        if not self._ready:
            self._wake.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                return KEEP_ALIVE
        lines = []
        while self._ready and isinstance(line := self._ready[0], bytes):
            lines.append(line)
            self._ready.popleft()
        return b"".join(lines) if lines else self._ready.popleft()

    async def _read(self) -> None:
        failure: CrayError | None = None
        unfinished = "error"
        try:
            try:
                await self._forward()
            except asyncio.CancelledError:
                unfinished = "cancelled"
            except CrayError as error:
                failure = error
            if failure is None or self._capture.sampled:
                await self._store.append(self._capture.events(unfinished))
        except CrayError as error:
            failure = error
        finally:
            if failure is not None:
                self._put(failure)
            self._put(None)

    async def _forward(self) -> None:
        try:
            async for chunk in self._chunks:
                shown = self._capture.chunk(chunk)
                if shown is not None:
                    self._put(b"data: " + orjson.dumps(shown) + b"\n\n")
        finally:
            if isinstance(self._chunks, AsyncGenerator):
                await self._chunks.aclose()


class EventStream(StreamingResponse):
    """A relay's lines as the answer; the relay is stopped when the client leaves."""

    def __init__(
        self, relay: Relay, head: Line, keep_alive: float, headers: dict[str, str]
    ) -> None:
        super().__init__(
            relay.lines(head, keep_alive),
            headers={"cache-control": "no-cache", **headers},
            media_type="text/event-stream",
        )
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._relay.stop()
