"""Replica slot: change the version that one replica serves.

pool.py sends requests to slots that are `serving`, and changes several in turn. Every version that
a slot serves has passed its probe on the process that serves it. Read next: slot_weights.py, the
steps of a change; slot_watch.py, restarts; lora_adapters.py, the versions beside the weights.
"""

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cray_agents.errors import (
    CrayError,
    EngineError,
    EngineUnavailable,
    Overtaken,
    PoolBusy,
    SwapError,
)
from cray_agents.ports import Engine
from cray_agents.records import ProbeReport
from cray_agents.runtime.logprob_limits import LogprobLimits
from cray_agents.runtime.pool.engine.engine_host import EngineHost
from cray_agents.runtime.pool.engine.vllm_engine import ReplicaServer, VllmEngine
from cray_agents.runtime.pool.engine.weight_transfer import STUCK
from cray_agents.runtime.pool.in_flight import ChangeNotifier
from cray_agents.runtime.pool.published_replicas import PublishedReplica
from cray_agents.runtime.pool.slot.golden_probe import LoadedVersion
from cray_agents.runtime.pool.slot.received_weights import ReceivedWeights
from cray_agents.runtime.pool.slot.slot_places import SlotPlaces
from cray_agents.runtime.pool.slot.slot_sleep import SlotSleep
from cray_agents.runtime.pool.slot.slot_watch import SlotWatch
from cray_agents.runtime.pool.slot.slot_weights import SlotWeights

log = logging.getLogger(__name__)

_STARTS = 3  # tries of a first start


