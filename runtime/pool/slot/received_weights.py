"""Received weights: take a job's weights before their files are published, or go back in time."""

import logging
import time
from contextlib import suppress

from cray_agents.errors import CrayError, Overtaken, PoolBusy, SwapError
from cray_agents.runtime.pool.engine.weight_transfer import STUCK
from cray_agents.runtime.pool.slot.slot_weights import SlotWeights

log = logging.getLogger(__name__)

_OFFER_CHECK = 0.5  # seconds between two looks if the job of received weights lives
_LONGEST_UNPROVEN = 3600.0  # seconds for a job to publish what was received


class ReceivedWeights:
    """The weights of a job that one slot holds while they are unproven."""

    def __init__(self, slot: SlotWeights) -> None:
        self._slot = slot
        self._received = ""  # the job
        self._recalled = False  # a request needs the version that was served before

    async def receive(self, job: str) -> bool:
        """Take the weights of a job that still writes its files, and answer nobody.

        `change` to what the job publishes then loads no files, but proves it as ever. Until then
        `loaded` is the former version, which `go_back` serves again. Returns False, with nothing
        changed, if the job offers no weights. Raises SwapError, PoolBusy or Overtaken; the former
        version is then served again.
        """
        async with self._slot.changing:
            if self._slot.state == "serving" and not await self._slot.engine_host.engine.is_offered(
                job
            ):
                return False
            before, loaded = self._slot.state, self._slot.loaded
            if before != "serving" or loaded is None:
                raise PoolBusy(f"the weights of {job} were not received: the replica changed")
            self._slot.set_state("swapping")
            try:
                await self._slot.drain(before, loaded, failing=f"{loaded.version} serves on")
                await self._slot.adapters.unload()
                await self._slot.engine_host.engine.receive(job, loaded.checkpoint)
                self._received, self._recalled = job, False
                self._slot.set_state("unproven")
            except (Overtaken, PoolBusy):
                raise
            except (CrayError, OSError) as error:
                stuck = isinstance(error, CrayError) and error.code == STUCK
                await self._slot.serve_former(loaded, afresh=stuck)
                raise SwapError(f"{error}. {loaded.version} was loaded again") from error
            finally:
                if self._slot.state == "swapping":
                    self._slot.mark_lost("a transfer of weights was cut off")
            return True

    def recall(self, version: str) -> None:
        """Let the replica go back if it could answer with a version, but for received weights."""
        waits = self._slot.state == "unproven" and not self._recalled
        if waits and self._slot.loaded is not None and version in self._slot.loaded.versions:
            self._recalled = True
            self._slot.notifier.notify()

    async def go_back_in_time(self, job: str) -> None:
        """Serve the former version again when received weights will not be staged any more.

        That is when they are offered no more, too old, or in the way of a request.
        """

        def waits() -> bool:
            return self._slot.state == "unproven" and self._received == job

        until = time.monotonic() + _LONGEST_UNPROVEN
        with suppress(CrayError, OSError):
            while waits() and not self._recalled and time.monotonic() < until:
                if not await self._slot.engine_host.engine.is_offered(job):
                    break
                with suppress(TimeoutError):
                    await self._slot.notifier.wait_until(
                        lambda: self._recalled or not waits(), _OFFER_CHECK
                    )
        async with self._slot.changing:
            if not waits() or self._slot.loaded is None:
                return
            log.warning(
                "%s is loaded again: the weights of %s were not staged", self._slot.version, job
            )
            self._slot.set_state("swapping")
            try:
                await self._slot.serve_former(self._slot.loaded)
            finally:
                if self._slot.state == "swapping":
                    self._slot.mark_lost("a swap was cut off")
