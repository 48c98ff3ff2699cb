"""A connection to an MCP server that is made anew when it broke, on an event loop of its own.

Its own, because tools are called from whatever loop an agent runs on, and a connection belongs to
one. Called by mcp_client.py.
"""

import asyncio
import importlib.util
import logging
import os
import shlex
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cray_agents.errors import SetupError, ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams

T = TypeVar("T")

LAST_WORDS = 2000  # bytes of a server's stderr that are kept
HTTP_READ = 300.0  # seconds without a byte on a stream

log = logging.getLogger(__name__)


class McpConnection:
    """One MCP server: a command that speaks on its stdin and stdout, or a URL.

    Everything but `blocking`, `waited` and `close` happens on the connection's own loop.
    `start_timeout`: seconds until the server has introduced itself.
    """

    def __init__(
        self,
        command: Sequence[str] | None,
        url: str | None,
        *,
        environment: Mapping[str, str] | None,
        folder: Path | None,
        headers: Mapping[str, str] | None,
        start_timeout: float,
    ) -> None:
        self.name = shlex.join(command) if command else str(url)
        self._command, self._url = command, url
        self._environment, self._folder, self._headers = environment, folder, headers
        self._start_timeout = start_timeout
        self._last_words = b""
        self._link: asyncio.Task[_Link] | None = None
        _check_installed()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="cray-agents-mcp", daemon=True
        )
        self._thread.start()

    def blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the connection's loop and block for the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def waited(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the connection's loop, and await it on the caller's; cancelling is passed on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Disconnect, end a server that was started, and the loop. Closing twice is once."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self.blocking(self._disconnect())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def client(self) -> "Client":
        """The connected client; connects if need be. Raises SetupError when it cannot.

        Who is cancelled while he waits leaves the start to the next one.
        """
        if self._link is None:
            self._link = self._loop.create_task(self._connected())
        link = self._link
        try:
            return (await asyncio.shield(link)).client
        except SetupError:
            if self._link is link:
                self._link = None
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """A tool's CallToolResult. Raises ToolError, in words for a model."""
        import httpx2
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED
        from pydantic import ValidationError

        try:
            client = await self.client()
        except SetupError as error:
            raise ToolError(str(error)) from error
        try:
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self._forget(client)
                raise ToolError(
                    f"the MCP server of {tool} ended during the call{self._said()}; "
                    "the next call starts it again"
                ) from error
            raise ToolError(f"the MCP server refused {tool}: {error.message}") from error
        except httpx2.HTTPError as error:
            await self._forget(client)
            raise ToolError(f"the MCP server of {tool} cannot be reached: {error}") from error
        except (ValidationError, RuntimeError) as error:  # its answer is not what its schema says
            raise ToolError(f"the MCP server gave {tool} a wrong answer: {error}") from error

    async def _connected(self) -> "_Link":
        ready: asyncio.Future[Client] = self._loop.create_future()
        end = asyncio.Event()
        life = self._loop.create_task(self._live(ready, end))
        either: set[asyncio.Future[Any]] = {ready, life}
        try:
            await asyncio.wait(
                either, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done():
                return _Link(ready.result(), life, end)
            problem = f"no answer within {self._start_timeout:g} s"
            if life.done() and (error := life.exception()) is not None:
                problem = _why(error)
        finally:
            if not ready.done():
                life.cancel()
                await asyncio.wait({life})
        raise SetupError(f"the MCP server {self.name} did not start: {problem}{self._said()}")

    async def _live(self, ready: "asyncio.Future[Client]", end: asyncio.Event) -> None:
        """A connection from beginning to end, in one task: that is where its scopes belong."""
        from mcp import Client

        transport = self._started() if self._command else self._reached()
        async with Client(transport) as client:
            # its own check would hold all of Python for as long as a server's schema likes
            client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]
            ready.set_result(client)
            await end.wait()

    async def _forget(self, client: "Client") -> None:
        """Let go of a connection that broke, unless a newer one has its place."""
        link = self._link
        if link is not None and link.done() and link.result().client is client:
            await self._disconnect()

    async def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if not link.done():
            link.cancel()
            await asyncio.wait({link})
        elif link.exception() is None:
            link.result().end.set()
            await asyncio.wait({link.result().life})
            if (error := link.result().life.exception()) is not None:
                log.debug("%s: disconnecting: %s", self.name, _why(error))

    @asynccontextmanager
    async def _started(self) -> "AsyncIterator[TransportStreams]":
        """The command's pipes. Of its stderr the end is kept, for when it fails."""
        from mcp import StdioServerParameters, stdio_client

        assert self._command is not None
        parameters = StdioServerParameters(
            command=self._command[0],
            args=list(self._command[1:]),
            env=dict(self._environment or {}),
            cwd=self._folder,
        )
        self._last_words = b""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._loop.add_reader(reading, self._listen, reading)
        try:
            with os.fdopen(writing, "w") as stderr:
                async with stdio_client(parameters, errlog=stderr) as streams:
                    stderr.close()  # the server has its own: when it ends, so does the pipe
                    yield streams
        finally:
            self._listen(reading)
            self._loop.remove_reader(reading)
            os.close(reading)

    def _listen(self, pipe: int) -> None:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(pipe)
        self._last_words = (self._last_words + data)[-LAST_WORDS:]

    @asynccontextmanager
    async def _reached(self) -> "AsyncIterator[TransportStreams]":
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(self._start_timeout, read=HTTP_READ)
        async with (
            httpx2.AsyncClient(headers=dict(self._headers or {}), timeout=timeout) as http,
            streamable_http_client(str(self._url), http_client=http) as streams,
        ):
            yield streams

    def _said(self) -> str:
        words = self._last_words.decode("utf-8", "replace").strip()
        return f" (its last words: {words})" if words else ""


@dataclass(frozen=True)
class _Link:
    """A connection: `life` is the task that holds it until `end` is set."""

    client: "Client"
    life: "asyncio.Task[None]"
    end: asyncio.Event


async def _unchecked(name: str, result: Any) -> None:
    """A result is held against its schema by mcp_client.py."""


def _why(error: BaseException) -> str:
    """The first real error within a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _check_installed() -> None:
    if importlib.util.find_spec("mcp") is None:
        raise SetupError("MCP needs the mcp package: pip install 'cray-agents[tools]'")
