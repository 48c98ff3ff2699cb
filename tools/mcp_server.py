"""MCP server: serve an agent as one tool, `ask_<agent>`, to editors and other agents.

Each call is a run, recorded as any other, with the tag `mcp`. The agent's events are reported as
progress. Called by cli/agents.py (`cray-agents mcp agent.py`). See mcp_client.py for the other
direction.
"""

import asyncio
import io
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field
from pydantic_core import to_json

from cray_agents.agent.agent import Agent
from cray_agents.agent.description import purpose, tool_name
from cray_agents.agent.stream_events import (
    AgentEvent,
    ModelStarted,
    RunEnded,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from cray_agents.agent.tool import model_text
from cray_agents.errors import SetupError
from cray_agents.records import Run

if TYPE_CHECKING:
    from mcp.server import MCPServer

PIECE = 80  # characters of the agent's text in a progress message
MAX_DETAIL = 200  # characters of a tool's arguments or result in a progress message
PATH = "/mcp"


class AgentAnswer(BaseModel):
    """The structured result of a call, beside the answer's text."""

    output: Any
    run_id: str
    stop_reason: str


def agent_server(agent: Agent) -> "MCPServer[Any]":
    """Make the server. Run it with `serve_stdio` or `serve_http`, or mount it in your own app.

    Raises SetupError without the mcp package.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver import Context
        from mcp.types import CallToolResult, TextContent
    except ModuleNotFoundError as error:
        raise SetupError("MCP needs the mcp package: pip install 'cray-agents[tools]'") from error

    async def ask(
        question: Annotated[str, Field(description="All that the agent needs to know.")],
        context: Context[Any, Any],
    ) -> Annotated[CallToolResult, AgentAnswer]:
        steps = 0.0
        run: Run | None = None
        async with aclosing(agent.stream(question, tags=["mcp"])) as events:
            async for event in _gather_text(events):
                if isinstance(event, RunEnded):
                    run = event.run
                elif message := _describe(event):
                    steps += 1
                    await context.report_progress(steps, message=message)
        if run is None:
            raise RuntimeError("the agent's stream ended without RunEnded")
        answer = AgentAnswer(output=run.output, run_id=run.id, stop_reason=run.stop_reason)
        failed = run.output is None and (run.error is not None or run.stop_reason != "completed")
        text = run.output if isinstance(run.output, str) else to_json(run.output).decode()
        if failed:
            why = run.error.message if run.error is not None else run.stop_reason
            text = f"{run.agent} came to no answer: {why} (run {run.id})"
        return CallToolResult(
            content=[TextContent(type="text", text=text)],
            structured_content=answer.model_dump(mode="json"),
            is_error=failed,
        )

    server: MCPServer[Any] = MCPServer(agent.name, log_level="WARNING")
    server.add_tool(
        ask,
        name=f"ask_{tool_name(agent.name)}"[:64],
        description=purpose(agent.name, agent.description),
    )
    return server


def serve_stdio(server: "MCPServer[Any]") -> None:
    """Serve on stdin and stdout until this process ends. Other prints go to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # otherwise a tool's print stays in the buffer, and is finally flushed to the client
        sys.stdout.reconfigure(line_buffering=True)
    asyncio.run(server.run_stdio_async())


def serve_http(
    server: "MCPServer[Any]", port: int = 0, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve streamable HTTP on loopback until Ctrl-C; call `ready` with the URL.

    Everyone with access to this host's loopback can use it. Raises SetupError for a taken port.
    """
    import uvicorn

    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SetupError(f"port {port} cannot be used: {error.strerror}: choose another") from error
    app = server.streamable_http_app(streamable_http_path=PATH, host="127.0.0.1")
    # uvicorn's other parser takes heads of any size
    http = uvicorn.Server(uvicorn.Config(app, http="h11", log_level="warning"))
    ready(f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}")
    asyncio.run(http.serve(sockets=[listener]))


async def _gather_text(events: AsyncIterator[AgentEvent]) -> AsyncIterator[AgentEvent]:
    """Yield the events, with single tokens of text joined into pieces worth a message."""
    text = ""
    async for event in events:
        if isinstance(event, TextDelta):
            text += event.text
            if len(text) < PIECE:
                continue
        if text:
            yield TextDelta(text)
            text = ""
        if not isinstance(event, TextDelta):
            yield event


def _describe(event: AgentEvent) -> str:
    """Describe an event in a line; "" for events that are not worth one."""
    match event:
        case TextDelta():
            return event.text
        case ModelStarted() if event.turn == 0:
            return f"{event.agent} asks {event.model}"
        case ToolStarted():
            return f"{event.name}({event.arguments[:MAX_DETAIL]})"
        case ToolFinished():
            return f"{event.call.name}: {model_text(event.call)[:MAX_DETAIL]}"
    return ""
