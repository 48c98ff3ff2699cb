"""Adapters: the versions that a replica serves beside its weights, each one loaded and proven.

A version that a LoRA job made is an adapter over its parent's weights, and the two merged. seat.py
loads the adapter where the replica holds the parent: requests in flight go on, nobody waits, and to
promote it or to roll back changes no more than the name that requests are given. Elsewhere the
merged weights are loaded, as of any version. Read next: proof.py; vllm_engine.py, what a name is.
"""

import logging
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

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
from cray_agents.runtime.pool.engine_host import EngineHost
from cray_agents.runtime.pool.golden_probe import (
    LoadedVersion,
    adapter_rank,
    parent_of,
    prove,
    same_shape,
    stored_type,
    weights_of,
)
from cray_agents.runtime.pool.in_flight import News, Occupancy

log = logging.getLogger(__name__)

SLOTS = 4  # the incumbent, what a rollback would want, a canary, a candidate

_TRIES = 2
_ROUNDING = 1e-2  # what merging into 16 bits may change of a logprob


@dataclass(frozen=True)
class Loaded:
    """A version in one process. `name` is what the engine calls it, in this load alone."""

    held: LoadedVersion
    name: str
    engine: Engine
    report: ProbeReport


class Adapters:
    """What the present process of a host serves beside its weights."""

    def __init__(
        self, host: EngineHost, tolerance: float, occupancy: Occupancy, news: News
    ) -> None:
        self._host = host
        self._tolerance = tolerance
        self._occupancy = occupancy
        self._news = news
        self._loaded: dict[str, Loaded] = {}

    def get(self, version: str) -> Loaded | None:
        """A version that is loaded and proven."""
        return self._loaded.get(version)

    @property
    def versions(self) -> list[str]:
        """What is loaded, oldest first."""
        return list(self._loaded)

    @property
    def held(self) -> tuple[LoadedVersion, ...]:
        """The same, with what loads it again."""
        return tuple(loaded.held for loaded in self._loaded.values())

    def fits(self, base: LoadedVersion, new: LoadedVersion) -> bool:
        """Whether `new` is an adapter over these weights that can be loaded. Raises SwapError."""
        try:
            # a probe is of the merged weights: rounded to 16 bits, they are not what 32 bits get
            exact = self._tolerance > _ROUNDING or stored_type(new.checkpoint) == "float32"
            return (
                0 < adapter_rank(new.checkpoint) <= self._host.lora_rank
                and exact
                and parent_of(new.checkpoint) == weights_of(base.checkpoint)
                and same_shape(base.checkpoint, new.checkpoint)
            )
        except (Corrupt, OSError) as error:
            raise SwapError(f"{new.version} was not loaded: {error}") from error

    async def load(self, new: LoadedVersion) -> ProbeReport:
        """Load and prove it, twice if need be. Raises SwapError, EngineUnavailable: it is gone."""
        failures = []
        for _ in range(_TRIES):
            try:
                return await self._load(new)
            except EngineUnavailable:
                raise
            except CrayError as error:
                failures.append(str(error))
        raise SwapError(
            f"the adapter of {new.version} could not be proven in {_TRIES} tries: "
            f"{'. Then: '.join(failures)}"
        )

    async def _load(self, new: LoadedVersion) -> ProbeReport:
        # no name is used twice: the keys of vLLM's prefix cache are made of it
        name = f"{new.version} {weights_of(new.checkpoint)} {secrets.token_hex(8)}"
        started = time.monotonic()
        engine = await self._host.adapt(new.checkpoint, name)
        seconds = time.monotonic() - started
        try:
            report = await prove(engine, new.version, list(new.probe), self._tolerance)
        except CrayError:
            await self._release(name)
            raise
        report = report.model_copy(update={"seconds": {"load": seconds, **report.seconds}})
        self._loaded[new.version] = Loaded(new, name, engine, report)
        self._news.tell()
        return report

    async def make_room(self, new: LoadedVersion, kept: Collection[str], seconds: float) -> None:
        """Let one more be loaded: unload all but `kept`, once no request needs them.

        Raises PoolBusy when there is no room after so long; Overtaken.
        """

        def idle() -> bool:
            self._news.give_way(new.version)
            return bool(self._idle(kept))

        while len(self._loaded) >= SLOTS:
            try:
                await self._news.until(idle, seconds)
            except TimeoutError:
                raise PoolBusy(
                    f"there is no room for the adapter of {new.version}: {', '.join(self._loaded)} "
                    f"are loaded, and each is needed or was answering requests for {seconds:g} s"
                ) from None
            await self.unload(kept)

    async def unload(self, kept: Collection[str] = ()) -> None:
        """Unload all but `kept` that no request is in flight under."""
        for version in self._idle(kept):
            await self._release(self._loaded.pop(version).name)

    def forget(self) -> None:
        """The process is gone, and all that was loaded into it."""
        self._loaded.clear()

    async def _release(self, name: str) -> None:
        try:
            await self._host.release(name)
        except EngineError as error:  # nobody asks for that name any more
            log.error("an adapter could not be unloaded: %s", error)

    def _idle(self, kept: Collection[str]) -> list[str]:
        return [v for v in self._loaded if v not in kept and not self._occupancy.under(v)]

    async def restore(self, wanted: Collection[LoadedVersion]) -> None:
        """Load again what a former process held; what cannot be proven is left out, loudly.

        Raises EngineUnavailable.
        """
        for held in wanted:
            try:
                await self.load(held)
            except SwapError as error:
                log.error("%s is not served any more by this replica: %s", held.version, error)
