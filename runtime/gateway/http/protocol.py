"""HTTP protocol: uvicorn's, with an error envelope for malformed HTTP and limits for heads.

Malformed bytes never reach the app. The server is made with
`uvicorn.Config(app, http=protocol(head_timeout), ws="none")`. middleware.py limits the wait for a
body; uvicorn limits the wait between two requests.
"""

import asyncio

from httptools import HttpParserError

from cray_agents.runtime.gateway.http.error_envelope import envelope
from cray_agents.runtime.vllm_plugins.heads import BoundedHeads

HEAD = (
    b"HTTP/1.1 %d %b\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
REFUSALS = {
    400: (b"Bad Request", "invalid_http"),
    408: (b"Request Timeout", "request_timeout"),
    431: (b"Request Header Fields Too Large", "headers_too_large"),
}


class Protocol(BoundedHeads):
    """A connection to a client."""

    head_timeout = 20.0  # seconds from the start of the connection or a head to the head's end

    _waiting: asyncio.TimerHandle | None = None
    _head_started = False  # a byte of the head has arrived
    _problem = ""  # what is wrong with the head, beyond its form
    _refusal = b""  # the last answer, which waits for those to earlier requests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: the client has gone."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a head, a body, or several requests."""
        if self._refusal:
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # uvicorn waits no more, either
            self._head_started = True
            self._wait()

    def on_headers_complete(self) -> None:
        """Stop waiting: the head is whole. Refuse one that others on the way may read otherwise."""
        self._wait_no_more()
        if not self.url.startswith(b"/") or self.url.startswith(b"//"):
            self._problem = "The target of a request must be a path that begins with one '/'."
        elif sum(name == b"host" for name, _ in self.headers) > 1:
            self._problem = "A request must have one Host header."
        if self._problem:
            raise HttpParserError(self._problem)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin the next request that is here; after the last one refuse what follows it."""
        super().on_response_complete()
        if self._refusal and self.cycle.response_complete and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()

    def _wait(self) -> None:
        if self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self.head_timeout, self._too_late)

    def _wait_no_more(self) -> None:
        self._head_started = False
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        if not self._head_started:
            self.transport.close()
            return
        message = f"the head of the request was not whole after {self.head_timeout:g} s"
        self.refuse(408, message)

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error after the answers to earlier requests, and end the connection."""
        self._wait_no_more()
        phrase, code = REFUSALS[status]
        body = envelope(status, self._problem or message, code)
        refusal = HEAD % (status, phrase, len(body)) + body
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        if self.in_head and not answered:
            self._refusal = refusal
            return
        if answered or not (self.pipeline or cycle.response_started):
            self.transport.write(refusal)
        self.transport.close()


def protocol(head_timeout: float) -> type[Protocol]:
    """Return the protocol of a server that waits so many seconds for a head."""

    class Timed(Protocol):
        """A connection with this time limit."""

    Timed.head_timeout = head_timeout
    return Timed
