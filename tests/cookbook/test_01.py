"""01_hello_agent.py, run as its docstring says: from a script, and against a gateway."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cray_agents import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.scripted import tool_call

FILE = Path(__file__).parents[2] / "cookbook" / "01_hello_agent.py"


def run(*arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, FILE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class OneReplica:
    """A pool whose only replica is scripted; the gateway before it is the real one."""

    ready = True

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def chat(self, version: Any, request: dict[str, Any]) -> dict[str, Any]:
        return await self.engine.chat(request)

    def stream(self, version: Any, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self.engine.stream(request)

    def status(self) -> list[dict[str, Any]]:
        return [{"version": "calc@1", "state": "ready"}]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, Store]]:
    home = Home(tmp_path / "home")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    registry = Registry(home)
    registry.register("calc", *registry.import_checkpoint(model))
    registry.promote("calc", 1, who="test")
    engine = ScriptedEngine([tool_call("calculator", expression="47 + 385"), "432"])
    engine.version = "calc@1"
    store = Store(home)
    services: Any = Services(
        home=home, store=store, registry=registry, trainer=None, pool=OneReplica(engine)
    )  # fmt: skip
    web = uvicorn.Server(uvicorn.Config(create_app(services), log_level="error", lifespan="off"))
    sock = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}", store
    web.should_exit = True
    thread.join(10)


def test_scripted():
    assert run("--scripted") == [
        'calculator {"expression": "47 + 385"} -> 432',
        "calc completed output: 432",
    ]


def test_against_a_gateway(gateway):
    url, store = gateway
    assert run(CRAY_AGENTS_URL=url) == [
        'calculator {"expression": "47 + 385"} -> 432',
        "calc@1 completed output: 432",
    ]
    [kept] = store.runs()
    assert (kept.output, kept.model, kept.stop_reason) == (432, "calc@1", "completed")
    first, second = kept.trajectory.turns
    assert first.tool_calls[0].result == 432
    assert second.call is not None and bytes(second.call.token_ids) == b"432"
    assert len(second.call.logprobs) == 3 and second.call.run_id == kept.id
