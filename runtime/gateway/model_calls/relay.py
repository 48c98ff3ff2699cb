"""A stream from the engine to the client, recorded before it ends, whoever leaves first.

The engine's events are read by a task of their own: it outlives the client, so that a client that
goes away in mid-stream ends the request at the engine, and what was sampled is still recorded.
The event that tells the client that all is well is held back until the record is on the disk.
Called by answers.py.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cray_agents.errors import CrayError
from cray_agents.runtime.gateway.http.error_envelope import error_event
from cray_agents.runtime.gateway.model_calls.apis import Body

KEEP_ALIVE = b": keep-alive\n\n"

Piece = bytes | CrayError | None  # whole events; why there are no more; the end
Record = Callable[[list[Body], str | None, bytes | None], Awaitable[None]]


class Relay:
    """Waits for its turn, reads `pieces` to their end, records the call; what the client is to see
    is queued, and a sign of life when nothing has come for `keep_alive` seconds.

    `last` begins the event that ends the stream; what `told` gives is sent before it. `record`
    gets the stream's data, why it was cut off if it was, and its bytes if it was not. `ended` is
    called once, whatever happens.
    """

    def __init__(
        self,
        turn: Awaitable[None],
        pieces: AsyncGenerator[bytes, None],
        last: bytes,
        told: Callable[[], bytes],
        record: Record,
        ended: Callable[[], None],
        keep_alive: float,
    ) -> None:
        self._turn = turn
        self._pieces = pieces
        self._last = last
        self._told = told
        self._record = record
        self._seen: list[bytes] = []
        self._ready: deque[Piece] = deque()
        self._wake = asyncio.Event()
        self._ended = ended
        self._keep_alive = keep_alive
        self._quiet = True  # since the last beat
        self._timer = asyncio.get_running_loop().call_later(keep_alive, self._beat)
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(self._end)

    async def head(self) -> Piece:
        """What comes first, or a keep-alive if nothing does in time.

        Raises what the engine refused the request with: then nothing has been sent yet.
        """
        piece = await self.next()
        if isinstance(piece, CrayError):
            raise piece
        if piece is None:
            await self._task  # raises if the task broke
        return piece

    async def next(self) -> Piece:
        """What has come, as one piece: a send per token is what a stream costs most."""
        if not self._ready:
            self._wake.clear()
            await self._wake.wait()
        if not isinstance(self._ready[0], bytes) or len(self._ready) == 1:
            return self._ready.popleft()
        pieces = []
        while self._ready and isinstance(piece := self._ready[0], bytes):
            pieces.append(piece)
            self._ready.popleft()
        return b"".join(pieces)

    def stop(self) -> None:
        """The client has gone, or has everything."""
        self._task.cancel()

    def _put(self, piece: Piece) -> None:
        self._ready.append(piece)
        self._quiet = False
        self._wake.set()

    def _beat(self) -> None:
        if self._quiet and not self._ready:
            self._put(KEEP_ALIVE)
        self._quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._beat)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._timer.cancel()
        self._ended()

    async def _read(self) -> None:
        cut: str | None = None
        last = b""
        end: Piece = None
        try:
            try:
                last = await self._forward()
                if last:
                    end = self._told() + last
                else:  # the engine's own error event ended it
                    cut = "error"
            except asyncio.CancelledError:
                cut = "cancelled"
            except CrayError as error:
                cut, end = "error", error
            events = b"".join(self._seen)
            whole = events.removesuffix(last) + end if isinstance(end, bytes) else None
            await self._record(_data(events), cut, whole)
            if end is not None:
                self._put(end)
        except CrayError as error:
            self._put(error)
        finally:
            self._put(None)

    async def _forward(self) -> bytes:
        """Pass on all but the end, which is returned."""
        held = b""
        try:
            await self._turn
            async for piece in self._pieces:
                self._seen.append(piece)
                if held:
                    held += piece
                elif (at := piece.find(self._last)) < 0:
                    self._put(piece)
                else:
                    held = piece[at:]
                    if at:
                        self._put(piece[:at])
        finally:
            await self._pieces.aclose()
        return held


class EventStream(Response):
    """What a relay queues, as the answer; the relay is stopped when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, relay: Relay, head: Piece, headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._relay = relay
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(self._watch(receive))
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            piece = self._head
            while piece is not None:
                if isinstance(piece, CrayError):
                    piece = error_event(piece, scope)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await self._relay.next()
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self._relay.stop()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._relay.stop()


def _data(events: bytes) -> list[Body]:
    """The objects that a stream's events carry."""
    found = [line[6:] for line in events.split(b"\n") if line.startswith(b"data: {")]
    data: list[Body] = orjson.loads(b"[" + b",".join(found) + b"]")
    return data
