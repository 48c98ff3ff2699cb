"""Replica: the version that one replica serves, and every change of it, as one state machine.

pool.py sends requests to replicas that are `serving`, and changes several in turn. Every version
that a replica serves has passed its logprob check (golden_probe.py) on the process that serves it.

    event      from                                       to        because
    wait       down out waiting                           waiting   it has no place to run
    start      down out waiting swapping sleeping         starting  a process starts, or wakes
    serve      starting swapping sleeping                 serving   its version passed its check; in
               serving leaving down out unproven                    the last five: elsewhere
    change     serving unproven out down waiting leaving  swapping  its weights are to be changed
    receive    swapping                                   unproven  it has weights without files
    lose       serving leaving unproven away waiting      down      it is to be brought back
               starting swapping sleeping
    leave out  swapping starting                          out       others proved what it did not
    sleep      serving down out waiting unproven          sleeping  a job trains on its GPU
               leaving away
    leave      serving down                               away      it is not needed
    call back  away                                       waiting   it is needed again
    end        serving                                    leaving   its place is about to be lost
    close      any                                        down      it is ended for good

`change` loads, proves and serves a version. The other events are those of upkeep.py, which brings a
replica back that is lost, finds it places, lets it sleep, and has it take weights without files.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, get_args

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
from cray_agents.runtime.pool.golden_probe import LoadedVersion, prove, with_failures
from cray_agents.runtime.pool.lora_adapters import Adapters
from cray_agents.runtime.pool.place import EngineHost
from cray_agents.runtime.pool.published_replicas import PublishedReplica, State
from cray_agents.runtime.pool.request_router import PoolNotifier, RoutedReplica
from cray_agents.runtime.pool.vllm_engine import ReplicaServer, VllmEngine
from cray_agents.runtime.pool.weight_transfer import STUCK

log = logging.getLogger(__name__)

Event = Literal[
    "wait", "start", "serve", "change", "receive", "lose",
    "leave out", "sleep", "leave", "call back", "end", "close",
]  # fmt: skip

#: The states in which each event may happen, and the state after it.
TRANSITIONS: dict[Event, tuple[str, State]] = {
    "wait": ("down out waiting", "waiting"),
    "start": ("down out waiting swapping sleeping", "starting"),
    "serve": ("starting swapping sleeping serving leaving down out unproven", "serving"),
    "change": ("serving unproven out down waiting leaving", "swapping"),
    "receive": ("swapping", "unproven"),
    "lose": ("serving leaving unproven away waiting starting swapping sleeping", "down"),
    "leave out": ("swapping starting", "out"),
    "sleep": ("serving down out waiting unproven leaving away", "sleeping"),
    "leave": ("serving down", "away"),
    "call back": ("away", "waiting"),
    "end": ("serving", "leaving"),
    "close": (" ".join(get_args(State)), "down"),
}

Start = Callable[[LoadedVersion], Awaitable[ProbeReport]]

_STARTS = 3  # tries of a first start
_POLL_INTERVAL = 0.02  # seconds between two looks if other gateways' requests have ended


class Replica(RoutedReplica):
    """One replica of the pool: its state, the version it holds, its adapters and requests.

    `loaded` is the version to serve and `report` the proof of its weights. `error` is the last
    failure. Whoever changes the replica holds `changing`; `lost` is set until it serves again.
    """

    def __init__(
        self,
        engine_host: EngineHost,
        probe_limits: LogprobLimits,
        drain_timeout: float,
        notifier: PoolNotifier,
    ) -> None:
        super().__init__(notifier)
        self.state: State = "down"
        self.loaded: LoadedVersion | None = None
        self.selected = ""  # the version most recently loaded or selected here
        self.report: ProbeReport | None = None
        self.error: str | None = None
        self.engine_host = engine_host
        self.drain_timeout = drain_timeout
        self.notifier = notifier
        self.changing = asyncio.Lock()
        self.lost = asyncio.Event()
        self._probe_limits = probe_limits
        self._under_way = 0  # requests in flight, of all gateways, when the engine was last asked
        self.sleep_level = 0  # at which its engine sleeps; 0: it does not
        self.restarts = 0
        self.last_restart: dict[str, Any] | None = None
        self.last_start: dict[str, Any] | None = None
        self.adapters = self.adapters_of(engine_host)

    def take(self, event: Event) -> None:
        """Change the state by an event, and wake whoever waits for a change.

        Raises RuntimeError for a transition that TRANSITIONS does not list.
        """
        states, new = TRANSITIONS[event]
        if self.state not in states.split():
            raise RuntimeError(f"a replica that is {self.state!r} cannot take {event!r}")
        self.state = new
        self.notifier.notify()

    def adapters_of(self, host: EngineHost) -> Adapters:
        """Return the adapters of a host that has none yet."""
        return Adapters(host, self._probe_limits, self.requests, self.notifier)

    # ---- what it serves
    @property
    def version(self) -> str | None:
        """The version most recently loaded here, if still loaded; else the one of the weights."""
        if self.loaded is None:
            return None
        return self.selected if self.selected in self.loaded.versions else self.loaded.version

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

    @property
    def placed(self) -> bool:
        """True if the replica can change its version; else it takes it with its next place."""
        if self.state == "away":
            return False
        # a start under way ends first, and may be on a new place
        return self.changing.locked() or (self.engine_host.placed and self.state != "leaving")

    @property
    def asleep(self) -> int:
        """The level at which a replica sleeps that is away; 0: it does not."""
        return self.sleep_level if self.state == "away" else 0

    @property
    def answering(self) -> int:
        """Requests that the engine answers, of all gateways, as far as they are known here."""
        return max(self.in_flight, self._under_way)

    def engine(self, version: str) -> Engine:
        """Return the engine that answers with a version. Raises EngineUnavailable."""
        engine = self.engine_host.engine
        if self.loaded is not None and version == self.loaded.version:
            return engine
        if (adapter := self.adapters.get(version)) is None:
            raise EngineUnavailable(f"{version} is not held any more")
        return adapter.engine

    def server(self, replica: str) -> ReplicaServer:
        """Return the server as it is now, with the version of its weights; `replica` names it."""
        server: VllmEngine | None = None
        with suppress(EngineUnavailable):
            engine = self.engine_host.engine
            server = engine if isinstance(engine, VllmEngine) else None
        return ReplicaServer(replica, self.engine_host.host, self.version or "", server)

    def published(self) -> PublishedReplica:
        """Return the record for other gateways. An engine without an address has no versions."""
        engines = {version: self.engine(version) for version in self.versions}
        servers = {v: engine for v, engine in engines.items() if isinstance(engine, VllmEngine)}
        server = next(iter(servers.values()), None)
        return PublishedReplica(
            url=server.url if server is not None else "",
            secret=server.secret if server is not None else "",
            names={version: engine.model for version, engine in servers.items()},
            expected=self.loaded.versions if self.loaded is not None else [],
            state=self.state,
            losses=self.losses,
            why_lost=self.why_lost,
        )

    def status(self) -> dict[str, Any]:
        """Return the replica's entry in `/v1/pool`.

        `error` is the last failure of a replica that is not serving. `last_restart` says when and
        why the process was last lost, and the seconds until it served again; it stays afterwards.
        `last_start`: the seconds by phase of the last start or awakening, those that were seen.
        `joules`: that the GPUs of its Slurm job took, where they were measured.
        """
        proof, host = self._proof(self.version), self.engine_host
        return {
            "version": self.version,
            "versions": self.versions,
            "state": self.state,
            "asleep": self.asleep,
            "in_flight": self.in_flight,
            "busy_seconds": self.requests.busy_seconds,
            "restarts": self.restarts,
            "last_restart": self.last_restart,
            "last_start": self.last_start,
            "host": host.host,
            "job": host.job,
            "joules": host.joules,
            "pid": host.pid,
            "port": host.port,
            "probe": proof.model_dump(mode="json") if proof else None,
            "error": self.error or (None if self.placed else host.death_reason()),
        }

    def _proof(self, version: str | None) -> ProbeReport | None:
        adapter = self.adapters.get(version or "")
        return adapter.report if adapter is not None else self.report

    def select_version(self, version: str) -> ProbeReport | None:
        """Report a version as this replica's `version`; return its proof, or None if not served."""
        if version not in self.versions:
            return None
        self.selected = version
        return self._proof(version)

    def expect(self, new: LoadedVersion) -> None:
        """Take a version that other replicas have proven, to start with it when there is a place.

        Not for a replica that is `placed`.
        """
        self.loaded, self.selected = new, new.needs or new.version

    def missing_resource(self, new: LoadedVersion) -> str:
        """Return "" for a replica in use; else see `EngineProcess.missing_resource`."""
        return "" if self.loaded is not None else self.engine_host.missing_resource(new.checkpoint)

    # ---- start
    async def open(self, loaded: LoadedVersion) -> None:
        """Start for the first time. Raises EngineError, SchedulerError, SetupError, SwapError."""
        self.expect(await self.adapters.whole(loaded, None))
        if not self.engine_host.placed:
            self.take("wait")
        try:
            await self.engine_host.allocate()
            async with self.changing:
                loaded = self.loaded or loaded  # a swap may have passed while it waited
                self.take("start")
                self.accept(*await self.adapters.start(loaded, self._start_with_retries))
        except BaseException as error:
            if self.state != "down":
                self.mark_lost(str(error))
            raise

    async def _start_with_retries(self, loaded: LoadedVersion) -> ProbeReport:
        """Start from scratch; retry if the process dies, since it may have been killed.

        A process that dies twice of the same reason is not started again.
        """
        previous, attempt = None, 0
        while True:
            attempt += 1
            try:
                return await self.start_fresh(loaded)
            except EngineUnavailable as error:
                reason = self.engine_host.death_reason()
                why = str(error) if reason in str(error) else reason
                if attempt >= _STARTS or (reason and reason == previous):
                    raise EngineUnavailable(f"{loaded.version} cannot be served: {why}") from error
                previous = reason
                log.warning("starting %s again: %s", loaded.version, why)
            except (SwapError, EngineError) as error:
                if attempt >= _STARTS or not self.engine_host.taken_over:
                    raise
                log.warning("an earlier platform's replica is started afresh: %s", error)

    # ---- change
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

        Raises SwapError when all tries failed. The replica then serves its former version again, or
        is left out where `go_back` is False. Raises Overtaken, with nothing changed, if a rollback
        waits before weights are loaded.
        """
        async with self.changing:
            self.notifier.abort_if_rollback_waits(new.version)
            if self.loaded is not None and self.can_load_as_adapter(new):
                try:
                    return await self._load_adapter(self.loaded, new, protected)
                except SwapError as error:
                    if isinstance(error, Overtaken | PoolBusy) or not self.adapters.untried(new):
                        raise
            before, old = self.state, None if self.state == "out" else self.loaded
            whole = await self.adapters.whole(new, old)
            runs = before in ("serving", "unproven")
            in_place = runs and old is not None and old.fits(whole)
            in_place = in_place and whole.lora_rank <= self.engine_host.lora_rank
            self.take("change")
            try:
                # requests under an adapter are never kept: it only fits the old weights
                kept_version = old.version if old is not None and keep and in_place else None
                await self.drain(before, new, kept_version)
                report = await self._replace(old, whole, in_place, go_back)
                self.selected = new.version
                return report
            finally:
                if self.state == "swapping":  # cut off: the loaded weights are unknown
                    self.mark_lost("a swap was cut off")

    async def _replace(
        self, old: LoadedVersion | None, new: LoadedVersion, in_place: bool, go_back: bool
    ) -> ProbeReport:
        reload, start = self.reload, self.start_fresh
        tries = [reload, reload, start] if in_place else [start, start]
        failures, stuck, wanted = [], False, new.needs or new.version
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
                new = await self.adapters.instead(new)
            else:
                self.accept(new, with_failures(report, failures))
                self.adapters.note_proven(new, failures)
                return self._proof(wanted) or report
        why = (
            f"{wanted} failed its logprob check in {len(failures)} tries: "
            f"{'. Then: '.join(failures)}"
        )
        if old is None or not go_back:
            await self._take_out_of_service(new, why)
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
        self.take("change")
        await self.drain("serving", new)

    async def leave_out(self, new: LoadedVersion, why: str) -> None:
        """Answer no requests until this version is proven here; retry with back-off."""
        async with self.changing:
            before = self.state
            self.take("change")
            try:
                await self.drain(before, new)
            except SwapError as error:
                log.error("a replica could not be left out, it serves on: %s. %s", why, error)
            else:
                await self._take_out_of_service(new, why)

    async def _take_out_of_service(self, new: LoadedVersion, why: str) -> None:
        """End the process of a replica that could not prove a version."""
        self.adapters.clear()
        await self.engine_host.stop()
        self.loaded, self.report = new, None
        log.error("a replica is left out: %s", why)
        self.mark_lost(why, "leave out")

    async def shut_down(self) -> None:
        """End the process and clear the replica, unless requests are in flight."""
        async with self.changing:
            if self.in_flight or (self.loaded is not None and await self.refuse()):
                if self.state == "serving":
                    await self.serve_on(self.state)
                return
            self.take("close")
            self.adapters.clear()
            await self.engine_host.stop()
            self.loaded, self.report, self.error = None, None, None
            self.lost.clear()

    # ---- its steps
    async def drain(
        self, before: State, new: LoadedVersion, kept: str | None = None, failing: str = ""
    ) -> None:
        """Wait for the requests in flight to end, except those that the version `kept` answers.

        From now on the engine begins no others, from whichever gateway. Raises PoolBusy or
        Overtaken; a replica that was serving `before` then serves on.
        """
        try:
            async with asyncio.timeout(self.drain_timeout):
                await self.refuse()
                await self.notifier.wait_until(
                    lambda: self._is_drained(new, kept), self.drain_timeout
                )
                while await self.refuse(kept):
                    self.notifier.abort_if_rollback_waits(new.version)
                    await asyncio.sleep(_POLL_INTERVAL)
        except Overtaken:
            await self.serve_on(before)
            raise
        except TimeoutError:
            await self.serve_on(before)
            raise PoolBusy(
                f"{self.answering} requests were still running after {self.drain_timeout:g} s; "
                f"{failing or new.version + ' was not loaded'}"
            ) from None

    def _is_drained(self, new: LoadedVersion, kept: str | None) -> bool:
        drained = self.in_flight == (self.requests.count_for(kept) if kept else 0)
        if not drained:
            self.notifier.abort_if_rollback_waits(new.version)
        return drained

    async def refuse(self, kept: str | None = None) -> int:
        """Let the engine begin no more answers; return how many are not of the version `kept`."""
        try:
            under_way = await self.engine_host.engine.refuse()
        except EngineError:  # it is gone, or answers nobody
            under_way = {}
        self._under_way = sum(under_way.values())
        return self._under_way - under_way.get(kept or "", 0)

    async def serve_on(self, before: State) -> None:
        """Serve on after a change that did not come about; one that did not serve is lost."""
        if before != "serving" or self.loaded is None:
            self.mark_lost(self.error or "its change was given up")
            return
        try:
            for version in (self.loaded.version, *self.adapters.versions):
                await self.engine_host.engine.admit(version)
        except EngineError as error:
            self.mark_lost(f"it does not serve on: {error}")
        else:
            self.take("serve")

    async def reload(self, new: LoadedVersion) -> ProbeReport:
        """Load new weights in place of the old ones, and prove them."""
        await self.refuse()
        keep = self.answering > 0
        await self.adapters.unload()
        engine = self.engine_host.engine
        seconds = await engine.load(new.checkpoint, new.version, keep=keep)
        report = await self.prove_and_resume(new, seconds)
        return report.model_copy(update={"load_note": engine.load_note})

    async def start_fresh(self, new: LoadedVersion) -> ProbeReport:
        """Start a fresh process on the new weights, and prove them."""
        started = time.monotonic()
        self.adapters.clear()
        self.engine_host.lora_rank = max(new.lora_rank, self.engine_host.lora_rank)
        await self.engine_host.start(new.checkpoint, new.version)
        report = await self.prove_and_resume(new, {"start": time.monotonic() - started})
        if not self.engine_host.taken_over:
            self.note_start(self.engine_host.phases, report)
        return report

    def note_start(self, phases: Mapping[Any, float], report: ProbeReport) -> None:
        """Keep the seconds of a start by phase; the check of the weights samples a first token."""
        seconds = {**phases, "first_token": report.seconds["prove"]}
        self.last_start = {"time": time.time(), "seconds": seconds}

    async def prove_and_resume(self, new: LoadedVersion, seconds: dict[str, float]) -> ProbeReport:
        """Prove the loaded weights, and load the adapters beside them. Raises SwapError."""
        report = await self.prove_on(self.engine_host.engine, new, seconds)
        await self.adapters.restore(new.beside, report, new.needs)
        return report

    async def prove_on(
        self, engine: Engine, new: LoadedVersion, seconds: dict[str, float]
    ) -> ProbeReport:
        """Prove a version on an engine, and let it answer. Raises SwapError, EngineError."""
        limits, before = self._probe_limits.widened_to(new.dtype), self.report
        report = await prove(engine, new.version, list(new.probe), limits, before)
        started = time.monotonic()
        await engine.resume()
        await engine.admit(new.version)
        seconds = seconds | report.seconds | {"resume": time.monotonic() - started}
        return report.model_copy(update={"seconds": seconds})

    def accept(self, loaded: LoadedVersion, report: ProbeReport) -> ProbeReport:
        """Serve a version that is proven."""
        self.loaded = replace(loaded, beside=self.adapters.loaded, needs="")
        self.report, self.error = report, None
        self.lost.clear()
        self.take("serve")
        return report

    # ---- adapters
    def can_load_as_adapter(self, new: LoadedVersion) -> bool:
        """Tell whether a version can be an adapter beside these weights. Raises SwapError."""
        loaded = self.loaded if self.state == "serving" else None
        return loaded is not None and self.adapters.fits(loaded, new)

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

    async def unload_idle_adapters(self, protected: Collection[str]) -> None:
        """Unload adapters that are not `protected` and have no requests; skip during a change."""
        if self.changing.locked() or self.loaded is None or self.state != "serving":
            return
        async with self.changing:
            await self.adapters.unload(protected)
            self.loaded = replace(self.loaded, beside=self.adapters.loaded)

    # ---- loss
    def mark_lost(self, why: str, event: Literal["lose", "leave out"] = "lose") -> None:
        """Let upkeep.py bring the replica back."""
        self.error = why
        self.lost.set()
        self.take(event)

    def fail(self, since: int, why: str) -> None:
        """Mark a replica lost whose engine is dead or hangs, though its process may live.

        Do nothing while weights change, or if `losses` has passed `since`: then it was restarted.
        """
        if self.losses == since and self.state == "serving" and not self.lost.is_set():
            self.mark_lost(why)

    async def restore(self, loaded: LoadedVersion, start: Start | None = None) -> None:
        """Serve a version from a fresh process; mark the replica lost if that fails."""
        failed: Literal["lose", "leave out"] = "leave out" if self.state == "out" else "lose"
        self.take("start")
        try:
            self.accept(loaded, await (start or self.start_fresh)(loaded))
        except (CrayError, OSError) as error:
            await self.engine_host.stop()
            self.mark_lost(str(error), failed)
        except BaseException as error:
            self.mark_lost(f"its start was cut off: {error!r}", failed)
            raise

    async def serve_former(self, loaded: LoadedVersion, *, afresh: bool = False) -> None:
        """Load the files of the version that was served before, and serve it once it is proven."""
        try:
            if not afresh:
                self.accept(loaded, await self.reload(loaded))
                return
        except (CrayError, OSError) as error:
            log.warning("%s is started again: %s", loaded.version, error)
        await self.restore(loaded)
