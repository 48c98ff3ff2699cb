"""MCP connection: a link to an MCP server on its own event loop, renewed when it breaks.

A connection belongs to one loop, but tools are called from the loops of many agents. It therefore
has its own. Called by mcp_client.py.
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

LAST_WORDS = 2000  # bytes kept of the end of a server's stderr
HTTP_READ = 300.0  # seconds without a byte on a stream

log = logging.getLogger(__name__)


class McpConnection:
    """A connection to one MCP server: a command that serves on stdin and stdout, or a URL.

    All methods but `run_blocking`, `await_on_loop` and `close` run on the connection's own loop.
    `start_timeout` is the seconds until the server has introduced itself.
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

    def run_blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop, and block for the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def await_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on the connection's loop; pass cancelling on to it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Disconnect, and end the loop and a server started here. Closing twice is once."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self.run_blocking(self._disconnect())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def client(self) -> "Client":
        """Return the connected client, connecting if necessary. Raises SetupError.

        If the caller is cancelled, the start goes on for the next one.
        """
        if self._link is None:
            self._link = self._loop.create_task(self._connect_once())
        link = self._link
        try:
            return (await asyncio.shield(link)).client
        except SetupError:
            if self._link is link:
                self._link = None
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, and return its CallToolResult. Raises ToolError, in words for a model."""
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
                    f"the MCP server of {tool} ended during the call{self._stderr_note()}; "
                    "the next call starts it again"
                ) from error
            raise ToolError(f"the MCP server refused {tool}: {error.message}") from error
        except httpx2.HTTPError as error:
            await self._forget(client)
            raise ToolError(f"the MCP server of {tool} cannot be reached: {error}") from error
        except (
            ValidationError,
            RuntimeError,
        ) as error:  # it violates the protocol's schema
            raise ToolError(f"the MCP server gave {tool} a wrong answer: {error}") from error

    async def _connect_once(self) -> "_Link":
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
                problem = _describe_error(error)
        finally:
            if not ready.done():
                life.cancel()
                await asyncio.wait({life})
        raise SetupError(
            f"the MCP server {self.name} did not start: {problem}{self._stderr_note()}"
        )

    async def _live(self, ready: "asyncio.Future[Client]", end: asyncio.Event) -> None:
        """Hold a connection from its start to its end in one task, as its scopes require."""
        from mcp import Client

        transport = self._command_streams() if self._command else self._url_streams()
        async with Client(transport) as client:
            # its own check could block all of Python, by a server's malicious schema
            client.session.validate_tool_result = _skip_check  # type: ignore[method-assign]
            ready.set_result(client)
            await end.wait()

    async def _forget(self, client: "Client") -> None:
        """Drop a broken connection, unless a newer one has replaced it."""
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
                log.debug("%s: disconnecting: %s", self.name, _describe_error(error))

    @asynccontextmanager
    async def _command_streams(self) -> "AsyncIterator[TransportStreams]":
        """Start the command, and yield its pipes. Keep the end of its stderr for error messages."""
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
        self._loop.add_reader(reading, self._read_stderr, reading)
        try:
            with os.fdopen(writing, "w") as stderr:
                async with stdio_client(parameters, errlog=stderr) as streams:
                    stderr.close()  # the server has its own copy, so the pipe ends with the server
                    yield streams
        finally:
            self._read_stderr(reading)
            self._loop.remove_reader(reading)
            os.close(reading)

    def _read_stderr(self, pipe: int) -> None:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(pipe)
        self._last_words = (self._last_words + data)[-LAST_WORDS:]

    @asynccontextmanager
    async def _url_streams(self) -> "AsyncIterator[TransportStreams]":
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(self._start_timeout, read=HTTP_READ)
        async with (
            httpx2.AsyncClient(headers=dict(self._headers or {}), timeout=timeout) as http,
            streamable_http_client(str(self._url), http_client=http) as streams,
        ):
            yield streams

    def _stderr_note(self) -> str:
        words = self._last_words.decode("utf-8", "replace").strip()
        return f" (its last words: {words})" if words else ""


@dataclass(frozen=True)
class _Link:
    """An open connection: `life` is the task that holds it until `end` is set."""

    client: "Client"
    life: "asyncio.Task[None]"
    end: asyncio.Event


async def _skip_check(name: str, result: Any) -> None:
    """Skip the check of a result, as mcp_client.py checks it against its schema."""


def _describe_error(error: BaseException) -> str:
    """Describe the first real error within a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _check_installed() -> None:
    if importlib.util.find_spec("mcp") is None:
        raise SetupError("MCP needs the mcp package: pip install 'cray-agents[tools]'")
