"""The fuzzed gateway, as a process: `python -m tests.support.fuzz.gateway HOME`.

All real but for the trainer and the engine, which takes whatever it is asked and speaks each API.
It says its URL on a line of its output as soon as it listens; SIGTERM ends it in good order.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import uvloop

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError
from cray_agents.paths import Home
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.processes import die_with_parent
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.http.protocol import Protocol
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import PROBE, bare_model
from tests.support.scripted_services import first_version, start_pool
from tests.support.scripted_trainer import ScriptedTrainer

ROOT = Path(__file__).parents[3]
BODY_TIMEOUT = 1.0  # seconds
TEXT = {"type": "text", "text": "hi"}
SAID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]},
    "/v1/responses": {
        "object": "response",
        "output": [{"type": "message", "role": "assistant", "content": [TEXT]}],
    },
    "/v1/messages": {"role": "assistant", "content": [TEXT]},
    "/v1/embeddings": {"object": "list", "data": []},
    "/v1/messages/count_tokens": {"input_tokens": 1},
    "/tokenize": {"count": 1, "tokens": [1]},
    "/detokenize": {"prompt": "hi"},
}
PREFIX = {"/v1/completions": "cmpl-", "/v1/responses": "resp_"}
LAST = {
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b"event: response.completed\ndata: {}\n\n",
    "/v1/messages": b"event: message_stop\ndata: {}\n\n",
}


class Obliging(ScriptedEngine):
    """Says "hi" to everything that can be sampled."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        many = exchange.request.get("n")
        if not isinstance(many, int | None) or not 1 <= (many or 1) <= 8:
            raise EngineError("n must be from 1 to 8", status=400, param="n", code="invalid_value")
        if exchange.path == "/v1/chat/completions":
            pieces = super().answer(exchange)
            async for piece in pieces:
                yield piece
            self.requests.clear()
            return
        name = PREFIX.get(exchange.path, "chatcmpl-") + exchange.id
        said = {"id": name, "model": exchange.version, "usage": {}, **SAID[exchange.path]}
        exchange.samples = [SampledSequence([1], [104, 105], [-0.5, -0.5], "stop")]
        if exchange.streams:
            yield b"event: said\ndata: " + orjson.dumps(said) + b"\n\n" + LAST[exchange.path]
        else:
            yield orjson.dumps(said)


async def serve(home: Home) -> None:
    """Serve until SIGTERM."""
    registry = first_version(home)
    candidate = bare_model(home.root / "candidate", b"other weights")
    registry.register("m", *registry.import_checkpoint(candidate))
    pool = Pool([InProcessEngine(Obliging(lambda request: "hi")) for _ in range(2)])
    services = Services(
        home=home,
        store=Store(home),
        registry=registry,
        trainer=ScriptedTrainer(home, probe=PROBE, by_hand=True),
        pool=pool,
        platform={"version": "fuzzed"},
        body_timeout=BODY_TIMEOUT,
        api_keys="off",  # else the first key that the fuzz makes would end it
    )
    await start_pool(pool, home, registry)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        create_app(services),
        http=Protocol,
        ws="none",
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    await uvicorn.Server(config).serve(sockets=[listener])
    await pool.stop()
    await services.store.close()


@contextmanager
def fuzzed(home: Path, log: Path) -> Iterator[str]:
    """Its URL; at the end it is told to stop, and must do so."""
    argv = [sys.executable, "-m", "tests.support.fuzz.gateway", str(home)]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), log.read_text()
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    uvloop.run(serve(Home(Path(sys.argv[1]).absolute())))
