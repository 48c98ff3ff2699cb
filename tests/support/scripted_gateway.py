"""A gateway over the real pool on a free port, and its clients; the engine is scripted or given.

`served` may be entered again on the same directory: a restart of the gateway on its home.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai

from cray_agents.engines.scripted import ScriptedEngine, tool_call
from cray_agents.errors import EngineError
from cray_agents.paths import Home
from cray_agents.ports import Engine, EngineCall, Trainer
from cray_agents.records import ModelCall
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.place import EngineHost
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from tests.support.bare_models import bare_model
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_services import first_version, listening
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import until as until

CHAT = "/v1/chat/completions"
TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}


checkpoint = bare_model


def block(home: Home) -> None:
    """Let nothing more be written to the store of a home; unlink its `segments` to let it again."""
    shutil.rmtree(home.segments)
    home.segments.write_text("where the directory would be")


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def echo(request: dict[str, Any]) -> Any:
    """The last message's text; a tool call where there are tools."""
    if request.get("tools"):
        return tool_call("calculator", expression="2+2")
    return str(request["messages"][-1]["content"])


class Paced(ScriptedEngine):
    """Takes its time over a stream, and fails in mid-stream where the text says "explode".

    pause: seconds after each piece; a call keeps the pause that it began with.
    """

    def __init__(self, *replies: Any, pause: float = 0.0, **settings: Any) -> None:
        super().__init__(*replies, **settings)
        self.pause = pause
        self.active = 0
        self.pieces = 0  # sent, of all calls
        self.cancelled = 0

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        self.active += 1
        pause = self.pause
        try:
            async with aclosing(super().answer(exchange)) as pieces:
                async for piece in pieces:
                    if b"explode" in piece:
                        raise EngineError("the engine died", status=500)
                    self.pieces += 1
                    yield piece
                    await asyncio.sleep(pause)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1


class Reply(NamedTuple):
    """What came back, byte for byte."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def run_id(self) -> str:
        return self.headers["x-run-id"]

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@dataclass
class Gateway:
    url: str
    engine: Any  # the test's own
    pool: Pool
    services: Services
    http: aiohttp.ClientSession

    @property
    def store(self) -> Store:
        return self.services.store

    def calls(self, run_id: str) -> list[ModelCall]:
        return self.store.run(run_id).calls

    def client(self, path: str = "/v1", key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + path, api_key=key, max_retries=0, timeout=120)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """The status and the JSON or text; every refusal is an envelope."""
        async with self.http.request(method, self.url + path, **options) as response:
            assert response.headers["x-request-id"]
            text = await response.text()
            if response.content_type != "application/json":
                assert response.status < 400, text
                return response.status, text
            value = json.loads(text)
            if response.status >= 400:
                assert set(value) == ({"error", "type"} if "/messages" in path else {"error"})
                assert set(value["error"]) == {"message", "type", "param", "code"}
                assert value["error"]["message"]
            return response.status, value

    async def ask(
        self, messages: Any, *, path: str = CHAT, headers: Any = None, **fields: Any
    ) -> Reply:
        """A chat request; `messages` may be the user's one text."""
        asked = says(messages) if isinstance(messages, str) else messages
        body = {"model": "calc", "messages": asked, **fields}
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            content = await response.read()
            lower = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, lower, content)


@asynccontextmanager
async def served(
    directory: Path,
    engine: Engine | None = None,
    *,
    trainer: Callable[[Home], Trainer] = ScriptedTrainer,
    host: EngineHost | None = None,
    others: Sequence[EngineHost] = (),
    spares: Sequence[EngineHost] = (),
    model: Path | None = None,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """A gateway whose `calc@1` is promoted, on `host` or else a scripted engine, and on `others`.

    `spares` are started on demand. `options` are those of Services.
    """
    home = Home(directory / "home")
    registry = first_version(home, "calc", model)
    engine = engine or ScriptedEngine(echo)
    pool = Pool([host or InProcessEngine(engine), *others], spares=spares)
    version = registry.resolve("calc")
    await pool.start(home.checkpoint(version.checkpoint), version.id, [])
    parts: dict[str, Any] = {
        "platform": {"version": "0.1.0"},
        "code": "code-1",
        "keep_alive": 60,  # a stream that was kept alive has status 200, whatever then fails
        "max_body": 200_000,
    }
    services = Services(home, Store(home), registry, trainer(home), pool, **parts | options)
    try:
        async with (
            listening(create_app(services), log_level="warning") as url,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            try:
                yield Gateway(url, engine, pool, services, http)
            finally:
                await services.changes.close()
    finally:
        await services.close()
        await pool.stop()
        await services.store.close()
