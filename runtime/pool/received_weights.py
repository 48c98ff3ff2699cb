"""Received weights: take a job's weights before their files are published, or go back in time."""

import logging
import time
from contextlib import suppress

from cray_agents.errors import CrayError, Overtaken, PoolBusy, SwapError
from cray_agents.runtime.pool.replica import Replica
from cray_agents.runtime.pool.weight_transfer import STUCK

log = logging.getLogger(__name__)

_POLL_INTERVAL = 0.5  # seconds between two looks if the job of received weights lives
_LONGEST_UNPROVEN = 3600.0  # seconds for a job to publish what was received


class ReceivedWeights:
    """The weights of a job that one replica holds while they are unproven."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._received = ""  # the job
        self._recalled = False  # a request needs the version that was served before

    async def receive(self, job: str) -> bool:
        """Take the weights of a job that still writes its files, and answer nobody.

        `change` to what the job publishes then loads no files, but proves it as ever. Until then
        `loaded` is the former version, which `go_back` serves again. Returns False, with nothing
        changed, if the job offers no weights. Raises SwapError, PoolBusy or Overtaken; the former
        version is then served again.
        """
        replica = self._replica
        async with replica.changing:
            before, loaded = replica.state, replica.loaded
            if before == "serving" and not await replica.engine_host.engine.is_offered(job):
                return False
            if before != "serving" or loaded is None:
                raise PoolBusy(f"the weights of {job} were not received: the replica changed")
            replica.take("change")
            try:
                await replica.drain(before, loaded, failing=f"{loaded.version} serves on")
                await replica.adapters.unload()
                await replica.engine_host.engine.receive(job, loaded.checkpoint)
                self._received, self._recalled = job, False
                replica.take("receive")
            except (Overtaken, PoolBusy):
                raise
            except (CrayError, OSError) as error:
                stuck = isinstance(error, CrayError) and error.code == STUCK
                await replica.serve_former(loaded, afresh=stuck)
                raise SwapError(f"{error}. {loaded.version} was loaded again") from error
            finally:
                if replica.state == "swapping":
                    replica.mark_lost("a transfer of weights was cut off")
            return True

    def recall(self, version: str) -> None:
        """Let the replica go back if it could answer with a version, but for received weights."""
        replica = self._replica
        waits = replica.state == "unproven" and not self._recalled
        if waits and replica.loaded is not None and version in replica.loaded.versions:
            self._recalled = True
            replica.notifier.notify()

    async def go_back_in_time(self, job: str) -> None:
        """Serve the former version again when received weights will not be staged any more.

        That is when they are offered no more, too old, or in the way of a request.
        """

        replica = self._replica

        def waits() -> bool:
            return replica.state == "unproven" and self._received == job

        until = time.monotonic() + _LONGEST_UNPROVEN
        with suppress(CrayError, OSError):
            while waits() and not self._recalled and time.monotonic() < until:
                if not await replica.engine_host.engine.is_offered(job):
                    break
                with suppress(TimeoutError):
                    await replica.notifier.wait_until(
                        lambda: self._recalled or not waits(), _POLL_INTERVAL
                    )
        async with replica.changing:
            if not waits() or replica.loaded is None:
                return
            log.warning(
                "%s is loaded again: the weights of %s were not staged", replica.version, job
            )
            replica.take("change")
            try:
                await replica.serve_former(replica.loaded)
            finally:
                if replica.state == "swapping":
                    replica.mark_lost("a swap was cut off")
