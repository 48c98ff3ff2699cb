"""A gateway over a scripted engine, with API keys of every role."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import PROBE, bare_model
from tests.support.scripted_trainer import ScriptedTrainer

TOKEN = "sk-platform-of-this-test"


@dataclass
class Site:
    """A gateway over a scripted engine, and the keys of its home."""

    url: str
    app: Starlette
    services: Services
    keys: Keys
    http: aiohttp.ClientSession

    def client(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 20, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    async def call(
        self, method: str, path: str, key: str | None = None, **headers: str
    ) -> tuple[int, str | None]:
        """The status, and the error's code."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given["authorization"] = f"Bearer {key}"
        async with self.http.request(method, self.url + path, headers=given) as response:
            assert response.headers["x-request-id"] and response.headers["openai-processing-ms"]
            if response.status < 400 or method == "HEAD":
                return response.status, None
            error = json.loads(await response.text())["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            return response.status, error["code"]

    async def raw(self, request: bytes) -> bytes:
        """The answer to these bytes: nothing is made nicer on the way."""
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head


@asynccontextmanager
async def site_at(directory: Path, *more: Route, **options: Any) -> AsyncIterator[Site]:
    home = Home(directory / "home")
    registry = Registry(home)
    registry.register("m", *registry.import_checkpoint(bare_model(directory / "model")))
    version = registry.resolve("m@1")
    registry.promote("m", 1)
    pool = Pool([InProcessEngine(ScriptedEngine(lambda request: "hi"))])
    await pool.start(home.checkpoint(version.checkpoint), version.id, [])
    services = Services(
        home=home,
        store=Store(home),
        registry=registry,
        trainer=ScriptedTrainer(home, probe=PROBE),
        pool=pool,
        platform={"version": "test"},
        token=TOKEN,
        **options,
    )
    app = create_app(services)
    app.router.routes.extend(more)
    config = uvicorn.Config(app, port=0, log_config=None, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it by this flag alone
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with aiohttp.ClientSession() as http:
        yield Site(f"http://127.0.0.1:{port}", app, services, Keys(home), http)
    server.should_exit = True
    await services.changes.close()
    await task
    await pool.stop()
    await services.store.close()
