"""`mcp`: an agent of a Python file as an MCP server, for editors and other people's agents.

Over stdio an MCP client starts this command itself; `--http` serves until Ctrl-C. Read next:
tools/mcp_server.py.
"""

import sys
from contextlib import ExitStack, redirect_stdout
from typing import Annotated

import typer

from cray_agents.cli.agents import AgentFile, ServerOption, load_agent, with_engine
from cray_agents.cli.screen import HomeOption, errors
from cray_agents.errors import BadInput


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="mcp")(serve)


def serve(
    file: AgentFile,
    http: Annotated[
        bool, typer.Option("--http", help="Serve HTTP on loopback instead of stdin and stdout.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --http \\[default: a free one].")
    ] = None,
    home: HomeOption = None,
    url: ServerOption = None,
) -> None:
    """Serve an agent to MCP clients, as a tool ask_NAME; its runs are recorded."""
    from cray_agents.tools.mcp_server import agent_server, serve_http, serve_stdio

    if port is not None and not http:
        raise BadInput("--port is for --http: over stdio there is none", param="port")
    with ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # a print in the file would break the protocol on stdout
            agent = stack.enter_context(with_engine(load_agent(file), home, url))
            server = agent_server(agent)
        if http:
            serve_http(server, port or 0, lambda at: errors.print(f"MCP server: {at}"))
        else:
            serve_stdio(server)
