"""Direct HTTP: POST JSON to a gateway at a fraction of the openai client's processor time.

A loop makes hundreds of calls a second, and the layers of a general client (transforms, models,
httpx, h11, anyio) take longer for each than the gateway. This one knows a single kind of answer:
200 with a length. Everything else (a refusal, an overload, a broken connection) is for the openai
client, which sends the request again. Called by openai_engine.py.
"""

import asyncio
import weakref
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT_SECONDS = 5.0
_END = b"\r\n\r\n"
_OK = b"http/1.1 200 "
_LENGTH = b"\r\ncontent-length:"


class Unusual(Exception):
    """An answer that is not 200 with a length, or none. `status`: its status, 0 without one."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def is_direct(base_url: str) -> bool:
    """Tell whether a server can be asked directly: without TLS, and without a proxy."""
    return base_url.startswith("http://") and not getproxies()


class DirectHttp:
    """Connections to the server at `base_url`, one for each request under way, used again."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._path = parts.path
        # connections belong to the event loop that opened them
        self._idle: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Connection]] = (
            weakref.WeakKeyDictionary()
        )

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], timeout: float
    ) -> bytes:
        """Return the body of the answer to JSON posted at a path below `base_url`.

        `timeout`: seconds for the answer. Raises Unusual. If cancelled, the server sees its client
        leave.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers):
            raise Unusual(0)
        try:
            head = (
                f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{lines}"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            ).encode("latin-1")
        except UnicodeEncodeError:
            raise Unusual(0) from None
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(loop, [])
        connection = None
        while idle and (connection is None or connection.closed):
            connection = idle.pop()
        try:
            if connection is None or connection.closed:
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, connection = await loop.create_connection(
                        _Connection, self._host, self._port
                    )
            async with asyncio.timeout(timeout):
                answer = await connection.ask(head + body)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):  # TimeoutError as well
                raise Unusual(0) from None
            raise
        idle.append(connection)
        return answer

    def close(self) -> None:
        """Close this event loop's idle connections."""
        for connection in self._idle.pop(asyncio.get_running_loop(), []):
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._came = bytearray()
        self._begins, self._ends = 0, 0  # where the answer's body is; 0: its head is not whole
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[bytes]":
        """Send a request; return its answer to come. Its errors: Unusual, ConnectionError."""
        self._came, self._begins, self._ends = bytearray(), 0, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        if self.closed:
            self._fail(ConnectionResetError())
        return self._answer

    def close(self) -> None:
        """End the connection, and what is under way on it."""
        self.closed = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._came += data
        if not self._ends and not self._read_head():
            return
        if len(self._came) >= self._ends and self._answer is not None:
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(bytes(self._came[self._begins : self._ends]))

    def _read_head(self) -> bool:
        """Look where the answer's body is; return False if its head is not whole or unusual."""
        end = self._came.find(_END)
        if end < 0:
            return False
        head = bytes(self._came[: end + 2]).lower()
        _, found, rest = head.partition(_LENGTH)
        length = rest[: rest.find(b"\r\n")].strip()
        if not head.startswith(_OK) or not found or not length.isdigit():
            status = head[9:12]
            self._fail(Unusual(int(status) if status.isdigit() else 0))
            return False
        self._begins = end + len(_END)
        self._ends = self._begins + int(length)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError())

    def _fail(self, error: Exception) -> None:
        self.closed = True
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
