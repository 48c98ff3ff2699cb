"""The scripted platform as a process, to be killed.

    python -m tests.support.gateway_process HOME PORT

All real but for the engine and the trainer. It says its URL on a line of its output as soon as it
listens; port 0 picks a free one. Tests start it with `gateway`.
"""

import argparse
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import PROBE
from tests.support.scripted_services import first_version as first_version
from tests.support.scripted_services import server_of, start_pool
from tests.support.scripted_trainer import ScriptedTrainer

ROOT = Path(__file__).parents[2]
NAME = "m"


def fresh_words(request: dict[str, Any]) -> str:
    """The last message again, and something new, so that what was sampled twice can be told."""
    return f"{request['messages'][-1]['content']}: {uuid.uuid4().hex}"


class FreshWords(ScriptedEngine):
    """Says something else each time, and forgets what it was asked."""

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await super().chat(request)
        self.requests.clear()
        return answer


async def serve(home: Home, port: int, hold: float) -> None:
    """Serve until SIGINT or SIGTERM, or for ever."""
    registry = first_version(home)
    pool = Pool([InProcessEngine(FreshWords(fresh_words, delay=hold))])
    trainer = ScriptedTrainer(home, probe=PROBE)
    services = Services(home, Store(home), registry, trainer, pool)
    await start_pool(pool, home, registry)
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await server_of(create_app(services)).serve(sockets=[listener])
    await pool.stop()
    await services.store.close()


@contextmanager
def gateway(home: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The process and its URL; what is left of it at the end is killed."""
    home.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "tests.support.gateway_process", str(home), str(port)]
    environment = {**os.environ, "TEST_PARENT": str(os.getpid())}
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "the gateway did not start"
        yield url, process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("port", type=int, help="0 picks a free one")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds an answer takes")
    given = parser.parse_args()
    if "TEST_PARENT" in os.environ:
        die_with_parent(int(os.environ["TEST_PARENT"]))
    uvloop.run(serve(Home(given.home.absolute()), given.port, given.hold))
