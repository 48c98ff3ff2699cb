"""Slot weights: load and prove the weights of one slot, and drain its requests before a change.

The state of a slot, and the steps that every change of it is made of. replica_slot.py,
slot_places.py, slot_watch.py, slot_sleep.py and received_weights.py put them together.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

from cray_agents.errors import CrayError, EngineError, Overtaken, PoolBusy
from cray_agents.ports import Engine
from cray_agents.records import ProbeReport
from cray_agents.runtime.logprob_limits import LogprobLimits
from cray_agents.runtime.pool.engine.engine_host import EngineHost
from cray_agents.runtime.pool.in_flight import ChangeNotifier, InFlightRequests
from cray_agents.runtime.pool.published_replicas import State
from cray_agents.runtime.pool.slot.golden_probe import LoadedVersion, prove
from cray_agents.runtime.pool.slot.lora_adapters import Adapters

log = logging.getLogger(__name__)

_OTHERS_LOOK = 0.02  # seconds between two looks if other gateways' requests have ended


class SlotWeights:
    """A slot's state, with the steps of a change.

    `loaded` is the version to serve and `report` the proof of its weights. `error` is the last
    failure. `losses` counts lost processes, and `why_lost` is the last reason. `notifier` fires at
    each change. Whoever changes the slot holds `changing`; `lost` is set until it serves again.
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
        self.losses = 0
        self.why_lost = ""
        self.report: ProbeReport | None = None
        self.error: str | None = None
        self.engine_host = engine_host
        self.probe_limits = probe_limits
        self.drain_timeout = drain_timeout
        self.notifier = notifier
        self.requests = InFlightRequests(notifier)
        self.adapters = Adapters(engine_host, probe_limits, self.requests, notifier)
        self.selected = ""  # the version most recently loaded or selected here
        self.changing = asyncio.Lock()
        self.lost = asyncio.Event()
        self._under_way = 0  # requests in flight, of all gateways, when the engine was last asked

    @property
    def version(self) -> str | None:
        """The version most recently loaded here, if still loaded; else the one of the weights."""
        if self.loaded is None:
            return None
        return self.selected if self.selected in self.loaded.versions else self.loaded.version

    def expect(self, new: LoadedVersion) -> None:
        """Take a version that other replicas have proven, to start with it when there is a place.

        Not for a slot that is `placed`.
        """
        self.loaded, self.selected = new, new.version

    @property
    def in_flight(self) -> int:
        """Requests in flight, whichever version answers them."""
        return self.requests.total

    async def reload(self, new: LoadedVersion) -> ProbeReport:
        """Load new weights in place of the old ones, and prove them."""
        await self.refuse()
        keep = self.answering > 0
        await self.adapters.unload()
        seconds = await self.engine_host.engine.load(new.checkpoint, new.version, keep=keep)
        report = await self.prove_and_resume(new, seconds)
        return report.model_copy(update={"load_note": self.engine_host.load_note})

    async def start_fresh(self, new: LoadedVersion) -> ProbeReport:
        """Start a fresh process on the new weights, and prove them."""
        started = time.monotonic()
        self.adapters.clear()
        await self.engine_host.start(new.checkpoint, new.version)
        return await self.prove_and_resume(new, {"start": time.monotonic() - started})

    async def prove_and_resume(self, new: LoadedVersion, seconds: dict[str, float]) -> ProbeReport:
        """Prove the loaded weights, and load the adapters beside them. Raises SwapError."""
        report = await self.prove_on(self.engine_host.engine, new, seconds)
        await self.adapters.restore(new.beside, report)
        return report

    async def prove_on(
        self, engine: Engine, new: LoadedVersion, seconds: dict[str, float]
    ) -> ProbeReport:
        """Prove a version on an engine, and let it answer. Raises SwapError, EngineError."""
        limits, before = self.probe_limits.widened_to(new.dtype), self.report
        report = await prove(engine, new.version, list(new.probe), limits, before)
        started = time.monotonic()
        await engine.resume()
        await engine.admit(new.version)
        seconds = seconds | report.seconds | {"resume": time.monotonic() - started}
        return report.model_copy(update={"seconds": seconds})

    def accept(self, loaded: LoadedVersion, report: ProbeReport) -> ProbeReport:
        """Serve a version that is proven."""
        self.loaded = replace(loaded, beside=self.adapters.loaded)
        self.report, self.error = report, None
        self.lost.clear()
        self.set_state("serving")
        return report

    async def serve_former(self, loaded: LoadedVersion, *, afresh: bool = False) -> None:
        """Load the files of the version that was served before, and serve it once it is proven."""
        try:
            if not afresh:
                self.accept(loaded, await self.reload(loaded))
                return
        except (CrayError, OSError) as error:
            log.warning("%s is started again: %s", loaded.version, error)
        await self.restore(loaded)

    async def restore(self, loaded: LoadedVersion) -> None:
        """Serve a version again from a fresh process; mark the slot lost if that fails."""
        failed_state: State = "out" if self.state == "out" else "down"
        self.set_state("starting")
        try:
            self.accept(loaded, await self.start_fresh(loaded))
        except (CrayError, OSError) as error:
            await self.engine_host.stop()
            self.mark_lost(str(error), failed_state)

    async def take_out_of_service(self, new: LoadedVersion, why: str) -> None:
        """End the process of a replica that could not prove a version."""
        self.adapters.clear()
        await self.engine_host.stop()
        self.loaded, self.report = new, None
        log.error("a replica is left out: %s", why)
        self.mark_lost(why, "out")

    def mark_lost(self, why: str, state: State = "down") -> None:
        """Let slot_watch.py bring the replica back."""
        self.error = why
        self.lost.set()
        self.set_state(state)

    async def drain(
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
            async with asyncio.timeout(self.drain_timeout):
                await self.refuse()
                await self.notifier.wait_until(
                    lambda: self._is_drained(new, kept_version), self.drain_timeout
                )
                while await self.refuse(kept_version):
                    self.notifier.abort_if_rollback_waits(new.version)
                    await asyncio.sleep(_OTHERS_LOOK)
        except Overtaken:
            await self.serve_on(before)
            raise
        except TimeoutError:
            await self.serve_on(before)
            raise PoolBusy(
                f"{self.answering} requests were still running after "
                f"{self.drain_timeout:g} s; "
                f"{failing or new.version + ' was not loaded'}"
            ) from None

    def _is_drained(self, new: LoadedVersion, kept_version: str | None) -> bool:
        kept = self.requests.count_for(kept_version) if kept_version else 0
        drained = self.in_flight == kept
        if not drained:
            self.notifier.abort_if_rollback_waits(new.version)
        return drained

    @property
    def answering(self) -> int:
        """Requests that the engine answers, of all gateways, as far as they are known here."""
        return max(self.in_flight, self._under_way)

    async def refuse(self, kept_version: str | None = None) -> int:
        """Let the engine begin no more answers; return how many `kept_version` does not give."""
        try:
            under_way = await self.engine_host.engine.refuse()
        except EngineError:  # it is gone, or answers nobody
            under_way = {}
        self._under_way = sum(under_way.values())
        return self._under_way - under_way.get(kept_version or "", 0)

    async def serve_on(self, state: State) -> None:
        """Take a state from before a change that did not come about."""
        if state == "serving" and self.loaded is not None:
            try:
                for version in (self.loaded.version, *self.adapters.versions):
                    await self.engine_host.engine.admit(version)
            except EngineError as error:
                self.mark_lost(f"it does not serve on: {error}")
                return
        self.set_state(state)

    def set_state(self, state: State) -> None:
        """Take a state, and wake whoever waits for a change."""
        self.state = state
        self.notifier.notify()

    def adapters_of(self, host: EngineHost) -> Adapters:
        """Return the adapters of another host, which has none yet."""
        return Adapters(host, self.probe_limits, self.requests, self.notifier)

    def fail(self, since: int, why: str) -> None:
        """Mark a replica lost whose engine is dead or hangs, though its process may live.

        Do nothing while weights change, or if `losses` has passed `since`: then it was restarted.
        """
        if self.losses == since and self.state == "serving" and not self.lost.is_set():
            self.mark_lost(why)

    async def wait_for_loss(self, since: int, seconds: float) -> bool:
        """Tell whether `losses` passes `since`; wait for it up to `seconds`."""
        with suppress(TimeoutError):
            await self.notifier.wait_until(lambda: self.losses != since, seconds)
        return self.losses != since
