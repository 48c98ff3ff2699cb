"""Uvicorn's HTTP, with an envelope also for what is no HTTP: such bytes never reach the app.

Whoever serves the gateway gives it to uvicorn: `uvicorn.Config(app, http=Protocol, ws="none")`.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cray_agents.runtime.gateway.errors import envelope

HEAD = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


class Protocol(HttpToolsProtocol):
    """A connection."""

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, and end the connection."""
        body = envelope(400, f"{msg} The head or the framing of the body is wrong.", "invalid_http")
        self.transport.write(HEAD % len(body) + body)
        self.transport.close()
