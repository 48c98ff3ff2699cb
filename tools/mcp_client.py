"""The tools of an MCP server, as tools for agents. https://modelcontextprotocol.io

    with McpTools(command=["python", "server.py"]) as server:
        agent = Agent(name="clerk", tools=server.tools)

or, for as long as the process lives, `tools=McpTools(url="http://127.0.0.1:9000/mcp").open().tools`.
Read next: mcp_connection.py; the other way round: mcp_server.py.
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
from cray_agents.tools.from_schema import tool_from_schema
from cray_agents.tools.mcp_connection import McpConnection
from cray_agents.tools.schema_checks import MAX_CHARS, SchemaChecks

MAX_PAGES = 100  # of a server's list of tools
MAX_TOOLS = 1000  # of a server; a model chooses well among a few dozen


class McpTools:
    """An MCP server's tools; `with`, `async with` or `open()` connects and fills `tools`.

    A server that dies is told to the model, and started or reached again by the next call. What
    the tools are is asked once. They may be called from any thread and event loop.

    Args:
        command: starts a server that speaks on stdin and stdout; it inherits no environment
            variables but PATH, HOME and a few like them.
        url: or where one runs, over streamable HTTP.
        prefix: put before each tool's name.
        allow: patterns of the names, without prefix, that are taken; each must fit a tool.
        timeout: seconds a call may take; None: no limit.
        start_timeout: seconds until the server has introduced itself, and until it has listed
            its tools.
        environment, folder: more variables for the command, and where it runs.
        headers: for the URL, such as Authorization.
        options: of each Tool, such as `approve` or `max_chars`.

    A server is not trusted with this process: what it lists is limited (MAX_TOOLS, and the size of
    a schema), and its schemas are applied elsewhere (schema_checks.py).

    Opening raises SetupError when the server does not start, or lists too much; BadInput for tools
    that cannot be.
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
        self._checks: SchemaChecks | None = None

    def open(self) -> "McpTools":
        """Connect, until `close` or the end of the process."""
        if self._connection is None:
            connection = self._connection = self._connect()
            atexit.register(connection.close)
            try:
                listed = connection.blocking(_listed(connection, self._start_timeout))
                self._checks = SchemaChecks()
                self.tools = self._taken(listed)
            except (SetupError, BadInput):
                self.close()
                raise
        return self

    def close(self) -> None:
        """Disconnect; a server that was started here is ended. The tools do not work any more."""
        if (connection := self._connection) is not None:
            self._connection = None
            atexit.unregister(connection.close)
            connection.close()
        if (checks := self._checks) is not None:
            self._checks = None
            checks.close()

    def __enter__(self) -> "McpTools":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "McpTools":
        return await asyncio.to_thread(self.open)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _taken(self, found: Sequence[Any]) -> tuple[Tool, ...]:
        """The server's tools that are allowed, as Tools."""
        names = [tool.name for tool in found]
        for pattern in self._allow:
            if not fnmatch.filter(names, pattern):
                raise BadInput(
                    f"allow={pattern!r} fits no tool of the MCP server; it has {', '.join(names)}",
                    param="allow",
                )
        taken = [
            tool
            for tool in found
            if any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self._allow)
        ]
        tools = tuple(self._tool(tool) for tool in taken)
        if len({tool.name for tool in tools}) < len(tools):
            raise BadInput("two tools of the MCP server get one name: choose some with allow=")
        return tools

    def _tool(self, found: Any) -> Tool:
        checks = self._checks
        assert checks is not None
        output = found.output_schema and checks.text_of(found.name, found.output_schema)

        async def call(arguments: dict[str, Any]) -> Any:
            if self._connection is None:
                raise ToolError(f"the connection to the MCP server of {found.name} was closed")
            work = self._connection.call(found.name, arguments)
            result = await self._connection.waited(work)
            if output and not result.is_error:
                problem = await checks.problem(output, result.structured_content)
                if problem is not None:
                    raise ToolError(f"the MCP server gave {found.name} a wrong answer: {problem}")
            return read_result(result)

        name = re.sub(r"[^a-zA-Z0-9_-]", "_", self._prefix + found.name)[:64]
        description = found.description or found.title or ""
        if len(description) > MAX_CHARS:
            raise BadInput(
                f"tool {name!r} has a description of {len(description):,} characters: "
                f"at most {MAX_CHARS:,} are taken"
            )
        return tool_from_schema(
            name, description, found.input_schema, call, checks=checks, **self._options
        )


async def _listed(connection: McpConnection, seconds: float) -> list[Any]:
    """All tools of a server, page by page. Raises SetupError: too many, or too slowly."""
    from mcp import MCPError

    client = await connection.client()
    found: list[Any] = []
    cursor: str | None = None
    lists = f"the MCP server {connection.name} lists"
    try:
        async with asyncio.timeout(seconds):
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if len(found) > MAX_TOOLS:
                    raise SetupError(f"{lists} more than {MAX_TOOLS} tools: so many are not taken")
                if (cursor := page.next_cursor) is None:
                    return found
    except TimeoutError:
        raise SetupError(f"{lists} no tools, or not all of them, within {seconds:g} s") from None
    except (MCPError, ValidationError) as error:
        raise SetupError(f"{lists} its tools wrongly: {error}") from error
    raise SetupError(f"{lists} more than {MAX_PAGES} pages of tools")


def read_result(result: Any) -> Any:
    """What a CallToolResult says, as JSON data: its structured content if it has any, else text.

    Content that is no text (images, sound, files) is named, not shown. Raises ToolError when the
    tool says that it failed.
    """
    shown = [_shown(block) for block in result.content]
    text = "\n".join(said for said, _ in shown)
    if result.is_error:
        raise ToolError(text or "it failed, and did not say why")
    structured = result.structured_content
    if structured is None:
        return text
    if isinstance(structured, dict) and set(structured) == {"result"}:
        structured = structured["result"]  # how servers wrap what is no object
    notes = [said for said, is_text in shown if not is_text]
    return {"result": structured, "also": notes} if notes else structured


def _shown(block: Any) -> tuple[str, bool]:
    """A content block in words, and whether these are its own."""
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
