"""Slot sleep: free a replica's GPU while others use it, and serve afterwards, once proven.

`SlotSleep` is the sleep of a turn (server/gpu_turns.py), after which the former version
serves again. `fall_asleep` and `wake_up` are its steps, which slot_places.py takes too.
"""

import logging

from cray_agents.errors import CrayError, SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.pool.slot.golden_probe import LoadedVersion
from cray_agents.runtime.pool.slot.phase_seconds import timed
from cray_agents.runtime.pool.slot.slot_weights import SlotWeights

log = logging.getLogger(__name__)


async def fall_asleep(slot: SlotWeights, loaded: LoadedVersion) -> int:
    """Free the GPU of a drained replica; return the level of its sleep. Raises CrayError."""
    await slot.adapters.unload()
    level = slot.engine_host.sleep_level(loaded.checkpoint)
    await slot.engine_host.engine.sleep(level)
    return level


async def wake_up(
    slot: SlotWeights, slept: LoadedVersion, loaded: LoadedVersion, level: int
) -> ProbeReport:
    """Wake a replica that fell asleep with `slept`; load `loaded` where it lacks it, and prove it.

    Raises SwapError, EngineError.
    """
    if not slept.fits(loaded):
        raise SwapError(f"{loaded.version} is of another shape than {slept.version}")
    seconds: dict[str, float] = {}
    with timed(seconds, "wake"):
        await slot.engine_host.engine.wake(slept.checkpoint, slept.version)
    same = slept.version == loaded.version
    report = await (
        slot.prove_and_resume(loaded, {}) if level == 1 and same else slot.reload(loaded)
    )
    return report.model_copy(update={"seconds": seconds | report.seconds})


class SlotSleep:
    """The sleep of one slot, which nothing else changes meanwhile."""

    def __init__(self, slot: SlotWeights) -> None:
        self._slot = slot
        self._sleep_level = 0  # at which it sleeps; 0: it has no process

    async def fall_asleep(self) -> dict[str, float]:
        """Let the requests in flight end, and free the GPU; nothing changes here until `wake_up`.

        A replica that does not serve, or cannot sleep, is ended. `swap_mode` "keep" does not apply:
        a kept answer would stand still for as long as a job trains. Returns seconds by phase.
        Raises PoolBusy or Overtaken, with everything as before.
        """
        await self._slot.changing.acquire()
        before, seconds = self._slot.state, dict[str, float]()
        try:
            self._slot.set_state("sleeping")
            if before == "serving" and self._slot.loaded is not None:
                with timed(seconds, "drain"):
                    failing = f"{self._slot.loaded.version} serves on"
                    await self._slot.drain(before, self._slot.loaded, failing=failing)
                with timed(seconds, "sleep"):
                    await self._sleep(self._slot.loaded)
            else:
                await self._slot.engine_host.stop()
        except BaseException:
            if self._slot.state == "sleeping":
                self._slot.mark_lost("its sleep was cut off")
            self._slot.changing.release()
            raise
        return seconds

    async def _sleep(self, loaded: LoadedVersion) -> None:
        """Free the GPU; `_sleep_level` is 0 if the process had to be ended for that."""
        try:
            level = await fall_asleep(self._slot, loaded)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s is ended, it does not sleep: %s", loaded.version, error)
            self._slot.adapters.clear()
            await self._slot.engine_host.stop()
            level = 0
        self._sleep_level = level

    async def wake_up(self) -> dict[str, float]:
        """Serve the former version again, once it is proven; return seconds by phase.

        A replica that fails is marked lost, and then restarted as one that died.
        """
        seconds: dict[str, float] = {}
        try:
            level, self._sleep_level = self._sleep_level, 0
            if self._slot.loaded is None:  # a spare replica that held nothing
                self._slot.set_state("down")
            else:
                self._slot.set_state("starting")
                self._slot.accept(
                    self._slot.loaded, await self._wake(self._slot.loaded, level, seconds)
                )
        except (CrayError, OSError) as error:
            self._slot.mark_lost(f"it did not wake up: {error}")
        except BaseException:
            self._slot.mark_lost("its awakening was cut off")
            raise
        finally:
            self._slot.changing.release()
        return seconds

    async def _wake(
        self, loaded: LoadedVersion, level: int, seconds: dict[str, float]
    ) -> ProbeReport:
        if not level:
            with timed(seconds, "load"):
                return await self._slot.start_fresh(loaded)
        report = await wake_up(self._slot, loaded, loaded, level)
        phases = ("wake", "load", "prove") if level == 2 else ("wake", "prove")
        seconds |= {phase: report.seconds.get(phase, 0.0) for phase in phases}
        return report
