"""MCP client: use the tools of an MCP server in agents. https://modelcontextprotocol.io

    with McpTools(command=["python", "server.py"]) as server:
        agent = Agent(name="clerk", tools=server.tools)

or, for as long as the process lives, `tools=McpTools(url="http://127.0.0.1:9000/mcp").open().tools`.
A connection belongs to one event loop, but tools are called from the loops of many agents. It
therefore has its own. For the other direction, see mcp_server.py.
"""

import asyncio
import atexit
import fnmatch
import importlib.util
import logging
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from cray_agents.agent.tool import TIMEOUT, Tool
from cray_agents.errors import BadInput, SetupError, ToolError
from cray_agents.tools.from_schema import MAX_CHARS, SchemaCheck, tool_from_schema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams

MAX_PAGES = 100  # pages of a server's list of tools
MAX_TOOLS = 1000  # tools of a server; a model chooses well among a few dozen
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
        if importlib.util.find_spec("mcp") is None:
            raise SetupError("MCP needs the mcp package: pip install 'cray-agents[tools]'")
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
        except (ValidationError, RuntimeError) as error:  # it violates the protocol's schema
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
    """Skip the check of a result, as McpTools checks it against its schema."""


def _describe_error(error: BaseException) -> str:
    """Describe the first real error within a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


class McpTools:
    """The tools of an MCP server; `with`, `async with` or `open()` connects and fills `tools`.

    If a server dies, the model gets an error, and the next call starts or reaches the server again.
    The tools are listed once. They may be called from any thread and event loop.

    Args:
        command: command of a server on stdin and stdout; it inherits no environment variables but
            PATH, HOME and a few like them.
        url: URL of a running server, over streamable HTTP.
        prefix: text before each tool's name.
        allow: patterns of the names, without prefix, of the tools to use; each must match a tool.
        timeout: seconds that a call may take; None: no limit.
        start_timeout: seconds until the server has introduced itself, and until it has listed
            its tools.
        environment, folder: more variables for the command, and its working folder.
        headers: headers for the URL, such as Authorization.
        options: options of each Tool, such as `approve` or `max_chars`.

    A server is not trusted: its list is limited (MAX_TOOLS, and the size of a schema), and so is
    the time of a check by its schemas (from_schema.py).

    Opening raises SetupError when the server does not start, or lists too much; BadInput for
    invalid tools.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        prefix: str = "",
        allow: Sequence[str] = ("*",),
        timeout: float | None = TIMEOUT,
        start_timeout: float = 30.0,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if bool(command) == bool(url) or isinstance(command, str):
            raise BadInput("give an MCP server's command, as a list, or its url", param="command")
        self.tools: tuple[Tool, ...] = ()
        self._prefix, self._allow = prefix, allow
        self._options = {"timeout": timeout, **options}
        self._connect: Callable[[], McpConnection] = lambda: McpConnection(
            command,
            url,
            environment=environment,
            folder=folder,
            headers=headers,
            start_timeout=start_timeout,
        )
        self._start_timeout = start_timeout
        self._connection: McpConnection | None = None

    def open(self) -> "McpTools":
        """Connect, until `close` or the end of the process."""
        if self._connection is None:
            connection = self._connection = self._connect()
            atexit.register(connection.close)
            try:
                listed = connection.run_blocking(_list_tools(connection, self._start_timeout))
                self.tools = self._choose_tools(listed)
            except (SetupError, BadInput):
                self.close()
                raise
        return self

    def close(self) -> None:
        """Disconnect, and end a server started by `open`. The tools do not work any more."""
        if (connection := self._connection) is not None:
            self._connection = None
            atexit.unregister(connection.close)
            connection.close()

    def __enter__(self) -> "McpTools":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "McpTools":
        return await asyncio.to_thread(self.open)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _choose_tools(self, listed: Sequence[Any]) -> tuple[Tool, ...]:
        """Return the server's allowed tools as Tools. Raises BadInput."""
        names, allowed = [tool.name for tool in listed], set[str]()
        for pattern in self._allow:
            if not (fitting := [name for name in names if fnmatch.fnmatchcase(name, pattern)]):
                raise BadInput(
                    f"allow={pattern!r} fits no tool of the MCP server; it has {', '.join(names)}",
                    param="allow",
                )
            allowed.update(fitting)
        tools = tuple(self._tool(tool) for tool in listed if tool.name in allowed)
        if len({tool.name for tool in tools}) < len(tools):
            raise BadInput("two tools of the MCP server get one name: choose some with allow=")
        return tools

    def _tool(self, entry: Any) -> Tool:
        output = SchemaCheck(entry.name, entry.output_schema) if entry.output_schema else None

        async def call(arguments: dict[str, Any]) -> Any:
            if self._connection is None:
                raise ToolError(f"the connection to the MCP server of {entry.name} was closed")
            work = self._connection.call(entry.name, arguments)
            result = await self._connection.await_on_loop(work)
            if output is not None and not result.is_error:
                problem = await output.problem(result.structured_content)
                if problem is not None:
                    raise ToolError(f"the MCP server gave {entry.name} a wrong answer: {problem}")
            return read_result(result)

        name = re.sub(r"[^a-zA-Z0-9_-]", "_", self._prefix + entry.name)[:64]
        description = entry.description or entry.title or ""
        if len(description) > MAX_CHARS:
            raise BadInput(
                f"tool {name!r} has a description of {len(description):,} characters: "
                f"at most {MAX_CHARS:,} are taken"
            )
        return tool_from_schema(name, description, entry.input_schema, call, **self._options)


