"""Keeps a batch worker running: starts it, and again when it dies. `cray-agents up` calls this."""

import asyncio
import logging
import os
import sys
import time
from pathlib import Path

from cray_agents.paths import Home

PAUSE = (0.5, 30.0)  # seconds before it is started again: the least, and the most in a row of ends
STEADY = 60.0  # a worker that lived so many seconds was well
STOP = 5.0  # seconds that it has to end by itself

log = logging.getLogger(__name__)


async def keep(home: Home, url: str, log_file: Path, *, key: str | None = None) -> None:
    """Run a worker of `home` that asks the gateway at `url`, until cancelled.

    `key` is its API key; what it logs is appended to `log_file`. It dies with this process.
    """
    pause = PAUSE[0]
    while True:
        begun = time.monotonic()
        process = await _start(home, url, log_file, key)
        try:
            code = await process.wait()
        finally:
            await _stop(process)
        pause = PAUSE[0] if time.monotonic() - begun > STEADY else min(2 * pause, PAUSE[1])
        log.warning("the batch worker ended (%s), again in %.1f s; see %s", code, pause, log_file)
        await asyncio.sleep(pause)


async def _start(
    home: Home, url: str, log_file: Path, key: str | None
) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "cray_agents.runtime.batches.worker", str(home.root), url]
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


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End it, if it has not ended."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
