"""The gate: which of a loop's model calls may go on now, by the version they are meant for.

A replica holds one version. Where there is one replica, a candidate that is evaluated takes its
place, and the rollouts of other generations are held back here: no new call begins, those in flight
are drained by the pool, and each run goes on later with the version that it began with. With
several replicas, `stage` takes a spare one and the others serve on. Made by loop.py; runs reach
it through `Passing`, the engine that rollouts.py gives to the agent.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from cray_agents.errors import EngineUnavailable
from cray_agents.platform import Platform
from cray_agents.ports import ChatEngine
from cray_agents.records import ModelVersion, ProbeReport

BUSY_TURNS = 5  # a version in use stays for so many times the seconds that a change takes
LEAST_TURN = 0.2  # seconds


class Gate:
    """Knows what the replicas hold, and changes it when calls for another version wait."""

    def __init__(self, platform: Platform) -> None:
        self.staying = ""  # the promoted version, which a spare replica is never taken from
        self._platform = platform
        self.looked = False  # whether it has seen what the replicas hold
        self._held: set[str] = set()
        self._replicas = 1
        self._open = True
        self._staging = False
        self._only: str | None = None
        self._in_use = Counter[str]()
        self._since = 0.0  # when the last change was done
        self._change = 0.0  # seconds that it took
        self._changed = asyncio.Event()
        self._work: asyncio.Task[ProbeReport] | None = None

    async def stage(self, version: ModelVersion) -> ProbeReport:
        """Load and prove a version. Raises SwapError; the old one then serves."""
        while not self._open:
            await self._changed.wait()
        self._open = False
        self._work = asyncio.create_task(self._load(version))
        return await asyncio.shield(self._work)  # who waits may be cancelled, the change goes on

    async def promote(
        self, version: ModelVersion, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> None:
        """Make the bare name stand for a version, on every replica. Raises SwapError."""
        async with self._closed():
            await self._platform.promote(version, who=who, reason=reason, numbers=numbers)

    @asynccontextmanager
    async def only(self, version: ModelVersion) -> AsyncIterator[ProbeReport]:
        """Stage a version; until the end it is not displaced. Raises SwapError."""
        self._only = version.id
        try:
            yield await self.stage(version)
        finally:
            self._only = None
            self._tell()

    async def look(self) -> None:
        """Find out what the replicas hold."""
        replicas = await self._platform.pool()
        self.looked = True
        self._replicas = len(replicas)
        serving = [replica for replica in replicas if replica["state"] == "serving"]
        self._held = {version for replica in serving for version in replica["versions"]}

    @asynccontextmanager
    async def passing(self, version: ModelVersion) -> AsyncIterator[None]:
        """Around a model call: waits until a replica holds the version. Raises SwapError."""
        while not self._passes(version.id):
            if self._may_change(version.id):
                await self.stage(version)
                continue
            try:
                async with asyncio.timeout(self._turn_left() if self._open else None):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the turn of the other version is over
        self._in_use[version.id] += 1
        try:
            yield
        finally:
            self._in_use[version.id] -= 1
            if not self._in_use[version.id]:
                self._tell()

    def _passes(self, version: str) -> bool:
        if version not in self._held:
            return False
        if not self._open:
            return self._replicas > 1 and self._staging and version == self.staying
        return self._only in (None, version) or self._replicas > 1 or len(self._held) > 1

    def _may_change(self, version: str) -> bool:
        if not self._open or version in self._held or self._only not in (None, version):
            return False
        return self._turn_left() <= 0

    def _turn_left(self) -> float:
        """Seconds for which what is held may not be displaced yet: longer while it is in use."""
        busy = any(self._in_use[version] for version in self._held)
        turn = max(LEAST_TURN, BUSY_TURNS * self._change) if busy else self._change
        return self._since + turn - time.monotonic()

    async def _load(self, version: ModelVersion) -> ProbeReport:
        async with self._closed():
            self._staging = True
            try:
                return await self._platform.stage(version)
            finally:
                self._staging = False

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Hold calls back while the replicas change."""
        self._open, begun = False, time.monotonic()
        try:
            yield
        finally:
            try:
                await self.look()
            finally:
                self._since = time.monotonic()
                self._change = self._since - begun
                self._open = True
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Passing:
    """A ports.ChatEngine whose calls go through a gate, all with one version."""

    def __init__(self, engine: ChatEngine, gate: Gate, version: ModelVersion) -> None:
        self._engine, self._gate, self._version = engine, gate, version
        self._held = 0.0
        self._waiting: float | None = None

    @property
    def held(self) -> float:
        """Seconds that its calls were kept waiting, to this moment."""
        return self._held + (time.monotonic() - self._waiting if self._waiting else 0.0)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer when the version is there. Raises EngineError and its kinds, SwapError."""
        try:
            async with self._pass():
                return await self._engine.chat(request)
        except EngineUnavailable:
            await self._gate.look()  # somebody else may have changed what is served
            async with self._pass():
                return await self._engine.chat(request)

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The same as chunks."""
        async with self._pass():
            chunks: Any = self._engine.stream(request)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    @asynccontextmanager
    async def _pass(self) -> AsyncIterator[None]:
        self._waiting = time.monotonic()
        try:
            async with self._gate.passing(self._version):
                self._stop_waiting()
                yield
        finally:
            self._stop_waiting()  # one that was cut off at the gate

    def _stop_waiting(self) -> None:
        self._held, self._waiting = self.held, None
