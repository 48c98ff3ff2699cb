"""Worker supervisor: restart the batch worker when it dies. Called by `cray-agents up`."""

import asyncio
import logging
import os
import time
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.processes import end_child, python

PAUSE_SECONDS = (0.5, 30.0)  # seconds before a restart: at first, and at most after repeated deaths
STEADY_SECONDS = 60.0  # seconds of life that reset the pause
STOP_SECONDS = 5.0  # seconds between SIGTERM and SIGKILL

log = logging.getLogger(__name__)


async def keep(home: Home, url: str, log_file: Path, *, key: str | None = None) -> None:
    """Keep a worker of `home` running that uses the gateway at `url`, until cancelled.

    `key` is its API key. Its log is appended to `log_file`. The worker dies with this process.
    """
    pause = PAUSE_SECONDS[0]
    while True:
        started_at = time.monotonic()
        process = await _start(home, url, log_file, key)
        try:
            code = await process.wait()
        finally:
            await end_child(process, STOP_SECONDS)
        pause = (
            PAUSE_SECONDS[0]
            if time.monotonic() - started_at > STEADY_SECONDS
            else min(2 * pause, PAUSE_SECONDS[1])
        )
        log.warning("the batch worker ended (%s), again in %.1f s; see %s", code, pause, log_file)
        await asyncio.sleep(pause)


async def _start(
    home: Home, url: str, log_file: Path, key: str | None
) -> asyncio.subprocess.Process:
    argv = python("-m", "cray_agents.runtime.batches.worker", str(home.root), url)
    environment = {**os.environ, **({"CRAY_AGENTS_API_KEY": key} if key else {})}
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *argv,
            "--parent",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
