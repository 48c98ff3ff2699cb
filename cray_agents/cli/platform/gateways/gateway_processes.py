"""Gateway processes: start the further gateways of `up`, and again when one dies.

Called by compose.py. They do not die with the platform: where it is killed they answer models'
calls on, as long as replicas do, until another process has taken over (further_process.py).
"""

import asyncio
import logging
import os

from cray_agents.config import Config
from cray_agents.processes import end_child, python

PAUSE = 1.0  # seconds before one that died is started again
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL

log = logging.getLogger(__name__)


async def keep_gateway(config: Config, port: int, number: int) -> None:
    """Keep a further gateway running at a port, until cancelled. `number`: in its log's name."""
    home = config.root
    argv = python("-m", "cray_agents", "gateway", "--home", str(home.root))
    argv += ["--host", config.host, "--port", str(port), "--of", str(os.getpid())]
    path = home.logs / f"gateway-{number}.log"
    while True:
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            code = await process.wait()
        finally:
            await end_child(process, STOP_SECONDS)
        log.warning("further gateway %d ended (%s), and is started again; see %s",
                    number, code, path)  # fmt: skip
        await asyncio.sleep(PAUSE)
