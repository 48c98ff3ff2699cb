"""An MCP server for the tests, over stdio or, with a port, over HTTP. Run as a script."""

import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("site", log_level="ERROR")


class Place(BaseModel):
    city: str
    rain: bool


@server.tool()
def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


@server.tool(name="weather.of")
def weather(city: str) -> Place:
    """Say what the weather is."""
    return Place(city=city, rain=True)


@server.tool()
def process() -> int:
    """Which process this is."""
    return os.getpid()


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("the printer is on fire")


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Show a picture."""
    return ["a dot:", Image(data=b"\x89PNG", format="png")]


@server.tool()
async def hang() -> str:
    """Never answer."""
    import anyio

    await anyio.sleep_forever()
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    print("I was told to die", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
