"""Worker runs: runs of a WorkerEnvironment, asked for over HTTP and waited for.

The worker's outcome is on record when the platform says that the run is done; see
runtime/gateway/rollout_queue.py. Called by rollouts.py.
"""

import logging
import time
from typing import Any

from cray_agents.errors import EngineUnavailable, NotFound
from cray_agents.platform.client import Platform
from cray_agents.records import Run

SECONDS = 600.0  # that a run may take, if the agent has no timeout
WAIT = 20  # seconds of a request
PATIENCE = 60.0  # seconds for which a platform that restarts is waited for
#: Types of errors that an environment is to blame for; env_worker/ names them.
ENVIRONMENT_ERRORS = ("EnvironmentFailed", "EnvironmentTimeout", "EnvironmentDied")
TELL_EVERY = 60.0  # seconds between warnings that no worker is there

log = logging.getLogger(__name__)
_warned: dict[str, float] = {}  # by environment: when the last warning was


async def run_by_worker(platform: Platform, spec: dict[str, Any]) -> Run:
    """Ask for a run, and return it when its end is on record. Raises EngineUnavailable."""
    lost_at: float | None = None
    while True:
        try:
            state = await platform.ask_for_rollout(spec)
            while state != "done":
                state, workers = await platform.wait_for_rollout(spec["run_id"], WAIT)
                lost_at = None
                if state == "queued" and not workers:
                    _tell(spec["environment"])
            return await platform.run(spec["run_id"])
        except NotFound:
            continue  # the platform was restarted: ask again
        except EngineUnavailable:
            lost_at = time.monotonic() if lost_at is None else lost_at
            if time.monotonic() - lost_at > PATIENCE:
                raise


def _tell(environment: str) -> None:
    now = time.monotonic()
    if now - _warned.get(environment, -TELL_EVERY) >= TELL_EVERY:
        _warned[environment] = now
        log.warning(
            "no worker of environment %r asks for runs: start `cray-agents env-worker --name %s`, "
            "see docs/environments.md",
            environment,
            environment,
        )
