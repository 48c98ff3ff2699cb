"""A gateway in a process that measures its event loop: how long each callback takes a processor.

    python -m tests.support.timed_gateway HOME timed|quick

It writes its URL and its keys' secrets as JSON on a line. `GET /slowest` is the slowest callback
since the last such question, `GET /works` the client works that have begun and that wait, and how
each came and went. Where it is timed, the loop is asyncio's, whose callbacks can be; else uvloop's,
as the platform's. The engine answers any API at once, with as many events as `max_tokens` says.
"""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cray_agents.paths import Home
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.processes import die_with_parent
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from cray_agents.server.gateway_parts import GC
from cray_agents.testing import ScriptedEngine
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import PROBE
from tests.support.scripted_services import first_version, listening, start_pool
from tests.support.scripted_trainer import ScriptedTrainer

KEYS = {"admin": Role.admin, "one": Role.train, "other": Role.train, "use": Role.use}


class Timed:
    """The slowest callback of the event loop, by the processor's time of its thread."""

    def __init__(self) -> None:
        self.seconds, self.what = 0.0, ""

    def watch(self) -> None:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            seconds = time.thread_time() - begun
            if seconds > self.seconds:
                self.seconds, self.what = seconds, repr(handle)

        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]

    async def tell(self, request: Request) -> Response:
        seconds, what = self.seconds, self.what
        self.seconds, self.what = 0.0, ""
        return JSONResponse({"seconds": seconds, "what": what})


class QuickEngine(ScriptedEngine):
    """Says one token for each of `max_tokens`, whatever it is asked."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        count = exchange.request.get("max_tokens", 1)
        exchange.version = self.version
        exchange.samples = [
            SampledSequence([1, 2, 3], [7] * count, [-0.5] * count, "stop")
            for _ in range(exchange.request.get("n", 1))
        ]
        words = "word " * count
        head = {"id": f"chatcmpl-{exchange.id}", "model": exchange.version}
        if exchange.streams:
            for number in range(count):
                if number % 100 == 0:
                    await asyncio.sleep(0)  # as between two pieces of a socket
                chunk = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
                yield b"data: %b\n\n" % json.dumps({**head, "choices": [chunk]}).encode()
            chunk = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield b"data: %b\n\n" % json.dumps({**head, "choices": [chunk]}).encode()
            yield b"data: [DONE]\n\n"
            return
        message = {"role": "assistant", "content": words}
        choices = [
            {"index": n, "message": message, "text": words, "finish_reason": "stop"}
            for n in range(len(exchange.samples))
        ]
        output = {"type": "message", "role": "assistant", "content": [{"text": words}]}
        content = [{"type": "text", "text": words}]
        yield json.dumps(
            {**head, "choices": choices, "output": [output], "content": content}
        ).encode()


async def serve(home: Home, timed: Timed) -> None:
    registry, keys = first_version(home), Keys(home)
    pool = Pool([InProcessEngine(QuickEngine())])
    await start_pool(pool, home, registry)
    store, trainer = Store(home), ScriptedTrainer(home, probe=PROBE)
    services = Services(home, store, registry, trainer, pool, api_keys="required")
    made = {name: keys.create(name, role) for name, role in KEYS.items()}
    names = {record.id: name for name, (record, _) in made.items()}
    work, told, run = services.work, list[str](), services.work.run

    async def noted(key: str, *call: Any, **how: Any) -> Any:
        told.append(f"{names.get(key)} comes")
        try:
            return await run(key, *call, **how)
        except asyncio.CancelledError:
            told.append(f"{names.get(key)} leaves")
            raise
        finally:
            told.append(f"{names.get(key)} ends")

    async def works(request: Request) -> Response:
        waiting = sum(len(queue) for queue in work._waiting.values())
        return JSONResponse({"begun": work._begun, "waiting": waiting, "told": told})

    work.run = noted  # type: ignore[assignment, method-assign]
    app = create_app(services)
    app.router.routes += [Route("/slowest", timed.tell), Route("/works", works)]
    async with listening(app) as url:
        print(json.dumps({"url": url, "keys": {name: made[name][1] for name in made}}), flush=True)
        await asyncio.Event().wait()  # until it is killed


class TimedGateway(NamedTuple):
    """The process's gateway, and its keys' secrets by name."""

    url: str
    keys: dict[str, str]
    process: subprocess.Popen[str]

    def session(self, key: str) -> aiohttp.ClientSession:
        headers = {"authorization": f"Bearer {self.keys[key]}", "content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(
            self.url, headers=headers, timeout=timeout, connector=connector
        )

    async def ask(self, key: str, path: str) -> Any:
        async with self.session(key) as http, http.get(path) as response:
            return await response.json()


@contextmanager
def timed_gateway(home: Path, how: str = "timed") -> Iterator[TimedGateway]:
    home.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TEST_PARENT": str(os.getpid())}
    argv = [sys.executable, "-m", "tests.support.timed_gateway", str(home), how]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield TimedGateway(told["url"], told["keys"], process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if "TEST_PARENT" in os.environ:
        die_with_parent(int(os.environ["TEST_PARENT"]))
    gc.set_threshold(*GC)
    timed = Timed()
    if sys.argv[2] == "timed":
        timed.watch()
    run = asyncio.run if sys.argv[2] == "timed" else uvloop.run
    run(serve(Home(Path(sys.argv[1]).absolute()), timed))
