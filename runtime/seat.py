"""Seat: one replica's place in the pool, and how the version it holds is changed or brought back.

pool.py routes requests to seats that are `serving`, roll.py changes several. Whatever a seat serves
has passed its probe on the very process that serves it.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from cray_agents.errors import CrayError, EngineUnavailable, SwapError
from cray_agents.ports import Engine
from cray_agents.records import ProbeReport
from cray_agents.runtime.held import Held
from cray_agents.runtime.proof import prove

log = logging.getLogger(__name__)

# down: being brought back; out: it could not prove a version that others could
State = Literal["starting", "serving", "swapping", "down", "out"]

_STARTS = 3  # tries of a first start
_BACKOFF = (0.2, 30.0)  # seconds before the first and at most before any restart
_OUT_BACKOFF = (10.0, 600.0)  # ... of a replica that was left out


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
        self.report: ProbeReport | None = None
        self._host = host
        self._tolerance = tolerance
        self._drain_timeout = drain_timeout
        self._news = news
        self._busy, self._busy_since = 0.0, 0.0
        self._error: str | None = None
        self._changing = asyncio.Lock()
        self._lost = asyncio.Event()

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailable while it is down."""
        return self._host.engine

    @property
    def serving(self) -> str | None:
        """The version that it can answer with now."""
        return self.held.version if self.held is not None and self.state == "serving" else None

    @property
    def busy_seconds(self) -> float:
        """Seconds with a request in flight, since the pool was made."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_flight else 0.0)

    def status(self) -> dict[str, Any]:
        """What `/v1/pool` shows; `error` is the last failure of a replica that is not serving."""
        return {
            "version": self.held.version if self.held else None,
            "state": self.state,
            "in_flight": self.in_flight,
            "busy_seconds": self.busy_seconds,
            "restarts": self.restarts,
            "pid": self._host.pid,
            "port": self._host.port,
            "probe": self.report.model_dump(mode="json") if self.report else None,
            "error": self._error,
        }

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """A request is in flight."""
        if not self.in_flight:
            self._busy_since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        finally:
            self._busy, self.in_flight = self._ended()
            if not self.in_flight:
                self._news.tell()

    def _ended(self) -> tuple[float, int]:
        left = self.in_flight - 1
        return self._busy if left else self.busy_seconds, left

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
                return await self._fresh(held)
            except EngineUnavailable as error:
                log.warning("starting %s again: %s", held.version, error)
        return await self._fresh(held)

    async def close(self) -> None:
        """End the replica."""
        self._set("down")
        await self._host.stop()

    async def change(self, new: Held, *, keep: bool = False, go_back: bool = True) -> ProbeReport:
        """Load, prove, serve: in place, once more, then from scratch. Raises SwapError.

        Then it serves what it served before, or, unless it may `go_back`, is left out. Requests in
        flight end first; with `keep` they go on under the new weights, if these fit in place.
        """
        async with self._changing:
            before, old = self.state, None if self.state == "out" else self.held
            in_place = before == "serving" and old is not None and old.fits(new)
            self._set("swapping")
            try:
                if not (keep and in_place):
                    await self._drain(before, new)
                return await self._replace(old, new, in_place, go_back)
            finally:
                if self.state == "swapping":  # cut off: what the replica holds is unknown
                    self._lose("a swap was cut off")

    async def leave_out(self, new: Held, why: str) -> None:
        """Answer no more until this version is proven here, which is tried again with back-off."""
        async with self._changing:
            before = self.state
            self._set("swapping")
            try:
                await self._drain(before, new)
            except SwapError as error:
                log.error("a replica could not be left out, it serves on: %s. %s", why, error)
            else:
                await self._put_out(new, why)

    async def keep(self) -> None:
        """Bring the replica back whenever it is lost or left out; runs until cancelled."""
        while True:
            await self._loss()
            if self.state == "serving":
                self._set("down")
            delay, most = _OUT_BACKOFF if self.state == "out" else _BACKOFF
            while True:
                await self._stays_lost(delay)
                async with self._changing:
                    if self.state == "serving" or self.held is None:
                        break  # a swap has put a fresh process there
                    self.restarts += 1
                    await self._put_back(self.held)
                delay = min(delay * 2, most)

    async def _replace(
        self, old: Held | None, new: Held, in_place: bool, go_back: bool
    ) -> ProbeReport:
        tries = [self._reload, self._reload, self._fresh] if in_place else [self._fresh] * 2
        failures = []
        for attempt in tries:
            if attempt == self._fresh and self.in_flight and old is not None:
                await self._let_end(old, new)
            try:
                return self._accept(new, await attempt(new))
            except (CrayError, OSError) as error:
                failures.append(str(error))
        why = (
            f"{new.version} could not be proven in {len(tries)} tries: {'. Then: '.join(failures)}"
        )
        if old is None or not go_back:
            await self._put_out(new, why)
            raise SwapError(f"{why}. The replica is left out")
        await self._put_back(old)
        after = "serves on" if self.state == "serving" else "is being brought back"
        raise SwapError(f"{why}. {old.version} {after}")

    async def _let_end(self, old: Held, new: Held) -> None:
        """Let requests that were kept end under the old weights: a fresh start would end them."""
        try:
            report = await self._reload(old)
        except (CrayError, OSError) as error:
            log.error("%d requests are lost with %s: %s", self.in_flight, old.version, error)
            return
        self._accept(old, report)
        self._set("swapping")
        await self._drain("serving", new)

    async def _put_back(self, held: Held) -> None:
        """Serve a version again; not, with the reason, if that fails."""
        failed: State = "out" if self.state == "out" else "down"
        self._set("starting")
        try:
            self._accept(held, await self._fresh(held))
        except (CrayError, OSError) as error:
            await self._host.stop()
            self._lose(str(error), failed)

    async def _put_out(self, new: Held, why: str) -> None:
        await self._host.stop()
        self.held, self.report = new, None
        log.error("a replica is left out: %s", why)
        self._lose(why, "out")

    def _lose(self, why: str, state: State = "down") -> None:
        self._error = why
        self._lost.set()
        self._set(state)

    async def _stays_lost(self, seconds: float) -> None:
        """Return after so long, or when a swap has begun to mend it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.state in ("down", "out"):
                    await self._news.wait()

    async def _loss(self) -> None:
        """Return when the process has died, or a change has left it unusable."""
        waits = {asyncio.create_task(self._host.died()), asyncio.create_task(self._lost.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _reload(self, new: Held) -> ProbeReport:
        """New weights in the place of the old ones, proven."""
        keep = self.in_flight > 0
        seconds = await self.engine.load(new.checkpoint, new.version, keep=keep)
        return await self._proven(new, seconds)

    async def _fresh(self, new: Held) -> ProbeReport:
        """A fresh process with the new weights, proven."""
        started = time.monotonic()
        await self._host.start(new.checkpoint, new.version)
        return await self._proven(new, {"start": time.monotonic() - started})

    async def _proven(self, new: Held, seconds: dict[str, float]) -> ProbeReport:
        report = await prove(self.engine, new.version, list(new.probe), self._tolerance)
        if not report.passed:
            raise SwapError(
                f"logprobs on the probe of {new.version} differ by {report.max_logprob_diff:.3g} "
                f"(tolerance {self._tolerance:g}): these are not the trainer's weights"
            )
        started = time.monotonic()
        await self.engine.resume()
        seconds = seconds | report.seconds | {"resume": time.monotonic() - started}
        return report.model_copy(update={"seconds": seconds})

    def _accept(self, held: Held, report: ProbeReport) -> ProbeReport:
        self.held, self.report, self._error = held, report, None
        self._lost.clear()
        self._set("serving")
        return report

    async def _drain(self, before: State, new: Held) -> None:
        """Wait for the requests in flight. Raises SwapError; then all is as it was before."""
        try:
            async with asyncio.timeout(self._drain_timeout):
                while self.in_flight:
                    await self._news.wait()
        except TimeoutError:
            self._set(before)
            raise SwapError(
                f"{self.in_flight} requests were still running after "
                f"{self._drain_timeout:g} s; {new.version} was not loaded"
            ) from None

    def _set(self, state: State) -> None:
        self.state = state
        self._news.tell()