async def _list_tools(connection: McpConnection, seconds: float) -> list[Any]:
    """Return all tools of a server. Raises SetupError if they are too many, or come too slowly."""
    from mcp import MCPError

    client = await connection.client()
    listed: list[Any] = []
    cursor: str | None = None
    lists = f"the MCP server {connection.name} lists"
    try:
        async with asyncio.timeout(seconds):
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                if len(listed) > MAX_TOOLS:
                    raise SetupError(f"{lists} more than {MAX_TOOLS} tools: so many are not taken")
                if (cursor := page.next_cursor) is None:
                    return listed
    except TimeoutError:
        raise SetupError(f"{lists} no tools, or not all of them, within {seconds:g} s") from None
    except (MCPError, ValidationError) as error:
        raise SetupError(f"{lists} its tools wrongly: {error}") from error
    raise SetupError(f"{lists} more than {MAX_PAGES} pages of tools")


def read_result(result: Any) -> Any:
    """Return a CallToolResult as JSON data: its structured content if it has any, else its text.

    Other content (images, sound, files) is only named. Raises ToolError when the tool reports a
    failure.
    """
    blocks = [_render_block(block) for block in result.content]
    text = "\n".join(words for words, _ in blocks)
    if result.is_error:
        raise ToolError(text or "it failed, and did not say why")
    structured = result.structured_content
    if structured is None:
        return text
    if isinstance(structured, dict) and set(structured) == {"result"}:
        structured = structured["result"]  # servers wrap values so that are no objects
    notes = [words for words, is_text in blocks if not is_text]
    return {"result": structured, "also": notes} if notes else structured


def _render_block(block: Any) -> tuple[str, bool]:
    """Return a content block in words, and True if these are its own text."""
    match block.type:
        case "text":
            return block.text, True
        case "image" | "audio":
            size = len(block.data) * 3 // 4
            return f"[{block.type}, {block.mime_type}, about {size} bytes: not shown]", False
        case "resource_link":
            return f"[link to {block.uri} ({block.name}): not shown]", False
        case "resource" if text := getattr(block.resource, "text", None):
            return text, True
        case "resource":
            return f"[file {block.resource.uri}, not text: not shown]", False
    return f"[{block.type}: not shown]", False
