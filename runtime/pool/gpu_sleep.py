"""GPU sleep: free a replica's GPU while others use it, and serve afterwards, once proven.

`fall_asleep` and `wake_up` are the sleep of a turn (cray_agents/server/gpu_turns.py), after which
the former version serves again. upkeep.py lets a replica sleep that is not needed.
"""

import logging

from cray_agents.errors import CrayError, SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.replica import Replica
from cray_agents.runtime.pool.vllm_engine import timed

log = logging.getLogger(__name__)


class GpuSleep:
    """The sleep of one replica, whose `sleep_level` it sets."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._slept: LoadedVersion | None = None  # with which it fell asleep

    async def free_gpu(self, loaded: LoadedVersion) -> None:
        """Let the engine of a drained replica sleep. Raises CrayError."""
        replica = self._replica
        await replica.adapters.unload()
        level = replica.engine_host.sleep_level(loaded.checkpoint)
        await replica.engine_host.engine.sleep(level)
        self._slept, replica.sleep_level = loaded, level

    def forget(self) -> None:
        """Note that the process which slept is ended."""
        self._slept, self._replica.sleep_level = None, 0

    async def wake_or_start(self, loaded: LoadedVersion) -> ProbeReport:
        """Prove a version on the engine that sleeps, else on a fresh one. Raises CrayError."""
        if self._slept is not None and self._replica.engine_host.placed:
            try:
                return await self._wake(self._slept, loaded)
            except (CrayError, OSError) as error:
                log.warning("%s did not wake up, and is started: %s", loaded.version, error)
        self.forget()
        return await self._replica.start_fresh(loaded)

    async def _wake(self, slept: LoadedVersion, loaded: LoadedVersion) -> ProbeReport:
        """Wake the engine; load the version where it lacks it, and prove it.

        Raises SwapError, EngineError.
        """
        replica = self._replica
        same = replica.sleep_level == 1 and slept.version == loaded.version
        self.forget()
        if not slept.fits(loaded):
            raise SwapError(f"{loaded.version} is of another shape than {slept.version}")
        seconds: dict[str, float] = {}
        with timed(seconds, "wake"):
            await replica.engine_host.engine.wake(slept.checkpoint, slept.version)
        report = await (replica.prove_and_resume(loaded, {}) if same else replica.reload(loaded))
        return report.model_copy(update={"seconds": seconds | report.seconds})

    async def fall_asleep(self) -> dict[str, float]:
        """Let the requests in flight end, and free the GPU; nothing changes until `wake_up`.

        A replica that does not serve, or cannot sleep, is ended. `swap_mode` "keep" does not apply:
        a kept answer would stand still for as long as a job trains. Returns seconds by phase.
        Raises PoolBusy or Overtaken, with everything as before.
        """
        replica, seconds = self._replica, dict[str, float]()
        await replica.changing.acquire()
        before, loaded = replica.state, replica.loaded
        try:
            replica.take("sleep")
            if before == "serving" and loaded is not None:
                with timed(seconds, "drain"):
                    await replica.drain(before, loaded, failing=f"{loaded.version} serves on")
                with timed(seconds, "sleep"):
                    await self._sleep_or_end(loaded)
            else:
                self.forget()
                await replica.engine_host.stop()
        except BaseException:
            if replica.state == "sleeping":
                replica.mark_lost("its sleep was cut off")
            replica.changing.release()
            raise
        return seconds

    async def _sleep_or_end(self, loaded: LoadedVersion) -> None:
        try:
            await self.free_gpu(loaded)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s is ended, it does not sleep: %s", loaded.version, error)
            self._replica.adapters.clear()
            await self._replica.engine_host.stop()

    async def wake_up(self) -> dict[str, float]:
        """Serve the former version again, once it is proven; return seconds by phase.

        A replica that fails is marked lost, and then restarted as one that died.
        """
        replica, seconds = self._replica, dict[str, float]()
        try:
            if replica.loaded is None:  # a spare replica that held nothing
                replica.take("close")
                return seconds
            replica.take("start")
            if self._slept is not None:
                phases = ["wake", *["load"] * (replica.sleep_level == 2), "prove"]
                report = await self._wake(self._slept, replica.loaded)
                seconds |= {phase: report.seconds.get(phase, 0.0) for phase in phases}
            else:
                with timed(seconds, "load"):
                    report = await replica.start_fresh(replica.loaded)
            replica.accept(replica.loaded, report)
        except (CrayError, OSError) as error:
            replica.mark_lost(f"it did not wake up: {error}")
        except BaseException:
            replica.mark_lost("its awakening was cut off")
            raise
        finally:
            replica.changing.release()
        return seconds
