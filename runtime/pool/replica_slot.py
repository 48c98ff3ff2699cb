"""Replica slot: change the version that one replica serves, and bring it back when it dies.

pool.py sends requests to slots that are `serving`, and changes several in turn. Every version that
a slot serves has passed its probe on the process that serves it. Read next: lora_adapters.py, the
versions served beside the weights.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cray_agents.errors import (
    CrayError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    Overtaken,
    PoolBusy,
    SwapError,
)
from cray_agents.ports import Engine
from cray_agents.records import ProbeReport
from cray_agents.runtime.logprob_limits import LogprobLimits
from cray_agents.runtime.pool.engine_host import EngineHost
from cray_agents.runtime.pool.golden_probe import LoadedVersion, prove
from cray_agents.runtime.pool.in_flight import ChangeNotifier, InFlightRequests
from cray_agents.runtime.pool.lora_adapters import Adapters
from cray_agents.runtime.pool.phase_seconds import timed
from cray_agents.runtime.pool.published_replicas import PublishedReplica, State
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.weight_transfer import STUCK

log = logging.getLogger(__name__)

_STARTS = 3  # tries of a first start
_OTHERS_LOOK = 0.02  # seconds between two looks if other gateways' requests have ended
_OFFER_CHECK = 0.5  # seconds between two looks if the job of received weights lives
_LONGEST_UNPROVEN = 3600.0  # seconds for a job to publish what was received
_LIVENESS_CHECKS = 4  # within the seconds that a replica may be silent
_BACKOFF = (0.2, 30.0)  # seconds before the first restart, and at most before any
_OUT_BACKOFF = (10.0, 600.0)  # ... of a replica that was left out


class ReplicaSlot:
    """One replica of the pool: the version it holds, its adapters, its requests, its restarts.

    `loaded` is the version to serve and `report` the proof of its weights. `losses` counts lost
    processes, and `why_lost` is the last reason. `notifier` fires at each change.
    """

    def __init__(
        self,
        engine_host: EngineHost,
        probe_limits: LogprobLimits,
        drain_timeout: float,
        notifier: ChangeNotifier,
    ) -> None:
        self.loaded: LoadedVersion | None = None
        self.state: State = "down"
        self.restarts = 0
        self.losses = 0
        self.why_lost = ""
        self.report: ProbeReport | None = None
        self._engine_host = engine_host
        self._probe_limits = probe_limits
        self._drain_timeout = drain_timeout
        self._under_way = 0  # requests in flight, of all gateways, when the engine was last asked
        self._notifier = notifier
        self.requests = InFlightRequests(notifier)
        self._received = ""  # the job of the weights that it holds while unproven
        self._recalled = False  # while unproven: a request needs the version that was served before
        self._adapters = Adapters(engine_host, probe_limits, self.requests, notifier)
        self._selected = ""  # the version most recently loaded or selected here
        self._error: str | None = None
        self._restarted: dict[str, Any] | None = None
        self._sleep_level = 0  # at which it sleeps; 0: it has no process
        self._changing = asyncio.Lock()
        self._lost = asyncio.Event()
        self._successor: EngineHost | None = None  # for the time after the present host's place
        self._moved = asyncio.Event()  # set when a successor took the host's part
        self._retiring: dict[asyncio.Task[None], EngineHost] = {}  # that end their last requests
        self._gives_back = False  # until its place is given back
        self._comes_back = False  # it was away, and keep_alive is to start it

    @property
    def in_flight(self) -> int:
        """Requests in flight, whichever version answers them."""
        return self.requests.total

    @property
    def placed(self) -> bool:
        """True if the replica can change its version; else it takes it with its next place."""
        if self.state == "away":
            return False
        # a start under way ends first, and may be on a new place
        return self._changing.locked() or (self._engine_host.placed and self.state != "leaving")

    @property
    def version(self) -> str | None:
        """The version most recently loaded here, if still loaded; else the one of the weights."""
        if self.loaded is None:
            return None
        return self._selected if self._selected in self.loaded.versions else self.loaded.version

    @property
    def versions(self) -> list[str]:
        """The versions that can answer requests now."""
        if self.loaded is None or self.state != "serving":
            return []
        return [self.loaded.version, *self._adapters.versions]

    @property
    def contents(self) -> str:
        """Contents and state, for an error message."""
        return f"{' and '.join(self.loaded.versions) if self.loaded else 'nothing'} ({self.state})"

    def engine(self, version: str) -> Engine:
        """Return the engine that answers with a version. Raises EngineUnavailable."""
        engine = self._engine_host.engine
        if self.loaded is not None and version == self.loaded.version:
            return engine
        if (adapter := self._adapters.get(version)) is None:
            raise EngineUnavailable(f"{version} is not held any more")
        return adapter.engine

    def published(self) -> PublishedReplica:
        """Return the record for other gateways. An engine without an address has no versions."""
        names, url, secret = {}, "", ""
        for version in self.versions:
            engine = self.engine(version)
            if isinstance(engine, VllmEngine):
                url, secret = engine.url, engine.secret
                names[version] = engine.model
        return PublishedReplica(
            url=url,
            secret=secret,
            names=names,
            expected=self.loaded.versions if self.loaded is not None else [],
            state=self.state,
            losses=self.losses,
            why_lost=self.why_lost,
        )

    def select_version(self, version: str) -> ProbeReport | None:
        """Report a version as this slot's `version`; return its proof, or None if not served."""
        if version not in self.versions:
            return None
        self._selected = version
        return self._proof(version)

    def _proof(self, version: str | None) -> ProbeReport | None:
        adapter = self._adapters.get(version or "")
        return adapter.report if adapter is not None else self.report

    def can_load_as_adapter(self, new: LoadedVersion) -> bool:
        """Tell whether a version can be an adapter beside these weights. Raises SwapError."""
        loaded = self.loaded if self.state == "serving" else None
        return loaded is not None and self._adapters.fits(loaded, new)

    def status(self) -> dict[str, Any]:
        """Return the slot's entry in `/v1/pool`.

        `error` is the last failure of a replica that is not serving. `last_restart` says when and
        why the process was last lost, and the seconds until it served again; it stays afterwards.
        """
        proof = self._proof(self.version)
        return {
            "version": self.version,
            "versions": self.versions,
            "state": self.state,
            "in_flight": self.in_flight,
            "busy_seconds": self.requests.busy_seconds,
            "restarts": self.restarts,
            "last_restart": self._restarted,
            "host": self._engine_host.host,
            "job": self._engine_host.job,
            "pid": self._engine_host.pid,
            "port": self._engine_host.port,
            "probe": proof.model_dump(mode="json") if proof else None,
            "error": self._error or (None if self.placed else self._engine_host.death_reason()),
        }

    async def open(self, loaded: LoadedVersion) -> None:
        """Start for the first time. Raises EngineError, SchedulerError, SetupError, SwapError."""
        self.loaded, self._selected = loaded, loaded.version
        self._set_state("starting" if self._engine_host.placed else "waiting")
        try:
            await self._engine_host.allocate()
        except BaseException:
            self._set_state("down")
            raise
        async with self._changing:
            loaded = self.loaded or loaded  # a swap may have passed while it waited
            self._set_state("starting")
            try:
                self._accept(loaded, await self._start_with_retries(loaded))
            except BaseException:
                self._set_state("down")
                raise

    async def _start_with_retries(self, loaded: LoadedVersion) -> ProbeReport:
        """Start from scratch; retry if the process dies, since it may have been killed.

        A process that dies twice of the same reason is not started again.
        """
        previous = None
        for attempt in range(1, _STARTS + 1):
            try:
                return await self._start_fresh(loaded)
            except EngineUnavailable as error:
                reason = self._engine_host.death_reason()
                why = str(error) if reason in str(error) else reason
                if attempt == _STARTS or (reason and reason == previous):
                    raise EngineUnavailable(f"{loaded.version} cannot be served: {why}") from error
                previous = reason
                log.warning("starting %s again: %s", loaded.version, why)
            except (SwapError, EngineError) as error:
                if not self._engine_host.taken_over:
                    raise
                log.warning("an earlier platform's replica is started afresh: %s", error)
        raise AssertionError("unreachable")

    def expect(self, new: LoadedVersion) -> None:
        """Take a version that other replicas have proven, to start with it when there is a place.

        Not for a slot that is `placed`.
        """
        self.loaded, self._selected = new, new.version

    def stay_away(self, loaded: LoadedVersion) -> None:
        """Take no place until `come_back`; the version is the one to start with then."""
        self.expect(loaded)
        self._set_state("away")

    @property
    def can_leave(self) -> bool:
        """True if the replica serves, and neither changes nor is about to move."""
        return self.state == "serving" and not self._changing.locked() and self._successor is None

    def leave(self) -> Coroutine[Any, Any, None]:
        """Answer no more requests; the coroutine gives the place back when the last one has ended.

        Only for a slot that `can_leave`. A replica that dies meanwhile is brought back as ever, and
        then keeps its place.
        """
        self._gives_back = True
        self._set_state("away")
        return self._leave()

    async def _leave(self) -> None:
        try:
            while self.in_flight and self.state == "away":
                await self._notifier.wait()
            async with self._changing:
                if self.state == "away":
                    self._adapters.clear()
                    await self._engine_host.release()
        finally:
            self._gives_back = False

    def come_back(self) -> bool:
        """Start again, on a new place. Return False if the slot is not away, or not yet."""
        if self.state != "away" or self._gives_back:
            return False
        self._comes_back = True
        self._set_state("waiting")
        self._lost.set()
        return True

    async def close(self) -> None:
        """End the replica, and give its places back."""
        self._set_state("down")
        hosts = [self._engine_host, *self._retiring.values()]
        hosts += [self._successor] if self._successor is not None else []
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(host.release() for host in hosts))

    async def change(
        self,
        new: LoadedVersion,
        *,
        keep: bool = False,
        go_back: bool = True,
        protected: Collection[str] = (),
    ) -> ProbeReport:
        """Load, prove and serve a version: twice in place, then from scratch.

        Requests in flight end first; with `keep` they go on under the new weights, if these fit in
        place. An adapter over the present weights disturbs no request; adapters that are not
        `protected` are unloaded to make room.

        Raises SwapError when all tries failed. The slot then serves its former version again, or is
        left out where `go_back` is False. Raises Overtaken, with nothing changed, if a rollback
        waits before weights are loaded.
        """
        async with self._changing:
            self._notifier.abort_if_rollback_waits(new.version)
            if self.loaded is not None and self.can_load_as_adapter(new):
                return await self._load_adapter(self.loaded, new, protected)
            before, old = self.state, None if self.state == "out" else self.loaded
            runs = before in ("serving", "unproven")
            in_place = runs and old is not None and old.fits(new)
            self._set_state("swapping")
            try:
                # requests under an adapter are never kept: it only fits the old weights
                kept_version = old.version if old is not None and keep and in_place else None
                await self._drain(before, new, kept_version)
                report = await self._replace(old, new, in_place, go_back)
                self._selected = new.version
                return report
            finally:
                if self.state == "swapping":  # cut off: the loaded weights are unknown
                    self._mark_lost("a swap was cut off")

    async def receive(self, job: str) -> bool:
        """Take the weights of a job that still writes its files, and answer nobody.

        `change` to what the job publishes then loads no files, but proves it as ever. Until then
        `loaded` is the former version, which `go_back` serves again. Returns False, with nothing
        changed, if the job offers no weights. Raises SwapError, PoolBusy or Overtaken; the former
        version is then served again.
        """
        async with self._changing:
            if self.state == "serving" and not await self._engine_host.engine.is_offered(job):
                return False
            before, loaded = self.state, self.loaded
            if before != "serving" or loaded is None:
                raise PoolBusy(f"the weights of {job} were not received: the replica changed")
            self._set_state("swapping")
            try:
                await self._drain(before, loaded, failing=f"{loaded.version} serves on")
                await self._adapters.unload()
                await self._engine_host.engine.receive(job, loaded.checkpoint)
                self._received, self._recalled = job, False
                self._set_state("unproven")
            except (Overtaken, PoolBusy):
                raise
            except (CrayError, OSError) as error:
                stuck = isinstance(error, CrayError) and error.code == STUCK
                await self._serve_former(loaded, afresh=stuck)
                raise SwapError(f"{error}. {loaded.version} was loaded again") from error
            finally:
                if self.state == "swapping":
                    self._mark_lost("a transfer of weights was cut off")
            return True

    def recall(self, version: str) -> None:
        """Let the replica go back if it could answer with a version, but for received weights."""
        waits = self.state == "unproven" and not self._recalled
        if waits and self.loaded is not None and version in self.loaded.versions:
            self._recalled = True
            self._notifier.notify()

    async def go_back_in_time(self, job: str) -> None:
        """Serve the former version again when received weights will not be staged any more.

        That is when they are offered no more, too old, or in the way of a request.
        """

        def waits() -> bool:
            return self.state == "unproven" and self._received == job

        until = time.monotonic() + _LONGEST_UNPROVEN
        with suppress(CrayError, OSError):
            while waits() and not self._recalled and time.monotonic() < until:
                if not await self._engine_host.engine.is_offered(job):
                    break
                with suppress(TimeoutError):
                    await self._notifier.wait_until(
                        lambda: self._recalled or not waits(), _OFFER_CHECK
                    )
        async with self._changing:
            if not waits() or self.loaded is None:
                return
            log.warning("%s is loaded again: the weights of %s were not staged", self.version, job)
            self._set_state("swapping")
            try:
                await self._serve_former(self.loaded)
            finally:
                if self.state == "swapping":
                    self._mark_lost("a swap was cut off")

    async def _serve_former(self, loaded: LoadedVersion, *, afresh: bool = False) -> None:
        """Load the files of the version that was served before, and serve it once it is proven."""
        try:
            if not afresh:
                self._accept(loaded, await self._reload(loaded))
                return
        except (CrayError, OSError) as error:
            log.warning("%s is started again: %s", loaded.version, error)
        await self._restore(loaded)

    async def leave_out(self, new: LoadedVersion, why: str) -> None:
        """Answer no requests until this version is proven here; retry with back-off."""
        async with self._changing:
            before = self.state
            self._set_state("swapping")
            try:
                await self._drain(before, new)
            except SwapError as error:
                log.error("a replica could not be left out, it serves on: %s. %s", why, error)
            else:
                await self._take_out_of_service(new, why)

    async def _load_adapter(
        self, base: LoadedVersion, new: LoadedVersion, protected: Collection[str]
    ) -> ProbeReport:
        """Serve an adapter beside the weights."""
        try:
            await self._adapters.make_room(new, protected, self._drain_timeout)
            report = await self._adapters.load(new, self.report)
        except (Overtaken, PoolBusy):
            raise
        except (CrayError, OSError) as error:
            raise SwapError(f"{error}. {', '.join(base.versions)}: served on") from error
        finally:
            self.loaded = replace(base, beside=self._adapters.loaded)
        self._selected = new.version
        return report

    async def add_adapter(self, new: LoadedVersion, protected: Collection[str]) -> ProbeReport:
        """Serve an adapter beside the weights and leave `version` as it is. Raises SwapError."""
        async with self._changing:
            if self.loaded is None or not self.can_load_as_adapter(new):
                raise PoolBusy(f"{new.version} was not loaded: the replica changed meanwhile")
            selected = self._selected
            try:
                return await self._load_adapter(self.loaded, new, protected)
            finally:
                self._selected = selected

    async def shut_down(self) -> None:
        """End the process and clear the slot, unless requests are in flight."""
        async with self._changing:
            if self.in_flight or (self.loaded is not None and await self._refuse()):
                await self._serve_on(self.state)
                return
            self._set_state("down")
            self._adapters.clear()
            await self._engine_host.stop()
            self.loaded, self.report, self._error = None, None, None
            self._lost.clear()

    async def fall_asleep(self) -> dict[str, float]:
        """Let the requests in flight end, and free the GPU; nothing changes here until `wake_up`.

        A replica that does not serve, or cannot sleep, is ended. `swap_mode` "keep" does not apply:
        a kept answer would stand still for as long as a job trains. Returns seconds by phase.
        Raises PoolBusy or Overtaken, with everything as before.
        """
        await self._changing.acquire()
        before, seconds = self.state, dict[str, float]()
        try:
            self._set_state("sleeping")
            if before == "serving" and self.loaded is not None:
                with timed(seconds, "drain"):
                    failing = f"{self.loaded.version} serves on"
                    await self._drain(before, self.loaded, failing=failing)
                with timed(seconds, "sleep"):
                    await self._sleep(self.loaded)
            else:
                await self._engine_host.stop()
        except BaseException:
            if self.state == "sleeping":
                self._mark_lost("its sleep was cut off")
            self._changing.release()
            raise
        return seconds

    async def _sleep(self, loaded: LoadedVersion) -> None:
        """Free the GPU; `_sleep_level` is 0 if the process had to be ended for that."""
        try:
            await self._adapters.unload()
            level = self._engine_host.sleep_level(loaded.checkpoint)
            await self._engine_host.engine.sleep(level)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s is ended, it does not sleep: %s", loaded.version, error)
            self._adapters.clear()
            await self._engine_host.stop()
            level = 0
        self._sleep_level = level

    async def wake_up(self) -> dict[str, float]:
        """Serve the former version again, once it is proven; return seconds by phase.

        A replica that fails is marked lost, and then restarted as one that died.
        """
        seconds: dict[str, float] = {}
        try:
            level, self._sleep_level = self._sleep_level, 0
            if self.loaded is None:  # a spare replica that held nothing
                self._set_state("down")
            else:
                self._set_state("starting")
                self._accept(self.loaded, await self._wake(self.loaded, level, seconds))
        except (CrayError, OSError) as error:
            self._mark_lost(f"it did not wake up: {error}")
        except BaseException:
            self._mark_lost("its awakening was cut off")
            raise
        finally:
            self._changing.release()
        return seconds

    async def _wake(
        self, loaded: LoadedVersion, level: int, seconds: dict[str, float]
    ) -> ProbeReport:
        if not level:
            with timed(seconds, "load"):
                return await self._start_fresh(loaded)
        with timed(seconds, "wake"):
            await self._engine_host.engine.wake(loaded.checkpoint, loaded.version)
        report = await (self._reload(loaded) if level == 2 else self._prove_and_resume(loaded, {}))
        seconds |= {"load": report.seconds.get("load", 0.0)} if level == 2 else {}
        seconds |= {"prove": report.seconds.get("prove", 0.0)}
        return report

    def missing_resource(self, new: LoadedVersion) -> str:
        """Return "" for a slot in use; else see `EngineHost.missing_resource`."""
        return "" if self.loaded is not None else self._engine_host.missing_resource(new.checkpoint)

    async def unload_idle_adapters(self, protected: Collection[str]) -> None:
        """Unload adapters that are not `protected` and have no requests; skip during a change."""
        if self._changing.locked() or self.loaded is None or self.state != "serving":
            return
        async with self._changing:
            await self._adapters.unload(protected)
            self.loaded = replace(self.loaded, beside=self._adapters.loaded)

    async def keep_alive(self) -> None:
        """Bring the replica back whenever it is lost or left out. Runs until cancelled."""
        while True:
            await self._wait_until_lost()
            comes_back, self._comes_back = self._comes_back, False
            if not comes_back:
                self._note_loss()
            delay, most = _OUT_BACKOFF if self.state == "out" else _BACKOFF
            while True:
                await self._wait_while_lost(delay)
                if not await self._find_place():
                    delay = min(delay * 2, most)
                    continue
                async with self._changing:
                    if self.state == "serving" or self.loaded is None:
                        break  # a swap has put a fresh process there
                    self.restarts += not comes_back
                    await self._restore(self.loaded)
                    if not comes_back:
                        self._note_restart()
                    comes_back = False
                delay = min(delay * 2, most)

    def fail_start(self, why: str) -> None:
        """Let `keep_alive` go on with a first start that failed."""
        self._mark_lost(why)

    async def _find_place(self) -> bool:
        """Wait for a place where the replica has none. Return False if none is to be had yet."""
        async with self._changing:  # a successor may be starting
            if self._engine_host.placed or self.loaded is None:
                return True
            if self._successor is not None:  # it waits for a place already
                self._move_to(self._successor, self._adapters_of(self._successor))
            self._set_state("waiting")
        try:
            await self._engine_host.allocate()
        except (CrayError, OSError) as error:
            log.warning("the replica of %s has no place: %s", self.loaded.version, error)
            self._mark_lost(str(error))
            return False
        self._set_state("down")
        return True

    async def keep_place(self) -> None:
        """Have a successor ready before each place is left. Runs until cancelled."""
        while True:
            host = self._engine_host
            leaving = asyncio.create_task(host.wait_until_leaving())
            moved = asyncio.create_task(self._moved.wait())
            ending = asyncio.create_task(self._drain_ending_place(host))
            try:
                await asyncio.wait({leaving, moved}, return_when=asyncio.FIRST_COMPLETED)
                if not moved.done():
                    await self._hand_over(host)
            except (CrayError, OSError) as error:
                log.warning("%s has no successor yet: %s", self.loaded, error)
                await asyncio.sleep(_BACKOFF[1])
            finally:
                for task in (leaving, moved, ending):
                    task.cancel()

    async def _hand_over(self, host: EngineHost) -> None:
        """Start and prove a successor, send it all further requests, and release the host.

        The host answers until then, and ends what it has begun.
        """
        if self.state == "away":
            return
        successor = self._successor = self._successor or host.successor()
        await successor.allocate()
        async with self._changing:
            if self._engine_host is not host or self.loaded is None:
                return  # its place was lost, and keep_alive starts on the successor's
            loaded, adapters = self.loaded, self._adapters_of(successor)
            try:
                await successor.start(loaded.checkpoint, loaded.version)
                report = await self._prove_on(successor.engine, loaded, {})
                await adapters.restore(loaded.beside, report)
            except BaseException:
                await successor.stop()
                raise
            self._move_to(successor, adapters)
            self._accept(loaded, report)

    async def _drain_ending_place(self, host: EngineHost) -> None:
        """Send no more requests to a place that is about to be lost, so that its last ones end."""
        await host.wait_until_ending()
        async with self._changing:
            if self._engine_host is host and self.state == "serving":
                self._error = "its place is about to be taken away"
                self._set_state("leaving")
                await self._refuse()

    def _move_to(self, successor: EngineHost, adapters: Adapters) -> None:
        """Let a successor take the host's part."""
        former, self._engine_host, self._successor = self._engine_host, successor, None
        self._adapters = adapters
        self._moved.set()
        self._moved = asyncio.Event()
        task = asyncio.create_task(former.release(drain=True))
        self._retiring[task] = former
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    def _adapters_of(self, host: EngineHost) -> Adapters:
        return Adapters(host, self._probe_limits, self.requests, self._notifier)

    async def watch_for_silence(self, silence: float) -> None:
        """Restart a serving replica that was silent for `silence` seconds. Runs until cancelled.

        The engine is checked several times, whether or not it answers requests. A moment in which
        this process itself stood still then does not count as silence.
        """
        silent, pause = 0, silence / _LIVENESS_CHECKS
        while True:
            await asyncio.sleep(0 if silent else pause)
            since = self.losses
            if self.state != "serving":
                silent = 0
                await asyncio.sleep(pause)
                continue
            try:
                async with asyncio.timeout(pause):
                    await self._engine_host.check_alive()
                silent = 0
            except (TimeoutError, EngineTimeout):
                silent += 1
            except EngineError as error:
                silent = 0
                if error.status >= 500:  # without a status the process has ended: see keep_alive
                    self.fail(since, str(error))
            if silent == _LIVENESS_CHECKS - 1:
                silent = 0
                self.fail(since, f"it said nothing for {silence:g} s (silence_timeout)")

    def fail(self, since: int, why: str) -> None:
        """Mark a replica lost whose engine is dead or hangs, though its process may live.

        Do nothing while weights change, or if `losses` has passed `since`: then it was restarted.
        """
        if self.losses == since and self.state == "serving" and not self._lost.is_set():
            self._mark_lost(why)

    async def wait_for_loss(self, since: int, seconds: float) -> bool:
        """Tell whether `losses` passes `since`; wait for it up to `seconds`."""
        with suppress(TimeoutError):
            await self._notifier.wait_until(lambda: self.losses != since, seconds)
        return self.losses != since

    def _note_loss(self) -> None:
        death_reason = self._engine_host.death_reason()
        reasons = [self._error] if self._lost.is_set() and self._error else []
        if death_reason and death_reason not in str(self._error):
            reasons.append(death_reason)
        self.why_lost = ": ".join(reasons) or "its process ended"
        self.losses += 1
        self._restarted = {"time": time.time(), "why": self.why_lost, "seconds": None}
        if self.state in ("serving", "leaving"):
            self._error = self.why_lost
            self.state = "down"
        self._notifier.notify()
        if self.loaded is not None and self.state != "out":
            log.warning("the replica of %s is lost: %s", self.loaded.version, self.why_lost)

    def _note_restart(self) -> None:
        if self.loaded is None or self._restarted is None:
            return
        if self.state != "serving":
            log.warning(
                "restart %d of %s failed: %s", self.restarts, self.loaded.version, self._error
            )
            return
        self._restarted["seconds"] = time.time() - self._restarted["time"]
        log.warning(
            "restart %d: a replica serves %s again after %.1f s",
            *(self.restarts, self.loaded.version, self._restarted["seconds"]),
        )

    async def _replace(
        self, old: LoadedVersion | None, new: LoadedVersion, in_place: bool, go_back: bool
    ) -> ProbeReport:
        reload, start = self._reload, self._start_fresh
        tries = [reload, reload, start] if in_place else [start, start]
        failures, stuck = [], False
        for attempt in tries:
            if stuck and attempt == reload:
                continue
            if attempt == start and self._answering and old is not None and not stuck:
                await self._drain_under_old(old, new)
            try:
                return self._accept(new, await attempt(new))
            except (CrayError, OSError) as error:
                failures.append(str(error))
                stuck = isinstance(error, CrayError) and error.code == STUCK
        why = (
            f"{new.version} could not be proven in {len(failures)} tries: "
            f"{'. Then: '.join(failures)}"
        )
        if old is None or not go_back:
            await self._take_out_of_service(new, why)
            raise SwapError(f"{why}. The replica is left out")
        await self._restore(old)
        after = "serves on" if self.state == "serving" else "is being brought back"
        raise SwapError(f"{why}. {old.version} {after}")

    async def _drain_under_old(self, old: LoadedVersion, new: LoadedVersion) -> None:
        """Load the old weights again until kept requests end; a fresh start would lose them."""
        try:
            report = await self._reload(old)
        except (CrayError, OSError) as error:
            log.error("%d requests are lost with %s: %s", self._answering, old.version, error)
            return
        self._accept(old, report)
        self._set_state("swapping")
        await self._drain("serving", new)

    async def _restore(self, loaded: LoadedVersion) -> None:
        """Serve a version again from a fresh process; mark the slot lost if that fails."""
        failed_state: State = "out" if self.state == "out" else "down"
        self._set_state("starting")
        try:
            self._accept(loaded, await self._start_fresh(loaded))
        except (CrayError, OSError) as error:
            await self._engine_host.stop()
            self._mark_lost(str(error), failed_state)

    async def _take_out_of_service(self, new: LoadedVersion, why: str) -> None:
        self._adapters.clear()
        await self._engine_host.stop()
        self.loaded, self.report = new, None
        log.error("a replica is left out: %s", why)
        self._mark_lost(why, "out")

    def _mark_lost(self, why: str, state: State = "down") -> None:
        self._error = why
        self._lost.set()
        self._set_state(state)

    async def _wait_while_lost(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when a swap has begun to repair the slot."""
        with suppress(TimeoutError):
            await self._notifier.wait_until(lambda: self.state not in ("down", "out"), seconds)

    async def _wait_until_lost(self) -> None:
        """Return when the process has died, or when the slot was marked lost."""
        while True:
            moved = asyncio.create_task(self._moved.wait())
            waits = {
                asyncio.create_task(self._engine_host.wait_until_dead()),
                asyncio.create_task(self._lost.wait()),
                moved,
            }
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
            if done != {moved}:
                return

    async def _reload(self, new: LoadedVersion) -> ProbeReport:
        """Load new weights in place of the old ones, and prove them."""
        await self._refuse()
        keep = self._answering > 0
        await self._adapters.unload()
        seconds = await self._engine_host.engine.load(new.checkpoint, new.version, keep=keep)
        report = await self._prove_and_resume(new, seconds)
        return report.model_copy(update={"load_note": self._engine_host.load_note})

    async def _start_fresh(self, new: LoadedVersion) -> ProbeReport:
        """Start a fresh process on the new weights, and prove them."""
        started = time.monotonic()
        self._adapters.clear()
        await self._engine_host.start(new.checkpoint, new.version)
        return await self._prove_and_resume(new, {"start": time.monotonic() - started})

    async def _prove_and_resume(self, new: LoadedVersion, seconds: dict[str, float]) -> ProbeReport:
        report = await self._prove_on(self._engine_host.engine, new, seconds)
        await self._adapters.restore(new.beside, report)
        return report

    async def _prove_on(
        self, engine: Engine, new: LoadedVersion, seconds: dict[str, float]
    ) -> ProbeReport:
        limits, before = self._probe_limits, self.report
        report = await prove(engine, new.version, list(new.probe), limits, before)
        started = time.monotonic()
        await engine.resume()
        await engine.admit(new.version)
        seconds = seconds | report.seconds | {"resume": time.monotonic() - started}
        return report.model_copy(update={"seconds": seconds})

    def _accept(self, loaded: LoadedVersion, report: ProbeReport) -> ProbeReport:
        self.loaded = replace(loaded, beside=self._adapters.loaded)
        self.report, self._error = report, None
        self._lost.clear()
        self._set_state("serving")
        return report

    async def _drain(
        self,
        before: State,
        new: LoadedVersion,
        kept_version: str | None = None,
        failing: str = "",
    ) -> None:
        """Wait for the requests in flight to end, except those that `kept_version` answers.

        From now on the engine begins no others, from whichever gateway. Raises PoolBusy, with the
        slot in its state from `before`.
        """
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._refuse()
                await self._notifier.wait_until(
                    lambda: self._is_drained(new, kept_version), self._drain_timeout
                )
                while await self._refuse(kept_version):
                    self._notifier.abort_if_rollback_waits(new.version)
                    await asyncio.sleep(_OTHERS_LOOK)
        except Overtaken:
            await self._serve_on(before)
            raise
        except TimeoutError:
            await self._serve_on(before)
            raise PoolBusy(
                f"{self._answering} requests were still running after "
                f"{self._drain_timeout:g} s; "
                f"{failing or new.version + ' was not loaded'}"
            ) from None

    def _is_drained(self, new: LoadedVersion, kept_version: str | None) -> bool:
        kept = self.requests.count_for(kept_version) if kept_version else 0
        drained = self.in_flight == kept
        if not drained:
            self._notifier.abort_if_rollback_waits(new.version)
        return drained

    @property
    def _answering(self) -> int:
        """Requests that the engine answers, of all gateways, as far as they are known here."""
        return max(self.in_flight, self._under_way)

    async def _refuse(self, kept_version: str | None = None) -> int:
        """Let the engine begin no more answers; return how many `kept_version` does not give."""
        try:
            under_way = await self._engine_host.engine.refuse()
        except EngineError:  # it is gone, or answers nobody
            under_way = {}
        self._under_way = sum(under_way.values())
        return self._under_way - under_way.get(kept_version or "", 0)

    async def _serve_on(self, state: State) -> None:
        """Take a state from before a change that did not come about."""
        if state == "serving" and self.loaded is not None:
            try:
                for version in (self.loaded.version, *self._adapters.versions):
                    await self._engine_host.engine.admit(version)
            except EngineError as error:
                self._mark_lost(f"it does not serve on: {error}")
                return
        self._set_state(state)

    def _set_state(self, state: State) -> None:
        self.state = state
        self._notifier.notify()
