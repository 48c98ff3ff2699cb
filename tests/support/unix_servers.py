"""Servers at Unix sockets, as local engines are; and ports that lead to such a socket.

python -m tests.support.unix_servers SOCKET      serves it at a port, and prints the URL
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from cray_agents.processes import die_with_parent
from cray_agents.runtime.pool.vllm_http import UNIX


@asynccontextmanager
async def at_socket(application: web.Application) -> AsyncIterator[str]:
    """The application's URL, for a VllmEngine."""
    runner = web.AppRunner(application)
    await runner.setup()
    with TemporaryDirectory() as folder:
        path = f"{folder}/http"
        await web.UnixSite(runner, path, shutdown_timeout=1.0).start()
        try:
            yield UNIX + path
        finally:
            await runner.cleanup()


def socket_of(pid: int) -> str:
    """The path of the socket that a replica's server listens at."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("--uds") + 1]


async def _lead_on(path: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_unix_connection(path)
        await asyncio.gather(_copy(reader, there), _copy(there_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_lead_on(sys.argv[1]))
