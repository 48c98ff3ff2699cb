"""Stream recorder: pass an engine's events to the client, and record them before the last.

A task of its own reads the events and outlives the client. When a client leaves in mid-stream, the
task ends the request at the engine and records the tokens sampled so far. The final event waits
until the record is on the disk, and with it all that tells the end of the answer: a client may act
on its finish reason. Called by answer.py.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cray_agents.errors import CrayError, NotFound
from cray_agents.records import Event
from cray_agents.runtime.background import start_task
from cray_agents.runtime.gateway.http.client_work import until_left
from cray_agents.runtime.gateway.http.error_envelope import error_event
from cray_agents.runtime.gateway.model_calls.call import Call, Piece
from cray_agents.runtime.gateway.services import Services

KEEP_ALIVE = b": keep-alive\n\n"

Record = Callable[[bytes, str | None, Piece], Awaitable[None]]


class StreamRecorder:
    """A stream on its way: its events are queued for the client and recorded at their end.

    Args:
        call: ended with the stream, whatever happens, and its ticket released.
        slot: waits for the call's place at the engines.
        pieces: the engine's events.
        record: takes the stream's events, the reason if it was cut off, and its bytes or its error.
        keep_alive: seconds of silence after which a comment line is sent.
        hold: send no event before all are recorded.
    """

    def __init__(
        self,
        call: Call,
        slot: Awaitable[None],
        pieces: AsyncGenerator[bytes, None],
        record: Record,
        keep_alive: float,
        *,
        hold: bool = False,
    ) -> None:
        self._call = call
        self._slot = slot
        self._pieces = pieces
        self._unfinished = call.choices
        self._record = record
        self._seen: list[bytes] = []
        self.first_at = 0.0  # when the engine's first events came, by time.perf_counter
        self._ready: deque[Piece] = deque()
        self._wake = asyncio.Event()
        self._keep_alive = keep_alive
        self._hold = hold
        self._recording = False
        self._quiet = True  # since the last beat
        self._timer = asyncio.get_running_loop().call_later(keep_alive, self._beat)
        self._task = start_task("recording of a stream", self._read())
        self._task.add_done_callback(self._end)

    async def first_piece(self) -> Piece:
        """Return the first events, or a keep-alive if none come in time.

        Raises the engine's error if it refused the request: nothing has been sent by then.
        """
        piece = await self.next()
        if isinstance(piece, CrayError):
            raise piece
        if piece is None:
            await self._task  # raises if the task broke
        return piece

    async def next(self) -> Piece:
        """Return all queued events as one piece: sending each token alone would cost the most."""
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

    @property
    def events(self) -> int:
        """The number of events that came from the engine."""
        return b"".join(self._seen).count(b"\n\n")

    def stop(self) -> None:
        """Stop reading: the client has left or has everything."""
        if not self._recording:  # else a repeat would not find what is being written
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
        self._call.ticket.release()
        self._call.leave()

    async def _read(self) -> None:
        cut: str | None = None
        last = b""
        end: Piece = None
        try:
            try:
                last = await self._forward()
                if (at := last.find(self._call.api.last_event)) >= 0:
                    end = last[:at] + self._call.samples_event() + last[at:]
                else:  # ended by the engine's own error event
                    cut, end = "error", last or None
            except asyncio.CancelledError:
                cut = "cancelled"
            except CrayError as error:
                cut, end = "error", error
            events = b"".join(self._seen)
            whole = events.removesuffix(last) + end if isinstance(end, bytes) else end
            self._recording = True
            await self._record(events, cut, whole)
            if end is not None:
                self._put(end)
        except CrayError as error:
            self._put(error)
        finally:
            self._put(None)

    async def _forward(self) -> bytes:
        """Queue all events but those that tell the end of the answer, and return these."""
        tail = b""
        try:
            await self._slot
            async for piece in self._pieces:
                if not self._seen:
                    self.first_at = time.perf_counter()
                self._seen.append(piece)
                if self._hold:
                    continue
                if tail:
                    tail += piece
                elif (at := self._find_end(piece)) < 0:
                    self._put(piece)
                else:
                    tail = piece[at:]
                    if at:
                        self._put(piece[:at])
        finally:
            await self._pieces.aclose()
        return b"".join(self._seen) if self._hold else tail

    def _find_end(self, piece: bytes) -> int:
        """Return where the events begin that tell the end of the last sequence; -1: not here."""
        finish = self._call.api.finish
        at = piece.find(finish)
        while at >= 0:
            self._unfinished -= 1
            if not self._unfinished:
                head, end, _ = piece[:at].rpartition(b"\n\n")
                return len(head + end)
            at = piece.find(finish, at + 1)
        return piece.find(self._call.api.last_event)


class EventStream(Response):
    """The answer that sends a recorder's queue; it stops the recorder when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, recorder: StreamRecorder, first: Piece, headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._recorder = recorder
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(self._watch(receive))
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            piece = self._first
            while piece is not None:
                if isinstance(piece, CrayError):
                    piece = error_event(piece, scope, self._recorder.events)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await self._recorder.next()
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self._recorder.stop()

    async def _watch(self, receive: Receive) -> None:
        await until_left(receive)
        self._recorder.stop()


def begin_span(services: Services, request: Request, call: Call) -> None:
    """Give a call its place in a trace."""
    if services.traces is not None:
        traceparent = request.headers.get("traceparent")
        call.trace = services.traces.begin(traceparent, call.run_id, named=call.named)
        call.exchange.traceparent = call.trace.traceparent


def end_span(
    services: Services,
    call: Call,
    event: Event | None = None,
    *,
    first: float | None = None,
    failure: str | None = None,
) -> None:
    """Send a call's spans, once. `event`: its record, if any; `failure`: the error's type."""
    trace, call.trace = call.trace, None
    if services.traces is None or trace is None:
        return
    from cray_agents.runtime.telemetry.live_traces import CUT, CallEnd

    exchange, job = call.exchange, None
    body = {
        "id": call.id,
        "run_id": call.run_id,
        "api": call.api.path,
        "model": exchange.version or exchange.request["model"],
        "started": call.started,
        "seconds": time.perf_counter() - call.clock,
    }
    if event is not None:
        body = services.store.redacted(event).body if services.traces.content else event.body
        failure = body["finish_reason"] if body["finish_reason"] in CUT else failure
    with suppress(NotFound):
        job = services.registry.resolve(str(body["model"])).job
    end = CallEnd(
        body,
        str(exchange.request["model"]),
        job=job,
        waited=call.ticket.waited,
        began=exchange.began,
        first=first,
        failure=None if failure is None else (failure, ""),
    )
    services.traces.end_call(trace, end)


@contextmanager
def failed_span(services: Services, call: Call, event: Event | None = None) -> Iterator[None]:
    """Send a call's spans if the block raises. `event`: as of `end_span`."""
    try:
        yield
    except BaseException as error:  # also of a client that leaves
        code = error.code if isinstance(error, CrayError) else None
        end_span(services, call, event, failure=code or type(error).__name__)
        raise
