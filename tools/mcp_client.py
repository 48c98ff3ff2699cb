"""MCP client: use the tools of an MCP server in agents. https://modelcontextprotocol.io

    with McpTools(command=["python", "server.py"]) as server:
        agent = Agent(name="clerk", tools=server.tools)

or, for as long as the process lives, `tools=McpTools(url="http://127.0.0.1:9000/mcp").open().tools`.
Read next: mcp_connection.py; for the other direction, mcp_server.py.
"""

import asyncio
import atexit
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cray_agents.agent.tool import TIMEOUT, Tool
from cray_agents.errors import BadInput, SetupError, ToolError
from cray_agents.tools.from_schema import MAX_CHARS, SchemaCheck, tool_from_schema
from cray_agents.tools.mcp_connection import McpConnection

MAX_PAGES = 100  # pages of a server's list of tools
MAX_TOOLS = 1000  # tools of a server; a model chooses well among a few dozen


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
        names = [tool.name for tool in listed]
        for pattern in self._allow:
            if not fnmatch.filter(names, pattern):
                raise BadInput(
                    f"allow={pattern!r} fits no tool of the MCP server; it has {', '.join(names)}",
                    param="allow",
                )
        taken = [
            tool
            for tool in listed
            if any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self._allow)
        ]
        tools = tuple(self._tool(tool) for tool in taken)
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
