"""Heads: an HTTP protocol of uvicorn's kind that bounds the head of a request, and its trailers.

httptools has no bound of its own: whoever reaches the port, with a key or without, could fill the
memory of the process and hold up its loop. Used by the replicas' servers (server.py), whose own
bounds hold for uvicorn's slower parser alone, and by runtime/gateway/http/protocol.py.
"""

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 2**10  # of a request's line, its headers and its trailers, together
HEAD_FIELDS = 256  # headers and trailers
TOO_LARGE = (
    f"The head of a request has at most {HEAD_BYTES} bytes and {HEAD_FIELDS} headers: send fewer "
    "or shorter ones."
)


class BoundedHeads(HttpToolsProtocol):
    """A connection to a client."""

    in_head = True  # between the end of a request and that of the next one's head
    _bytes = _fields = 0  # of the names and values so far
    _unparsed = 0  # bytes since a head began or a piece of a body came: part of a head or a trailer

    def data_received(self, data: bytes) -> None:
        """Take bytes of a head, a body, or several requests."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES and not self.transport.is_closing():
            self.refuse(431, TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begin to count."""
        self.in_head = True
        self._bytes = self._fields = self._unparsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: the application has read the headers by then."""
        self._fields += 1
        self._count(name, value)
        if self.in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take a whole head."""
        super().on_headers_complete()
        self.in_head = False
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        self.in_head = True
        self._unparsed = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that cannot be taken, and end the connection."""
        if self._is_too_large():
            self.refuse(431, TOO_LARGE)
        else:
            self.refuse(400, f"{msg} The head or the framing of the body is wrong.")

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, and end the connection."""
        head = b"HTTP/1.1 %d Refused\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(message)) + message.encode())
        self.transport.close()

    def _count(self, *texts: bytes) -> None:
        self._bytes += sum(map(len, texts))
        if self._is_too_large():
            raise HttpParserError(TOO_LARGE)

    def _is_too_large(self) -> bool:
        return self._bytes > HEAD_BYTES or self._fields > HEAD_FIELDS
