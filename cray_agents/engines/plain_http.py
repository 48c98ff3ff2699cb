"""Plain HTTP: POST to our own servers, at a fraction of a general client's processor time.

A loop makes hundreds of calls a second, and a gateway passes on those of many loops. The layers of
the openai client or of aiohttp take longer for each than the server's own work. This client knows
answers with a length, and nothing else: no TLS, proxy, redirect, compression or stream. Imports
nothing of the package. Called by engines/openai_engine.py and runtime/pool/vllm_http.py, which have
the general clients for the rest.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

CONNECT = 2.0  # seconds until a connection must stand
KEPT = 2.0  # seconds without a request until a connection is dropped; the servers keep one longer
_END = b"\r\n\r\n"


class Answer(NamedTuple):
    """A server's answer; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.closed = False
        self.idle_since = 0.0  # by the event loop's clock
        self._came = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._begins, self._ends = 0, 0  # where the body is
        self._answer: asyncio.Future[Answer] | None = None

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request; return its answer to come, which raises OSError or ValueError."""
        self._came, self._head = bytearray(), None
        self._answer = answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        if self.closed:
            self._fail(ConnectionResetError("the connection was closed"))
        return answer

    def close(self) -> None:
        """End the connection, and what is under way on it."""
        self.closed = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer; the event loop calls it."""
        self._came += data
        try:
            if self._head is None and not self._read_head():
                return
        except ValueError as error:
            self._fail(error)
            return
        if len(self._came) >= self._ends and self._head is not None and self._answer is not None:
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(Answer(*self._head, bytes(self._came[self._begins : self._ends])))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way; the event loop calls it."""
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("it broke off"))

    def _read_head(self) -> bool:
        """Read the answer's head if it has come. Raises ValueError where no length is told."""
        if (end := self._came.find(_END)) < 0:
            return False
        first, *lines = self._came[:end].decode("latin-1").split("\r\n")
        named = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in named}
        self._head = int(first.split(" ", 2)[1]), headers
        self._begins = end + len(_END)
        if "content-length" not in headers:
            raise ValueError("the answer has no length")
        self._ends = self._begins + int(headers["content-length"])
        if headers.get("connection", "").lower() == "close":
            self.closed = True
        return True

    def _fail(self, error: Exception) -> None:
        self.closed = True
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


Connect = Callable[[], Awaitable[tuple[asyncio.Transport, Connection]]]


class PlainHttp:
    """Connections to one server, one for each request under way, used again while they are young.

    `host`: for the header of this name. `connect` opens a connection on the running event loop, as
    `create_connection` does for a `Connection`.
    """

    def __init__(self, host: str, connect: Connect) -> None:
        self._host, self._connect = host, connect
        # connections belong to the event loop that opened them
        self._idle: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Connection]] = (
            weakref.WeakKeyDictionary()
        )

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], timeout: float
    ) -> Answer:
        """Return the answer to JSON posted at a path.

        `timeout`: seconds for the answer. If this is cancelled, the server sees its client leave.
        Raises TimeoutError, another OSError, and ValueError for headers that HTTP cannot carry and
        for an answer without a length.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header has a line break")
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\n{lines}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(loop, [])
        connection = self._take(idle, loop.time())
        try:
            if connection is None:
                connection = await self._open()
            async with asyncio.timeout(timeout):
                answer = await connection.ask(head + body)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if connection.closed:
            connection.close()
        else:
            connection.idle_since = loop.time()
            idle.append(connection)
        return answer

    async def _open(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT):
                transport, connection = await self._connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT:g} s") from error
        connection.transport = transport
        return connection

    @staticmethod
    def _take(idle: list[Connection], now: float) -> Connection | None:
        """Take the youngest idle connection; drop the others where that is too old."""
        if idle and now - idle[-1].idle_since > KEPT:
            for old in idle:
                old.close()
            idle.clear()
        while idle:
            if not (connection := idle.pop()).closed:
                return connection
        return None

    def close(self) -> None:
        """Close this event loop's idle connections."""
        for connection in self._idle.pop(asyncio.get_running_loop(), []):
            connection.close()
