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
from starlette.applications import Starlette
from starlette.routing import Route

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import PROBE
from tests.support.scripted_services import first_version, listening, start_pool
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
        async with asyncio.timeout(120):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head


@asynccontextmanager
async def site_at(directory: Path, *more: Route, **options: Any) -> AsyncIterator[Site]:
    home = Home(directory / "home")
    registry = first_version(home)
    pool = Pool([InProcessEngine(ScriptedEngine(lambda request: "hi"))])
    await start_pool(pool, home, registry)
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
    async with listening(app, log_level="critical") as url, aiohttp.ClientSession() as http:
        yield Site(url, app, services, Keys(home), http)
        await services.changes.close()
    await pool.stop()
    await services.store.close()
