"""Uvicorn's HTTP, with an envelope also for what is no HTTP, and a time limit for a request's head.

Such bytes never reach the app. Whoever serves the gateway gives it to uvicorn:
`uvicorn.Config(app, http=protocol(head_timeout), ws="none")`. The limit for a body is edge.py's,
that for a connection between two requests uvicorn's own.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cray_agents.runtime.gateway.http.error_envelope import envelope

HEAD = (
    b"HTTP/1.1 %b\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


class Protocol(HttpToolsProtocol):
    """A connection."""

    head_timeout = 20.0  # seconds from its beginning, or that of a head, to the head's end

    _waiting: asyncio.TimerHandle | None = None
    _begun = False  # whether a byte of the head is there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Of a head, a body, or more than one request."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # uvicorn waits no more, either
            self._begun = True
            self._wait()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._wait_no_more()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, and end the connection."""
        message = f"{msg} The head or the framing of the body is wrong."
        self._refuse(b"400 Bad Request", envelope(400, message, "invalid_http"))

    def _wait(self) -> None:
        if self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self.head_timeout, self._too_late)

    def _wait_no_more(self) -> None:
        self._begun = False
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        if not self._begun:
            self.transport.close()
            return
        message = f"the head of the request was not whole after {self.head_timeout:g} s"
        self._refuse(b"408 Request Timeout", envelope(408, message, "request_timeout"))

    def _refuse(self, status: bytes, body: bytes) -> None:
        self.transport.write(HEAD % (status, len(body)) + body)
        self.transport.close()


def protocol(head_timeout: float) -> type[Protocol]:
    """The connections of a server that waits so many seconds for a head."""

    class Timed(Protocol):
        """A connection."""

    Timed.head_timeout = head_timeout
    return Timed
