"""Child processes of `up`: its batch worker and its further gateways.

Each function runs one process until cancelled, and raises when that ends by itself:
runtime/background.py then starts it again. Called by compose.py. Further gateways do not die with
the platform: where it is killed they answer models' calls on, as long as replicas do, until another
process has taken over (further_process.py). The batch worker does.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from cray_agents.config import Config
from cray_agents.errors import SetupError
from cray_agents.paths import Home
from cray_agents.processes import end_child, python

WORKER_STOP, GATEWAY_STOP = 5.0, 10.0  # seconds between SIGTERM and SIGKILL


async def run_worker(home: Home, url: str, *, key: str | None = None) -> None:
    """Run a batch worker that uses the gateway at `url`. `key`: its API key. Raises SetupError."""
    argv = python("-m", "cray_agents.runtime.batches.worker", str(home.root), url)
    argv += ["--parent", str(os.getpid())]
    secret = {"CRAY_AGENTS_API_KEY": key} if key else {}
    await _run(argv, home.logs / "batch-worker.log", WORKER_STOP, secret)


async def run_gateway(config: Config, port: int, number: int) -> None:
    """Run a further gateway at a port. `number`: in its log's name. Raises SetupError."""
    argv = python("-m", "cray_agents", "gateway", "--home", str(config.root.root))
    argv += ["--host", config.host, "--port", str(port), "--of", str(os.getpid())]
    await _run(argv, config.root.logs / f"gateway-{number}.log", GATEWAY_STOP, outlives=True)


async def _run(
    argv: Sequence[str],
    log: Path,
    stop: float,
    environment: dict[str, str] | None = None,
    *,
    outlives: bool = False,
) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (environment or {}),
            start_new_session=outlives,
        )
    try:
        code = await process.wait()
    finally:
        await end_child(process, stop)
    raise SetupError(f"its process {process.pid} ended ({code}), see {log}")
