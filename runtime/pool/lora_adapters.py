"""LoRA adapters: the versions beside a replica's weights, each loaded and proven.

A LoRA job writes a version as an adapter over other weights; older ones have the two merged, too.
replica.py loads the adapter where the replica holds the weights below. Requests in flight then
go on, nobody waits, and a promotion or a rollback only changes the name that requests are given.
Elsewhere the base is loaded first, or the merged weights of an older version. Read next:
golden_probe.py; vllm_engine.py, which explains the names.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from cray_agents.errors import (
    Corrupt,
    CrayError,
    EngineError,
    EngineUnavailable,
    PoolBusy,
    SwapError,
)
from cray_agents.ports import Engine
from cray_agents.records import ProbeReport
from cray_agents.runtime.logprob_limits import LogprobLimits
from cray_agents.runtime.pool.golden_probe import (
    MAX_ADAPTERS,
    LoadedVersion,
    adapter_base_of,
    adapter_rank,
    prove,
    same_shape,
    stored_type,
    weights_of,
)
from cray_agents.runtime.pool.place import KILLED, EngineProcess
from cray_agents.runtime.pool.request_router import InFlightRequests, PoolNotifier
from cray_agents.runtime.registry.adapters import MERGED, merge
from cray_agents.runtime.registry.checkpoints import ADAPTER

log = logging.getLogger(__name__)

_TRIES = 2


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in one process. `name` is the engine's name for this one load."""

    loaded: LoadedVersion
    name: str
    engine: Engine
    report: ProbeReport


