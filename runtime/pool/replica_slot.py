"""Seat: one replica's place in the pool, and how the version it holds is changed or brought back.

pool.py routes requests to seats that are `serving`, roll.py changes several. Whatever a seat serves
has passed its probe on the very process that serves it. Read next: adapters.py, what it serves
beside its weights.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

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
from cray_agents.runtime.pool.engine_host import EngineHost
from cray_agents.runtime.pool.golden_probe import LoadedVersion, prove
from cray_agents.runtime.pool.in_flight import News, Occupancy
from cray_agents.runtime.pool.lora_adapters import Adapters

log = logging.getLogger(__name__)

# down: being brought back; out: it could not prove a version that others could
State = Literal["starting", "serving", "swapping", "down", "out"]

_STARTS = 3  # tries of a first start
_LOOKS = 4  # at whether it lives, in the seconds that it may be silent
_BACKOFF = (0.2, 30.0)  # seconds before the first and at most before any restart
_OUT_BACKOFF = (10.0, 600.0)  # ... of a replica that was left out


class ReplicaSlot:
    """One replica's place: it `held` weights, and adapters beside them; `news` is told of changes.

    `report` is the proof of the weights. `losses`: how often its process was lost; `why_lost`: the
    last time.
    """

    def __init__(
        self, host: EngineHost, tolerance: float, drain_timeout: float, news: News
    ) -> None:
        self.held: LoadedVersion | None = None
        self.state: State = "down"
        self.restarts = 0
        self.losses = 0
        self.why_lost = ""
        self.report: ProbeReport | None = None
        self._host = host
        self._tolerance = tolerance
        self._drain_timeout = drain_timeout
        self._news = news
        self.occupancy = Occupancy(news)
        self._adapters = Adapters(host, tolerance, self.occupancy, news)
        self._given = ""  # the version that it was last changed to
        self._error: str | None = None
        self._restarted: dict[str, Any] | None = None
        self._changing = asyncio.Lock()
        self._lost = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """The pool's requests, under whatever version."""
        return self.occupancy.total

    @property
    def version(self) -> str | None:
        """The version that it was last changed to, of those that it holds."""
        if self.held is None:
            return None
        return self._given if self._given in self.held.versions else self.held.version

    @property
    def versions(self) -> list[str]:
        """The versions that it can answer with now."""
        if self.held is None or self.state != "serving":
            return []
        return [self.held.version, *self._adapters.versions]

    def engine(self, version: str) -> Engine:
        """What answers with a version. Raises EngineUnavailable while it is down."""
        engine = self._host.engine
        if self.held is not None and version == self.held.version:
            return engine
        if (loaded := self._adapters.get(version)) is None:
            raise EngineUnavailable(f"{version} is not held any more")
        return loaded.engine

    def turn_to(self, version: str) -> ProbeReport | None:
        """Let a version that it serves stand for it; returns its proof. None: it does not serve."""
        if version not in self.versions:
            return None
        self._given = version
        return self._proof(version)

    def _proof(self, version: str | None) -> ProbeReport | None:
        loaded = self._adapters.get(version or "")
        return loaded.report if loaded is not None else self.report

    def adapts(self, new: LoadedVersion) -> bool:
        """Whether it can load a version as an adapter beside what it serves. Raises SwapError."""
        held = self.held if self.state == "serving" else None
        return held is not None and self._adapters.fits(held, new)

    def status(self) -> dict[str, Any]:
        """What `/v1/pool` shows; `error` is the last failure of a replica that is not serving.

        `last_restart` stays: when its process was last lost, why, and the seconds until it served.
        """
        proof = self._proof(self.version)
        return {
            "version": self.version,
            "versions": self.versions,
            "state": self.state,
            "in_flight": self.in_flight,
            "busy_seconds": self.occupancy.busy_seconds,
            "restarts": self.restarts,
            "last_restart": self._restarted,
            "pid": self._host.pid,
            "port": self._host.port,
            "probe": proof.model_dump(mode="json") if proof else None,
            "error": self._error,
        }

    async def open(self, held: LoadedVersion) -> None:
        """Start for the first time. Raises EngineError, SetupError, SwapError."""
        async with self._changing:
            self.held, self._given = held, held.version
            self._set("starting")
            try:
                self._accept(held, await self._start(held))
            except BaseException:
                self._set("down")
                raise

    async def _start(self, held: LoadedVersion) -> ProbeReport:
        """Start from scratch, again if the process dies meanwhile: it may have been killed.

        Not once more if it dies of the same twice.
        """
        before = None
        for attempt in range(1, _STARTS + 1):
            try:
                return await self._fresh(held)
            except EngineUnavailable as error:
                died_of = self._host.trouble()
                why = str(error) if died_of in str(error) else died_of
                if attempt == _STARTS or (died_of and died_of == before):
                    raise EngineUnavailable(f"{held.version} cannot be served: {why}") from error
                before = died_of
                log.warning("starting %s again: %s", held.version, why)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the replica."""
        self._set("down")
        await self._host.stop()

    async def change(
        self,
        new: LoadedVersion,
        *,
        keep: bool = False,
        go_back: bool = True,
        needed: Collection[str] = (),
    ) -> ProbeReport:
        """Load, prove, serve: in place, once more, then from scratch. Raises SwapError.

        Then it serves what it served before, or, unless it may `go_back`, is left out. Requests in
        flight end first; with `keep` they go on under the new weights, if these fit in place.
        An adapter over what it holds disturbs none: adapters that are not `needed` make room.
        Raises Overtaken, with nothing changed, if a rollback waits before weights are loaded.
        """
        async with self._changing:
            self._news.give_way(new.version)
            if self.held is not None and self.adapts(new):
                return await self._add(self.held, new, needed)
            before, old = self.state, None if self.state == "out" else self.held
            in_place = before == "serving" and old is not None and old.fits(new)
            self._set("swapping")
            try:
                # under an adapter none goes on: it is nothing without the weights it was made for
                kept = old.version if old is not None and keep and in_place else None
                await self._drain(before, new, kept)
                report = await self._replace(old, new, in_place, go_back)
                self._given = new.version
                return report
            finally:
                if self.state == "swapping":  # cut off: what the replica holds is unknown
                    self._lose("a swap was cut off")

    async def leave_out(self, new: LoadedVersion, why: str) -> None:
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

    async def _add(
        self, base: LoadedVersion, new: LoadedVersion, needed: Collection[str]
    ) -> ProbeReport:
        """Serve an adapter beside the weights."""
        try:
            await self._adapters.make_room(new, needed, self._drain_timeout)
            report = await self._adapters.load(new)
        except (Overtaken, PoolBusy):
            raise
        except (CrayError, OSError) as error:
            raise SwapError(f"{error}. {', '.join(base.versions)}: served on") from error
        finally:
            self.held = replace(base, beside=self._adapters.held)
        self._given = new.version
        return report

    async def add(self, new: LoadedVersion, needed: Collection[str]) -> ProbeReport:
        """Serve an adapter beside the weights, for who asks for it; it stands for the replica no
        more than before. Raises SwapError.
        """
        async with self._changing:
            if self.held is None or not self.adapts(new):
                raise PoolBusy(f"{new.version} was not loaded: the replica changed meanwhile")
            given = self._given
            try:
                return await self._add(self.held, new, needed)
            finally:
                self._given = given

    async def cool(self) -> None:
        """End its process and forget what it held, unless it answers somebody."""
        async with self._changing:
            if self.in_flight:
                return
            self._set("down")
            self._adapters.forget()
            await self._host.stop()
            self.held, self.report, self._error = None, None, None
            self._lost.clear()

    def lacks(self, new: LoadedVersion) -> str:
        """See `Host.lacks`."""
        return "" if self.held is not None else self._host.lacks(new.checkpoint)

    async def tidy(self, needed: Collection[str]) -> None:
        """Unload the adapters that are not `needed` and answer nobody; not during a change."""
        if self._changing.locked() or self.held is None or self.state != "serving":
            return
        async with self._changing:
            await self._adapters.unload(needed)
            self.held = replace(self.held, beside=self._adapters.held)

    async def keep(self) -> None:
        """Bring the replica back whenever it is lost or left out; runs until cancelled."""
        while True:
            await self._loss()
            self._note_loss()
            delay, most = _OUT_BACKOFF if self.state == "out" else _BACKOFF
            while True:
                await self._stays_lost(delay)
                async with self._changing:
                    if self.state == "serving" or self.held is None:
                        break  # a swap has put a fresh process there
                    self.restarts += 1
                    await self._put_back(self.held)
                    self._note_restart()
                delay = min(delay * 2, most)

    async def watch(self, silence: float) -> None:
        """Give the replica up when it has said nothing for so many seconds; runs until cancelled.

        It is asked whether or not anybody else asks it something, only while it is to serve; and
        several times, lest a moment in which this very process stood still counts against it.
        """
        silent, pause = 0, silence / _LOOKS
        while True:
            await asyncio.sleep(0 if silent else pause)
            since = self.losses
            if self.state != "serving":
                silent = 0
                await asyncio.sleep(pause)
                continue
            try:
                async with asyncio.timeout(pause):
                    await self._host.answers()
                silent = 0
            except (TimeoutError, EngineTimeout):
                silent += 1
            except EngineError as error:  # of one that has ended, the process tells more
                silent = 0
                if error.status >= 500:
                    self.fail(since, str(error))
            if silent == _LOOKS - 1:
                silent = 0
                self.fail(since, f"it said nothing for {silence:g} s (silence_timeout)")

    def fail(self, since: int, why: str) -> None:
        """Its engine is dead or hangs, though its process may live: bring it back.

        Nothing is done if a process was lost after the first `since`, or while weights change.
        """
        if self.losses == since and self.state == "serving" and not self._lost.is_set():
            self._lose(why)

    async def lost(self, since: int, seconds: float) -> bool:
        """Whether a process is lost after the first `since`; waits so long for it."""
        with suppress(TimeoutError):
            await self._news.until(lambda: self.losses != since, seconds)
        return self.losses != since

    def _note_loss(self) -> None:
        trouble = self._host.trouble()
        said = [self._error] if self._lost.is_set() and self._error else []
        if trouble and trouble not in str(self._error):
            said.append(trouble)
        self.why_lost = ": ".join(said) or "its process ended"
        self.losses += 1
        self._restarted = {"time": time.time(), "why": self.why_lost, "seconds": None}
        if self.state == "serving":
            self._error = self.why_lost
            self.state = "down"
        self._news.tell()
        if self.held is not None and self.state != "out":
            log.warning("the replica of %s is lost: %s", self.held.version, self.why_lost)

    def _note_restart(self) -> None:
        if self.held is None or self._restarted is None:
            return
        if self.state != "serving":
            log.warning(
                "restart %d of %s failed: %s", self.restarts, self.held.version, self._error
            )
            return
        self._restarted["seconds"] = time.time() - self._restarted["time"]
        log.warning(
            "restart %d: a replica serves %s again after %.1f s",
            *(self.restarts, self.held.version, self._restarted["seconds"]),
        )

    async def _replace(
        self, old: LoadedVersion | None, new: LoadedVersion, in_place: bool, go_back: bool
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

    async def _let_end(self, old: LoadedVersion, new: LoadedVersion) -> None:
        """Let requests that were kept end under the old weights: a fresh start would end them."""
        try:
            report = await self._reload(old)
        except (CrayError, OSError) as error:
            log.error("%d requests are lost with %s: %s", self.in_flight, old.version, error)
            return
        self._accept(old, report)
        self._set("swapping")
        await self._drain("serving", new)

    async def _put_back(self, held: LoadedVersion) -> None:
        """Serve a version again; not, with the reason, if that fails."""
        failed: State = "out" if self.state == "out" else "down"
        self._set("starting")
        try:
            self._accept(held, await self._fresh(held))
        except (CrayError, OSError) as error:
            await self._host.stop()
            self._lose(str(error), failed)

    async def _put_out(self, new: LoadedVersion, why: str) -> None:
        self._adapters.forget()
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
            await self._news.until(lambda: self.state not in ("down", "out"), seconds)

    async def _loss(self) -> None:
        """Return when the process has died, or a change has left it unusable."""
        waits = {asyncio.create_task(self._host.died()), asyncio.create_task(self._lost.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _reload(self, new: LoadedVersion) -> ProbeReport:
        """New weights in the place of the old ones, proven."""
        keep = self.in_flight > 0
        await self._adapters.unload()
        seconds = await self._host.engine.load(new.checkpoint, new.version, keep=keep)
        return await self._proven(new, seconds)

    async def _fresh(self, new: LoadedVersion) -> ProbeReport:
        """A fresh process with the new weights, proven."""
        started = time.monotonic()
        self._adapters.forget()
        await self._host.start(new.checkpoint, new.version)
        return await self._proven(new, {"start": time.monotonic() - started})

    async def _proven(self, new: LoadedVersion, seconds: dict[str, float]) -> ProbeReport:
        engine = self._host.engine
        report = await prove(engine, new.version, list(new.probe), self._tolerance)
        started = time.monotonic()
        await engine.resume()
        seconds = seconds | report.seconds | {"resume": time.monotonic() - started}
        await self._adapters.restore(new.beside)
        return report.model_copy(update={"seconds": seconds})

    def _accept(self, held: LoadedVersion, report: ProbeReport) -> ProbeReport:
        self.held = replace(held, beside=self._adapters.held)
        self.report, self._error = report, None
        self._lost.clear()
        self._set("serving")
        return report

    async def _drain(self, before: State, new: LoadedVersion, kept: str | None = None) -> None:
        """Wait for the requests in flight, but not those under `kept`.

        Raises PoolBusy; then all is as it was before.
        """
        try:
            await self._news.until(lambda: self._drained(new, kept), self._drain_timeout)
        except Overtaken:
            self._set(before)
            raise
        except TimeoutError:
            self._set(before)
            raise PoolBusy(
                f"{self.in_flight} requests were still running after "
                f"{self._drain_timeout:g} s; {new.version} was not loaded"
            ) from None

    def _drained(self, new: LoadedVersion, kept: str | None) -> bool:
        drained = self.in_flight == (self.occupancy.under(kept) if kept else 0)
        if not drained:
            self._news.give_way(new.version)
        return drained

    def _set(self, state: State) -> None:
        self.state = state
        self._news.tell()
