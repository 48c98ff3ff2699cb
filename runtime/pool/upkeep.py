"""Upkeep: bring a replica back that is lost or silent, find it places, and let it come and go.

A Slurm job's place ends: a successor is ready before. A replica that is not needed gives its place
back, or sleeps on it. It is then away: it answers nobody, and takes the newest version when it is
called back. It may also take the weights of a job before their files are published. replica.py has
the states; a pool keeps the three `keep_*` tasks running.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from cray_agents.errors import CrayError, EngineError, EngineTimeout, Overtaken, PoolBusy, SwapError
from cray_agents.records import ProbeReport
from cray_agents.runtime.background import ChangeNotifier, start_task
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.lora_adapters import Adapters
from cray_agents.runtime.pool.place import EngineHost
from cray_agents.runtime.pool.replica import Replica
from cray_agents.runtime.pool.vllm_engine import timed
from cray_agents.runtime.pool.weight_transfer import STUCK

log = logging.getLogger(__name__)

_LIVENESS_CHECKS = 4  # within the seconds that a replica may be silent
_BACKOFF = (0.2, 30.0)  # seconds before the first restart, and at most before any
_OUT_BACKOFF = (10.0, 600.0)  # ... of a replica that was left out
_POLL_INTERVAL = 0.1  # seconds between two looks if other gateways' requests have ended
_JOB_INTERVAL = 0.5  # seconds between two looks if the job of received weights lives
_RETRY_INTERVAL = 30.0  # seconds until a successor that did not come is tried again
_LONGEST_UNPROVEN = 3600.0  # seconds for a job to publish what was received
_LOST = ("down", "out", "waiting")


class PoolReplica(Replica):
    """A replica that is kept alive, comes and goes, sleeps, and takes weights without files."""

    def __init__(self, *arguments: Any) -> None:
        """See `Replica`."""
        super().__init__(*arguments)
        self._restarting = False
        self._successor: EngineHost | None = None  # for the time after the present host's place
        self._moved = ChangeNotifier()  # when a successor took the host's part
        self._retiring: dict[asyncio.Task[None], EngineHost] = {}  # that end their last requests
        self._gives_back = False  # until its place is given back
        self._called_back = False  # it was away, and is to be started
        self._slept: LoadedVersion | None = None  # with which it fell asleep
        self._received = ""  # the job whose weights it holds unproven
        self._recalled = False  # a request needs the version that was served before

    # ---- restarts
    async def keep_alive(self) -> None:
        """Bring the replica back whenever it is lost or left out. Runs until cancelled."""
        while True:
            if not self._restarting:  # else this task itself had failed
                await self._wait_until_lost()
            self._restarting = True
            called_back, self._called_back = self._called_back, False
            if not called_back and await self.end_sleep():
                log.warning("a replica that slept has ended, and stays away")
                self._restarting = False
                continue
            if not called_back:
                self._note_loss()
            delay, most = _OUT_BACKOFF if self.state == "out" else _BACKOFF
            while True:
                with suppress(TimeoutError):  # a swap may begin to repair it meanwhile
                    await self.notifier.wait_until(lambda: self.state not in ("down", "out"), delay)
                delay = min(delay * 2, most)
                if not await self._find_place():
                    continue
                async with self.changing:
                    if self.state not in _LOST or self.loaded is None:
                        break  # a swap has put a fresh process there
                    self.restarts += not called_back
                    await self.restore(self.loaded, self._wake_or_start)
                    if not called_back:
                        self._note_restart()
                    called_back = False
            self._restarting = False

    async def _wait_until_lost(self) -> None:
        """Return when the process has died, or when the replica was marked lost."""
        while True:
            moved = asyncio.create_task(self._moved.wait())
            waits = {
                asyncio.create_task(self.engine_host.wait_until_dead()),
                asyncio.create_task(self.lost.wait()),
                moved,
            }
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
            if moved not in done:  # else it may be the former place that is lost
                return

    def _note_loss(self) -> None:
        death_reason = self.engine_host.death_reason()
        reasons = [self.error] if self.lost.is_set() and self.error else []
        if death_reason and death_reason not in str(self.error):
            reasons.append(death_reason)
        self.why_lost = ": ".join(reasons) or "its process ended"
        self.losses += 1
        self.last_restart = {"time": time.time(), "why": self.why_lost, "seconds": None}
        if self.state in ("serving", "leaving", "unproven", "away"):
            self.error = self.why_lost
            self.take("lose")
        self.notifier.notify()
        if self.loaded is not None and self.state != "out":
            log.warning("the replica of %s is lost: %s", self.loaded.version, self.why_lost)

    def _note_restart(self) -> None:
        if self.loaded is None or self.last_restart is None:
            return
        version = self.loaded.version
        if self.state != "serving":
            log.warning("restart %d of %s failed: %s", self.restarts, version, self.error)
            return
        seconds = self.last_restart["seconds"] = time.time() - self.last_restart["time"]
        log.warning(
            "restart %d: a replica serves %s again after %.1f s", self.restarts, version, seconds
        )

    async def keep_listening(self, silence: float) -> None:
        """Restart a serving replica that was silent for `silence` seconds. Runs until cancelled.

        The engine is checked several times, whether or not it answers requests. A moment in which
        this process itself stood still then does not count as silence.
        """
        silent, pause = 0, silence / _LIVENESS_CHECKS
        while True:
            await asyncio.sleep(0 if silent else pause)
            since, began = self.losses, time.monotonic()
            if self.state != "serving":
                silent = 0
                await asyncio.sleep(pause)
                continue
            try:
                async with asyncio.timeout(pause):
                    await self.engine_host.check_alive()
                silent = 0
            except (TimeoutError, EngineTimeout):
                silent += 1
            except EngineError as error:
                if isinstance(error.__cause__, TimeoutError):  # it takes no connection
                    silent += 1
                    await asyncio.sleep(began + pause - time.monotonic())
                else:
                    silent = 0
                if error.status >= 500:  # without a status the process has ended: see keep_alive
                    self.fail(since, str(error))
            if silent == _LIVENESS_CHECKS - 1:
                silent = 0
                self.fail(since, f"it said nothing for {silence:g} s (silence_timeout)")

    # ---- places
    async def _find_place(self) -> bool:
        """Wait for a place where the replica has none. Return False if none is to be had yet."""
        async with self.changing:  # a successor may be starting
            if self.engine_host.placed or self.loaded is None or self.state not in _LOST:
                return True
            if self._successor is not None:  # it waits for a place already
                self._move_to(self._successor, self.adapters_of(self._successor))
            self.take("wait")
        try:
            await self.engine_host.allocate()
        except (CrayError, OSError) as error:
            log.warning("the replica of %s has no place: %s", self.version, error)
            self.mark_lost(str(error))
            return False
        return True

    async def keep_place(self) -> None:
        """Have a successor ready before each place is left. Runs until cancelled."""
        while True:
            host = self.engine_host
            successor = asyncio.create_task(host.successor())
            moved = asyncio.create_task(self._moved.wait())
            ending = start_task("ending place", self._drain_ending_place(host))
            try:
                await asyncio.wait({successor, moved}, return_when=asyncio.FIRST_COMPLETED)
                if not moved.done():
                    await self._hand_over(host, self._successor or successor.result())
            except (CrayError, OSError) as error:
                log.warning("%s has no successor yet: %s", self.version, error)
                await asyncio.sleep(_RETRY_INTERVAL)
            finally:
                for task in (successor, moved, ending):
                    task.cancel()

    async def _hand_over(self, host: EngineHost, successor: EngineHost) -> None:
        """Start and prove a successor, send it all further requests, and release the host.

        The host answers until then, and ends what it has begun.
        """
        if self.state == "away":
            await self.end_sleep()
            return
        self._successor = successor
        await successor.allocate()
        async with self.changing:
            if self.engine_host is not host or self.loaded is None:
                return  # its place was lost, and keep_alive starts on the successor's
            loaded, adapters = self.loaded, self.adapters_of(successor)
            try:
                successor.lora_rank = host.lora_rank
                await successor.start(loaded.checkpoint, loaded.version)
                report = await self.prove_on(successor.engine, loaded, {})
                await adapters.restore(loaded.beside, report)
            except BaseException:
                await successor.stop()
                raise
            self._move_to(successor, adapters)
            self.note_start(successor.phases, report)
            self.accept(loaded, report)

    async def _drain_ending_place(self, host: EngineHost) -> None:
        """Send no more requests to a place that is about to be lost, so that its last ones end."""
        await host.wait_until_ending()
        async with self.changing:
            if self.engine_host is host and self.state == "serving":
                self.error = "its place is about to be taken away"
                self.take("end")
                await self.refuse()

    def _move_to(self, successor: EngineHost, adapters: Adapters) -> None:
        """Let a successor take the host's part."""
        former, self.engine_host, self._successor = self.engine_host, successor, None
        self.adapters = adapters
        self._moved.notify()
        task = start_task("release of a place", former.release(drain=True))
        self._retiring[task] = former
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def close(self) -> None:
        """End the replica, and give its places back."""
        self.take("close")
        hosts = [self.engine_host, *self._retiring.values()]
        hosts += [self._successor] if self._successor is not None else []
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(host.release() for host in hosts))

    # ---- away while it is not needed
    def stay_away(self, loaded: LoadedVersion) -> None:
        """Take no place until `come_back`; the version is the one to start with then."""
        self.expect(loaded)
        self.take("leave")

    @property
    def can_leave(self) -> bool:
        """True if the replica serves, and neither changes nor is about to move."""
        changes = self.changing.locked() or self._successor is not None
        return self.state == "serving" and not changes

    def leave(self, *, sleep: bool = False) -> Coroutine[Any, Any, None]:
        """Answer no more requests; the coroutine gives the place back when the last one has ended.

        With `sleep` the replica then sleeps on its place, or gives it back if it cannot. Only for
        one that `can_leave`. A replica that dies meanwhile is brought back as ever, and then keeps
        its place.
        """
        self._gives_back = True
        self.take("leave")
        return self._leave(sleep)

    async def _leave(self, sleep: bool) -> None:
        try:
            while self.in_flight and self.state == "away":
                await self.notifier.wait()
            async with self.changing:
                if self.state == "away" and not (sleep and await self._sleep_away()):
                    await self._give_back()
        finally:
            self._gives_back = False

    async def _give_back(self) -> None:
        self._forget_sleep()
        self.adapters.clear()
        await self.engine_host.release()
        self.notifier.notify()

    async def _sleep_away(self) -> bool:
        loaded = self.loaded
        if loaded is None:
            return False
        try:
            while await self.refuse():  # noqa: ASYNC110 - other gateways' requests
                await asyncio.sleep(_POLL_INTERVAL)
            await self._free_gpu(loaded)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s leaves, it does not sleep: %s", loaded.version, error)
            return False
        self.notifier.notify()
        return True

    async def end_sleep(self) -> bool:
        """Give back the place of a replica that sleeps. Return False if it does not sleep."""
        if not self.asleep:  # what else changes it may hold `changing` for long
            return False
        async with self.changing:
            if not self.asleep:
                return False
            await self._give_back()
            return True

    def come_back(self) -> bool:
        """Start again, on a new place. Return False if the replica is not away, or not yet."""
        if self.state != "away" or self._gives_back:
            return False
        self._called_back = True
        self.take("call back")
        self.lost.set()
        return True

    # ---- GPU sleep: free the GPU while others use it, and serve afterwards, once proven
    # `fall_asleep` and `wake_up` are the sleep of a turn (cray_agents/server/gpu_turns.py), after
    # which the former version serves again.
    async def _free_gpu(self, loaded: LoadedVersion) -> None:
        """Let the engine of a drained replica sleep. Raises CrayError."""
        await self.adapters.unload()
        level = self.engine_host.sleep_level(loaded.checkpoint)
        await self.engine_host.engine.sleep(level)
        self._slept, self.sleep_level = loaded, level

    def _forget_sleep(self) -> None:
        """Note that the process which slept is ended."""
        self._slept, self.sleep_level = None, 0

    async def _wake_or_start(self, loaded: LoadedVersion) -> ProbeReport:
        """Prove a version on the engine that sleeps, else on a fresh one. Raises CrayError."""
        if self._slept is not None and self.engine_host.placed:
            try:
                return await self._wake(self._slept, loaded)
            except (CrayError, OSError) as error:
                log.warning("%s did not wake up, and is started: %s", loaded.version, error)
        self._forget_sleep()
        return await self.start_fresh(loaded)

    async def _wake(self, slept: LoadedVersion, loaded: LoadedVersion) -> ProbeReport:
        """Wake the engine; load the version where it lacks it, and prove it.

        Raises SwapError, EngineError.
        """
        same = self.sleep_level == 1 and slept.version == loaded.version
        self._forget_sleep()
        if not slept.fits(loaded):
            raise SwapError(f"{loaded.version} is of another shape than {slept.version}")
        seconds: dict[str, float] = {}
        with timed(seconds, "wake"):
            await self.engine_host.engine.wake(slept.checkpoint, slept.version)
        report = await (self.prove_and_resume(loaded, {}) if same else self.reload(loaded))
        loads = {phase: report.seconds[phase] for phase in ("load",) if phase in report.seconds}
        self.note_start(seconds | loads, report)
        return report.model_copy(update={"seconds": seconds | report.seconds})

    async def fall_asleep(self) -> dict[str, float]:
        """Let the requests in flight end, and free the GPU; nothing changes until `wake_up`.

        A replica that does not serve, or cannot sleep, is ended. `swap_mode` "keep" does not apply:
        a kept answer would stand still for as long as a job trains. Returns seconds by phase.
        Raises PoolBusy or Overtaken, with everything as before.
        """
        seconds: dict[str, float] = {}
        await self.changing.acquire()
        before, loaded = self.state, self.loaded
        try:
            self.take("sleep")
            if before == "serving" and loaded is not None:
                with timed(seconds, "drain"):
                    await self.drain(before, loaded, failing=f"{loaded.version} serves on")
                with timed(seconds, "sleep"):
                    await self._sleep_or_end(loaded)
            else:
                self._forget_sleep()
                await self.engine_host.stop()
        except BaseException:
            if self.state == "sleeping":
                self.mark_lost("its sleep was cut off")
            self.changing.release()
            raise
        return seconds

    async def _sleep_or_end(self, loaded: LoadedVersion) -> None:
        try:
            await self._free_gpu(loaded)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s is ended, it does not sleep: %s", loaded.version, error)
            self.adapters.clear()
            await self.engine_host.stop()

    async def wake_up(self) -> dict[str, float]:
        """Serve the former version again, once it is proven; return seconds by phase.

        A replica that fails is marked lost, and then restarted as one that died.
        """
        seconds: dict[str, float] = {}
        try:
            if self.loaded is None:  # a spare replica that held nothing
                self.take("close")
                return seconds
            self.take("start")
            if self._slept is not None:
                phases = ["wake", *["load"] * (self.sleep_level == 2), "prove"]
                report = await self._wake(self._slept, self.loaded)
                seconds |= {phase: report.seconds.get(phase, 0.0) for phase in phases}
            else:
                with timed(seconds, "load"):
                    report = await self.start_fresh(self.loaded)
            self.accept(self.loaded, report)
        except (CrayError, OSError) as error:
            self.mark_lost(f"it did not wake up: {error}")
        except BaseException:
            self.mark_lost("its awakening was cut off")
            raise
        finally:
            self.changing.release()
        return seconds

    # ---- weights that come before their files
    async def receive(self, job: str) -> bool:
        """Take the weights of a job that still writes its files, and answer nobody.

        `change` to what the job publishes then loads no files, but proves it as ever. Until then
        `loaded` is the former version, which `go_back` serves again. Returns False, with nothing
        changed, if the job offers no weights. Raises SwapError, PoolBusy or Overtaken; the former
        version is then served again.
        """
        async with self.changing:
            before, loaded = self.state, self.loaded
            if before == "serving" and not await self.engine_host.engine.is_offered(job):
                return False
            if before != "serving" or loaded is None:
                raise PoolBusy(f"the weights of {job} were not received: the replica changed")
            self.take("change")
            try:
                await self.drain(before, loaded, failing=f"{loaded.version} serves on")
                await self.adapters.unload()
                await self.engine_host.engine.receive(job, loaded.checkpoint)
                self._received, self._recalled = job, False
                self.take("receive")
            except (Overtaken, PoolBusy):
                raise
            except (CrayError, OSError) as error:
                stuck = isinstance(error, CrayError) and error.code == STUCK
                await self.serve_former(loaded, afresh=stuck)
                raise SwapError(f"{error}. {loaded.version} was loaded again") from error
            finally:
                if self.state == "swapping":
                    self.mark_lost("a transfer of weights was cut off")
            return True

    def recall(self, version: str) -> None:
        """Let the replica go back if it could answer with a version, but for received weights."""
        waits = self.state == "unproven" and not self._recalled
        if waits and self.loaded is not None and version in self.loaded.versions:
            self._recalled = True
            self.notifier.notify()

    async def go_back_in_time(self, job: str) -> None:
        """Serve the former version again when received weights will not be staged any more.

        That is when they are offered no more, too old, or in the way of a request.
        """

        def waits() -> bool:
            return self.state == "unproven" and self._received == job

        until = time.monotonic() + _LONGEST_UNPROVEN
        with suppress(CrayError, OSError):
            while waits() and not self._recalled and time.monotonic() < until:
                if not await self.engine_host.engine.is_offered(job):
                    break
                with suppress(TimeoutError):
                    await self.notifier.wait_until(
                        lambda: self._recalled or not waits(), _JOB_INTERVAL
                    )
        async with self.changing:
            if not waits() or self.loaded is None:
                return
            log.warning("%s is loaded again: the weights of %s were not staged", self.version, job)
            self.take("change")
            try:
                await self.serve_former(self.loaded)
            finally:
                if self.state == "swapping":
                    self.mark_lost("a swap was cut off")