class Adapters:
    """The adapters that an engine host's present process serves beside its weights."""

    def __init__(
        self,
        engine_host: EngineProcess,
        probe_limits: LogprobLimits,
        requests: InFlightRequests,
        notifier: PoolNotifier,
    ) -> None:
        self._engine_host = engine_host
        self._probe_limits = probe_limits
        self._requests = requests
        self._notifier = notifier
        self._adapters: dict[str, LoadedAdapter] = {}
        self._works: bool | None = None  # the engine serves adapters of its model; None: not tried

    def get(self, version: str) -> LoadedAdapter | None:
        """Return a version's adapter if it is loaded and checked."""
        return self._adapters.get(version)

    @property
    def versions(self) -> list[str]:
        """The loaded versions as `name@N`, oldest first."""
        return list(self._adapters)

    @property
    def loaded(self) -> tuple[LoadedVersion, ...]:
        """The loaded versions as `LoadedVersion`s, which `restore` takes."""
        return tuple(adapter.loaded for adapter in self._adapters.values())

    def fits(self, base: LoadedVersion, new: LoadedVersion) -> bool:
        """Tell whether `new` can be loaded as an adapter over these weights. Raises SwapError."""
        try:
            # a probe of merged weights: in 16 bits these are rounded, the adapter is not
            rounded = new.over is None and stored_type(new.checkpoint) != "float32"
            exact = self._probe_limits.max is None or not rounded
            return (
                0 < adapter_rank(new.checkpoint) <= self._engine_host.lora_rank
                and exact
                and adapter_base_of(new.checkpoint) == weights_of(base.checkpoint)
                and same_shape(base.checkpoint, new.checkpoint)
            )
        except (Corrupt, OSError) as error:
            raise SwapError(f"{new.version} was not loaded: {error}") from error

    async def whole(self, new: LoadedVersion, held: LoadedVersion | None) -> LoadedVersion:
        """Return what to load for a version: of an adapter its base, to load it beside that.

        Where the engine serves none, the two merged. `held`: see `LoadedVersion.with_base`. Raises
        SwapError.
        """
        if self._works is False and new.over is not None:
            return await _merged(new)
        return new.with_base(held)

    async def instead(self, new: LoadedVersion) -> LoadedVersion:
        """Return what to try once `new` has failed: base and adapter merged, or the same again.

        vLLM has models that take no adapters, such as mixtures on CPUs, or not those of all layers.
        Nothing is merged where an adapter was proven before, or the process was killed.
        """
        killed = self._engine_host.death_reason().startswith(KILLED)
        if not new.needs or self._works or killed:
            return new
        try:
            merged = await _merged(next(v for v in new.beside if v.version == new.needs))
        except SwapError as error:
            log.error("%s", error)
            return new
        self._engine_host.lora_rank = 0
        return merged

    def untried(self, new: LoadedVersion) -> bool:
        """Tell whether no adapter was proven here yet, so that `new` may have to be merged."""
        return new.over is not None and self._works is None

    async def start(
        self, new: LoadedVersion, start: Callable[[LoadedVersion], Awaitable[ProbeReport]]
    ) -> tuple[LoadedVersion, ProbeReport]:
        """Start on a version, or on what `instead` says; return that and its proof."""
        try:
            return new, await start(new)
        except (SwapError, EngineError) as error:
            other = await self.instead(new)
            if other is new:
                raise
            report = await start(other)
            self.note_proven(other, [str(error)])
            return other, report

    def note_proven(self, loaded: LoadedVersion, failures: Collection[str]) -> None:
        """Merge adapters from now on, if `loaded` was proven merged after it had failed."""
        if loaded.checkpoint.name == MERGED and self._works is None:
            self._works = False
            log.warning("adapters are merged when they are loaded here: %s", ". ".join(failures))

    async def load(self, new: LoadedVersion, base: ProbeReport | None) -> ProbeReport:
        """Load and prove an adapter, in two tries. `base`: the proof of the weights below it.

        Raises SwapError, and EngineUnavailable where the engine is gone.
        """
        failures = []
        for _ in range(_TRIES):
            try:
                return await self._load(new, base)
            except EngineUnavailable:
                raise
            except CrayError as error:
                failures.append(str(error))
        raise SwapError(
            f"the adapter of {new.version} failed its logprob check in {_TRIES} tries: "
            f"{'. Then: '.join(failures)}"
        )

    async def _load(self, new: LoadedVersion, base: ProbeReport | None) -> ProbeReport:
        # no name is used twice: vLLM's prefix cache is keyed by it
        name = f"{new.version} {weights_of(new.checkpoint)} {secrets.token_hex(8)}"
        started = time.monotonic()
        engine = await self._engine_host.engine.load_adapter(new.checkpoint / ADAPTER, name)
        seconds = time.monotonic() - started
        try:
            limits = self._probe_limits.widened_to(new.dtype)
            report = await prove(engine, new.version, list(new.probe), limits, base)
            await engine.admit(new.version)
        except CrayError:
            await self._unload_adapter(name)
            raise
        report = report.model_copy(update={"seconds": {"load": seconds, **report.seconds}})
        self._adapters[new.version] = LoadedAdapter(new, name, engine, report)
        self._works = True
        self._notifier.notify()
        return report

    async def make_room(self, new: LoadedVersion, kept: Collection[str], seconds: float) -> None:
        """Unload adapters that are idle and not `kept` until one more can be loaded.

        Raises PoolBusy when there is no room after `seconds`; Overtaken where a rollback waits.
        """

        def idle() -> bool:
            self._notifier.abort_if_rollback_waits(new.version)
            return bool(self._idle(kept))

        while len(self._adapters) >= MAX_ADAPTERS:
            try:
                await self._notifier.wait_until(idle, seconds)
            except TimeoutError:
                raise PoolBusy(
                    f"there is no room for the adapter of {new.version}: "
                    f"{', '.join(self._adapters)} are loaded, and each is needed or was answering "
                    f"requests for {seconds:g} s"
                ) from None
            await self.unload(kept)

    async def unload(self, kept: Collection[str] = ()) -> None:
        """Unload all adapters but `kept` and those with a request in flight."""
        for version in self._idle(kept):
            if not await self._is_used_elsewhere(version):
                await self._unload_adapter(self._adapters.pop(version).name)

    async def _is_used_elsewhere(self, version: str) -> bool:
        """Tell whether another gateway's request uses a version; if none does, none will."""
        engine = self._adapters[version].engine
        try:
            used = bool((await engine.refuse(version)).get(version))
            if used:
                await engine.admit(version)
        except EngineError as error:  # a process that is gone answers nobody
            log.warning("%s may still be in use: %s", version, error)
            return False
        return used

    def clear(self) -> None:
        """Drop all entries: the process that held the adapters is gone."""
        self._adapters.clear()

    async def _unload_adapter(self, name: str) -> None:
        try:
            await self._engine_host.engine.unload_adapter(name)
        except EngineError as error:  # harmless: no later request uses that name
            log.error("an adapter could not be unloaded: %s", error)

    def _idle(self, kept: Collection[str]) -> list[str]:
        return [v for v in self._adapters if v not in kept and not self._requests.count_for(v)]

    async def restore(
        self, versions: Collection[LoadedVersion], base: ProbeReport | None, needed: str = ""
    ) -> None:
        """Load the adapters of a former process again. Raises EngineUnavailable.

        An adapter that cannot be proven is left out, and an error is logged. Of the version
        `needed` SwapError is raised.
        """
        for version in versions:
            try:
                await self.load(version, base)
            except SwapError as error:
                if version.version == needed:
                    raise
                log.error("%s is not served any more by this replica: %s", version.version, error)


async def _merged(new: LoadedVersion) -> LoadedVersion:
    """Return an adapter version as whole weights. Raises SwapError."""
    try:
        directory = await asyncio.to_thread(merge, new.checkpoint)
    except (CrayError, OSError) as error:
        raise SwapError(f"{new.version} was not loaded: {error}") from error
    return replace(new, checkpoint=directory, over=None)
