"""A controller's gateway over scripted servers in processes, and further gateways as processes."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.support.bare_models import bare_model
from tests.support.scripted_gateway import CHAT, Gateway, Reply, says, served
from tests.support.scripted_server import PROGRAM

ROOT = Path(__file__).parents[2]
TOKEN = "sk-platform-of-the-test"
SETTINGS = EngineSettings(program=PROGRAM, dtype="float32", start_timeout=100)


@dataclass
class FurtherGateway:
    """A further gateway's process."""

    url: str
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, **options: Any) -> Reply:
        async with self.http.request(method, self.url + path, **options) as response:
            lower = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, lower, await response.read())

    async def ask(self, messages: Any, *, headers: Any = None, **fields: Any) -> Reply:
        asked = says(messages) if isinstance(messages, str) else messages
        body = {"model": "calc", "messages": asked, **fields}
        return await self.call("POST", CHAT, json=body, headers=headers)

    async def raw(self, request: bytes) -> bytes:
        """All that comes back for these bytes."""
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        return answer

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass
class SharedSite:
    """A controller, with its claim on the root, and its further gateways."""

    folder: Path
    controller: Gateway
    replicas: list[VllmProcess]
    gateways: list[FurtherGateway] = field(default_factory=list)

    @property
    def home(self) -> Home:
        return self.controller.services.home

    def claim(self, url: str, term: int = 1) -> None:
        """Let further gateways believe that the controller has this address."""
        info = {"url": url, "elsewhere": None, "host": socket.gethostname(), "token": TOKEN,
                "term": term, "pid": os.getpid(), "name": "calc"}  # fmt: skip
        durable.replace_file(self.home.platform, checksums.with_crc(json.dumps(info).encode()))

    def version(self, content: bytes) -> ModelVersion:
        """A new version of `calc`."""
        registry = self.controller.services.registry
        model = bare_model(self.folder / content.decode(), content)
        return registry.register("calc", *registry.import_checkpoint(model))

    async def further(
        self, stack: AsyncExitStack, port: int = 0, of: int | None = None
    ) -> FurtherGateway:
        """Start one; it is killed when the stack is left. `of`: who is said to have started it."""
        argv = [sys.executable, "-m", "cray_agents", "up", "--gateway-only"]
        argv += ["--home", str(self.home.root)]
        process = await asyncio.create_subprocess_exec(
            *argv, "--port", str(port), "--parent", str(of or os.getpid()),
            cwd=self.folder, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        stack.push_async_callback(_end, process)
        assert process.stderr is not None
        line = b""
        while b"further gateway" not in line:
            line = await process.stderr.readline()
            assert line, "it ended"
        url = line.decode().split()[-1].removesuffix("/v1")
        gateway = FurtherGateway(url, process, self.controller.http)
        self.gateways.append(gateway)
        return gateway


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@asynccontextmanager
async def shared_site(
    folder: Path, gateways: int = 2, replicas: int = 2
) -> AsyncIterator[SharedSite]:
    """As many further gateways as wanted, each at a port of its own."""
    hosts = [VllmProcess("calc", SETTINGS, folder / f"replica-{n}.log") for n in range(replicas)]
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(
            served(folder, host=hosts[0], others=hosts[1:], token=TOKEN)
        )
        site = SharedSite(folder, controller, hosts)
        site.claim(controller.url)
        for _ in range(gateways):
            await site.further(stack)
        yield site
