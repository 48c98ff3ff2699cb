"""Seat: one replica's place in the pool, and how the version it holds is changed or brought back.

pool.py routes requests to seats that are `serving`. Whatever a seat serves has passed its probe on
the very process that serves it.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from cray_agents.errors import CrayError, EngineUnavailable, SwapError
from cray_agents.ports import Engine
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.proof import prove, same_shape

log = logging.getLogger(__name__)

State = Literal["starting", "serving", "swapping", "down"]

_STARTS = 3  # tries of a first start
_BACKOFF = (0.2, 30.0)  # seconds before the first and at most before any restart


@dataclass(frozen=True)
class Held:
    """A version, where its weights are, and how to prove it."""

    version: str
    checkpoint: Path
    probe: tuple[ProbePrompt, ...]


class Host(Protocol):
    """What keeps an engine alive: `Replica` (a vLLM process) | `Resident` (no process)."""

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailable while it is down."""
        ...

    @property
    def pid(self) -> int | None: ...

    @property
    def port(self) -> int | None: ...

    async def start(self, checkpoint: Path, version: str) -> None:
        """Serve a checkpoint from scratch, whatever ran before. Raises EngineError, SetupError."""
        ...

    async def stop(self) -> None: ...

    async def died(self) -> None:
        """Return when it has ended without having been asked to."""
        ...


class Resident:
    """An engine in this process, such as ScriptedEngine: there is no other that could die."""

    pid: int | None = None
    port: int | None = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def start(self, checkpoint: Path, version: str) -> None:
        """Load the checkpoint. Raises what the engine's `load` raises."""
        await self.engine.load(checkpoint, version)

    async def stop(self) -> None:
        """Nothing is to be ended."""

    async def died(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class News:
    """Wakes all who wait, each time something changed. Not a Condition: telling never waits."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()


class Seat:
    """One replica's place. `in_flight` counts the pool's requests; `news` is told of changes."""

    def __init__(self, host: Host, tolerance: float, drain_timeout: float, news: News) -> None:
        self.held: Held | None = None
        self.state: State = "down"
        self.in_flight = 0
        self.restarts = 0
        self._host = host
        self._tolerance = tolerance
        self._drain_timeout = drain_timeout
        self._news = news
        self._report: ProbeReport | None = None
        self._error: str | None = None
        self._changing = asyncio.Lock()
        self._lost = asyncio.Event()

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailable while it is down."""
        return self._host.engine

    def status(self) -> dict[str, Any]:
        """What `/v1/pool` shows; `error` is the last failure of a replica that is not serving."""
        return {
            "version": self.held.version if self.held else None,
            "state": self.state,
            "in_flight": self.in_flight,
            "restarts": self.restarts,
            "pid": self._host.pid,
            "port": self._host.port,
            "probe": self._report.model_dump(mode="json") if self._report else None,
            "error": self._error,
        }

    async def open(self, held: Held) -> None:
        """Start for the first time. Raises EngineError, SetupError, SwapError."""
        async with self._changing:
            self.held = held
            self._set("starting")
            try:
                self._accept(held, await self._start(held))
            except BaseException:
                self._set("down")
                raise

    async def _start(self, held: Held) -> ProbeReport:
        """Start from scratch, again if the process dies meanwhile: it may have been killed."""
        for _ in range(_STARTS - 1):
            try:
                return await self._install(held, None)
            except EngineUnavailable as error:
                log.warning("starting %s again: %s", held.version, error)
        return await self._install(held, None)

    async def close(self) -> None:
        """End the replica."""
        self._set("down")
        await self._host.stop()

    async def change(self, new: Held) -> ProbeReport:
        """Drain, load, prove, serve. Raises SwapError, and then serves what it served before."""
        async with self._changing:
            before = self.state
            self._set("swapping")
            try:
                await self._drain()
            except TimeoutError:
                self._set(before)
                raise SwapError(
                    f"{self.in_flight} requests were still running after "
                    f"{self._drain_timeout:g} s; {new.version} was not loaded"
                ) from None
            try:
                return await self._replace(self.held, new)
            finally:
                if self.state == "swapping":  # cut off: what the replica holds is unknown
                    self._lose("a swap was cut off")

    async def _replace(self, old: Held | None, new: Held) -> ProbeReport:
        failures = []
        for present in (old, None):  # in the place of the old weights, then from scratch
            try:
                return self._accept(new, await self._install(new, present))
            except (CrayError, OSError) as error:
                failures.append(str(error))
        await self._put_back(old)
        raise SwapError(
            f"{new.version} could not be proven. First: {failures[0]}. "
            f"On a fresh start: {failures[1]}. {old.version if old else 'Nothing'} "
            f"{'serves on' if self.state == 'serving' else 'is being brought back'}"
        )

    async def keep(self) -> None:
        """Bring the replica back whenever it is lost; runs until cancelled."""
        while True:
            await self._loss()
            delay = _BACKOFF[0]
            if self.state == "serving":
                self._set("down")
            while True:
                await asyncio.sleep(delay)
                async with self._changing:
                    if self.state == "serving" or self.held is None:
                        break  # a swap has put a fresh process there
                    self.restarts += 1
                    await self._put_back(self.held)
                delay = min(delay * 2, _BACKOFF[1])

    async def _put_back(self, held: Held | None) -> None:
        """Serve a version that was proven before; down, with the reason, if that fails."""
        if held is None:
            self._set("down")
            return
        self._set("starting")
        try:
            self._accept(held, await self._install(held, None))
        except (CrayError, OSError) as error:
            await self._host.stop()
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self._error = why
        self._lost.set()
        self._set("down")

    async def _loss(self) -> None:
        """Return when the process has died, or a change has left it unusable."""
        waits = {asyncio.create_task(self._host.died()), asyncio.create_task(self._lost.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _install(self, new: Held, present: Held | None) -> ProbeReport:
        """Get the weights there and prove them; in place where `present` allows it."""
        seconds: dict[str, float] = {}
        if present is not None and same_shape(present.checkpoint, new.checkpoint):
            seconds = await self.engine.load(new.checkpoint, new.version)
        else:
            started = asyncio.get_running_loop().time()
            await self._host.start(new.checkpoint, new.version)
            seconds["start"] = asyncio.get_running_loop().time() - started
        report = await prove(self.engine, new.version, list(new.probe), self._tolerance)
        report = report.model_copy(update={"seconds": seconds | report.seconds})
        if not report.passed:
            raise SwapError(
                f"logprobs on the probe of {new.version} differ by {report.max_logprob_diff:.3g} "
                f"(tolerance {self._tolerance:g}): these are not the trainer's weights"
            )
        return report

    def _accept(self, held: Held, report: ProbeReport) -> ProbeReport:
        self.held, self._report, self._error = held, report, None
        self._lost.clear()
        self._set("serving")
        return report

    async def _drain(self) -> None:
        async with asyncio.timeout(self._drain_timeout):
            while self.in_flight:
                await self._news.wait()

    def _set(self, state: State) -> None:
        self.state = state
        self._news.tell()