class ReplicaSlot(SlotWeights):
    """One replica of the pool: the version it holds, its adapters, its requests.

    `places`, `watch`, `received` and `sleep` change it too: see their modules.
    """

    def __init__(
        self,
        engine_host: EngineHost,
        probe_limits: LogprobLimits,
        drain_timeout: float,
        notifier: ChangeNotifier,
    ) -> None:
        super().__init__(engine_host, probe_limits, drain_timeout, notifier)
        self.places = SlotPlaces(self)
        self.watch = SlotWatch(self, self.places)
        self.received = ReceivedWeights(self)
        self.sleep = SlotSleep(self)

    @property
    def placed(self) -> bool:
        """True if the replica can change its version; else it takes it with its next place."""
        if self.state == "away":
            return False
        # a start under way ends first, and may be on a new place
        return self.changing.locked() or (self.engine_host.placed and self.state != "leaving")

    @property
    def versions(self) -> list[str]:
        """The versions that can answer requests now."""
        if self.loaded is None or self.state != "serving":
            return []
        return [self.loaded.version, *self.adapters.versions]

    @property
    def contents(self) -> str:
        """Contents and state, for an error message."""
        return f"{' and '.join(self.loaded.versions) if self.loaded else 'nothing'} ({self.state})"

    def placed_engine(self, replica: str) -> ReplicaServer:
        """Return the server as it is now, with the version of its weights; `replica` names it."""
        server: VllmEngine | None = None
        with suppress(EngineUnavailable):
            engine = self.engine_host.engine
            server = engine if isinstance(engine, VllmEngine) else None
        return ReplicaServer(replica, self.engine_host.host, self.version or "", server)

    def engine(self, version: str) -> Engine:
        """Return the engine that answers with a version. Raises EngineUnavailable."""
        engine = self.engine_host.engine
        if self.loaded is not None and version == self.loaded.version:
            return engine
        if (adapter := self.adapters.get(version)) is None:
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
        self.selected = version
        return self._proof(version)

    def _proof(self, version: str | None) -> ProbeReport | None:
        adapter = self.adapters.get(version or "")
        return adapter.report if adapter is not None else self.report

    def can_load_as_adapter(self, new: LoadedVersion) -> bool:
        """Tell whether a version can be an adapter beside these weights. Raises SwapError."""
        loaded = self.loaded if self.state == "serving" else None
        return loaded is not None and self.adapters.fits(loaded, new)

    def status(self) -> dict[str, Any]:
        """Return the slot's entry in `/v1/pool`.

        `error` is the last failure of a replica that is not serving. `last_restart` says when and
        why the process was last lost, and the seconds until it served again; it stays afterwards.
        `joules`: that the GPUs of its Slurm job took, where they were measured.
        """
        proof = self._proof(self.version)
        return {
            "version": self.version,
            "versions": self.versions,
            "state": self.state,
            "asleep": self.places.asleep,
            "in_flight": self.in_flight,
            "busy_seconds": self.requests.busy_seconds,
            "restarts": self.watch.restarts,
            "last_restart": self.watch.last_restart,
            "host": self.engine_host.host,
            "job": self.engine_host.job,
            "joules": self.engine_host.joules,
            "pid": self.engine_host.pid,
            "port": self.engine_host.port,
            "probe": proof.model_dump(mode="json") if proof else None,
            "error": self.error or (None if self.placed else self.engine_host.death_reason()),
        }

    async def open(self, loaded: LoadedVersion) -> None:
        """Start for the first time. Raises EngineError, SchedulerError, SetupError, SwapError."""
        self.loaded, self.selected = loaded, loaded.version
        self.set_state("starting" if self.engine_host.placed else "waiting")
        try:
            await self.engine_host.allocate()
        except BaseException:
            self.set_state("down")
            raise
        async with self.changing:
            loaded = self.loaded or loaded  # a swap may have passed while it waited
            self.set_state("starting")
            try:
                self.accept(loaded, await self._start_with_retries(loaded))
            except BaseException:
                self.set_state("down")
                raise

    async def _start_with_retries(self, loaded: LoadedVersion) -> ProbeReport:
        """Start from scratch; retry if the process dies, since it may have been killed.

        A process that dies twice of the same reason is not started again.
        """
        previous = None
        for attempt in range(1, _STARTS + 1):
            try:
                return await self.start_fresh(loaded)
            except EngineUnavailable as error:
                reason = self.engine_host.death_reason()
                why = str(error) if reason in str(error) else reason
                if attempt == _STARTS or (reason and reason == previous):
                    raise EngineUnavailable(f"{loaded.version} cannot be served: {why}") from error
                previous = reason
                log.warning("starting %s again: %s", loaded.version, why)
            except (SwapError, EngineError) as error:
                if not self.engine_host.taken_over:
                    raise
                log.warning("an earlier platform's replica is started afresh: %s", error)
        raise AssertionError("unreachable")

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
        async with self.changing:
            self.notifier.abort_if_rollback_waits(new.version)
            if self.loaded is not None and self.can_load_as_adapter(new):
                return await self._load_adapter(self.loaded, new, protected)
            before, old = self.state, None if self.state == "out" else self.loaded
            runs = before in ("serving", "unproven")
            in_place = runs and old is not None and old.fits(new)
            self.set_state("swapping")
            try:
                # requests under an adapter are never kept: it only fits the old weights
                kept_version = old.version if old is not None and keep and in_place else None
                await self.drain(before, new, kept_version)
                report = await self._replace(old, new, in_place, go_back)
                self.selected = new.version
                return report
            finally:
                if self.state == "swapping":  # cut off: the loaded weights are unknown
                    self.mark_lost("a swap was cut off")

    async def leave_out(self, new: LoadedVersion, why: str) -> None:
        """Answer no requests until this version is proven here; retry with back-off."""
        async with self.changing:
            before = self.state
            self.set_state("swapping")
            try:
                await self.drain(before, new)
            except SwapError as error:
                log.error("a replica could not be left out, it serves on: %s. %s", why, error)
            else:
                await self.take_out_of_service(new, why)

    async def _load_adapter(
        self, base: LoadedVersion, new: LoadedVersion, protected: Collection[str]
    ) -> ProbeReport:
        """Serve an adapter beside the weights."""
        try:
            await self.adapters.make_room(new, protected, self.drain_timeout)
            report = await self.adapters.load(new, self.report)
        except (Overtaken, PoolBusy):
            raise
        except (CrayError, OSError) as error:
            raise SwapError(f"{error}. {', '.join(base.versions)}: served on") from error
        finally:
            self.loaded = replace(base, beside=self.adapters.loaded)
        self.selected = new.version
        return report

    async def add_adapter(self, new: LoadedVersion, protected: Collection[str]) -> ProbeReport:
        """Serve an adapter beside the weights and leave `version` as it is. Raises SwapError."""
        async with self.changing:
            if self.loaded is None or not self.can_load_as_adapter(new):
                raise PoolBusy(f"{new.version} was not loaded: the replica changed meanwhile")
            selected = self.selected
            try:
                return await self._load_adapter(self.loaded, new, protected)
            finally:
                self.selected = selected

    async def shut_down(self) -> None:
        """End the process and clear the slot, unless requests are in flight."""
        async with self.changing:
            if self.in_flight or (self.loaded is not None and await self.refuse()):
                await self.serve_on(self.state)
                return
            self.set_state("down")
            self.adapters.clear()
            await self.engine_host.stop()
            self.loaded, self.report, self.error = None, None, None
            self.lost.clear()

    def missing_resource(self, new: LoadedVersion) -> str:
        """Return "" for a slot in use; else see `EngineHost.missing_resource`."""
        return "" if self.loaded is not None else self.engine_host.missing_resource(new.checkpoint)

    async def unload_idle_adapters(self, protected: Collection[str]) -> None:
        """Unload adapters that are not `protected` and have no requests; skip during a change."""
        if self.changing.locked() or self.loaded is None or self.state != "serving":
            return
        async with self.changing:
            await self.adapters.unload(protected)
            self.loaded = replace(self.loaded, beside=self.adapters.loaded)

    async def _replace(
        self, old: LoadedVersion | None, new: LoadedVersion, in_place: bool, go_back: bool
    ) -> ProbeReport:
        reload, start = self.reload, self.start_fresh
        tries = [reload, reload, start] if in_place else [start, start]
        failures, stuck = [], False
        for attempt in tries:
            if stuck and attempt == reload:
                continue
            if attempt == start and self.answering and old is not None and not stuck:
                await self._drain_under_old(old, new)
            try:
                report = await attempt(new)
            except (CrayError, OSError) as error:
                failures.append(str(error))
                stuck = isinstance(error, CrayError) and error.code == STUCK
            else:
                return self.accept(new, _with_failures(report, failures))
        why = (
            f"{new.version} could not be proven in {len(failures)} tries: "
            f"{'. Then: '.join(failures)}"
        )
        if old is None or not go_back:
            await self.take_out_of_service(new, why)
            raise SwapError(f"{why}. The replica is left out")
        await self.restore(old)
        after = "serves on" if self.state == "serving" else "is being brought back"
        raise SwapError(f"{why}. {old.version} {after}")

    async def _drain_under_old(self, old: LoadedVersion, new: LoadedVersion) -> None:
        """Load the old weights again until kept requests end; a fresh start would lose them."""
        try:
            report = await self.reload(old)
        except (CrayError, OSError) as error:
            log.error("%d requests are lost with %s: %s", self.answering, old.version, error)
            return
        self.accept(old, report)
        self.set_state("swapping")
        await self.drain("serving", new)


def _with_failures(report: ProbeReport, failures: list[str]) -> ProbeReport:
    """Return the proof of a version with the failed tries before it in its note, if any."""
    if not failures:
        return report
    note = f"tries before this one failed: {'. Then: '.join(failures)}"
    log.warning("%s is proven and serves; %s", report.version, note)
    if report.load_note:
        note = f"{report.load_note}; {note}"
    return report.model_copy(update={"load_note": note})
