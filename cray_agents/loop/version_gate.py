"""The gate: which of a loop's model calls may go on now, by the version they are meant for.

A replica holds one version. Where there is one replica, a candidate that is evaluated takes its
place, and the rollouts of other iterations are held back here: no new call begins, those in flight
are drained by the pool, and each run goes on later with the version that it began with. With
several replicas, `stage` takes a spare one and the others serve on. Made by components.py; runs
reach it through `GatedEngine`, the engine that rollouts.py gives to the agent.

Such a loop has the platform's only replica to itself: while it tests another version, the promoted
one is not served. The loop holds a lease on the replica, under its name as the `holder`, and renews
it. When the loop ends or dies, the platform loads the promoted version again.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any

from cray_agents.errors import CrayError, EngineUnavailable, PoolBusy
from cray_agents.platform.client import Platform
from cray_agents.ports import ChatEngine
from cray_agents.records import ModelVersion, ProbeReport, Run, RunError, StopReason

log = logging.getLogger(__name__)

BUSY_TURNS = 5  # a version in use stays for so many times the seconds that a change takes
LEAST_TURN = 0.2  # seconds
BUSY_SECONDS = 5.0  # until a pool that could spare no replica is asked again


class VersionGate:
    """Gate in front of the replicas: loads another version when its calls wait."""

    def __init__(
        self,
        platform: Platform,
        on_busy: Callable[[str], None] = lambda why: None,
        holder: str = "loop",
    ) -> None:
        self._holder = holder
        self._renewing: asyncio.Task[None] | None = None
        self.staying = ""  # the promoted version, which a spare replica is never taken from
        self._platform = platform
        self._on_busy = on_busy  # told why a change has to wait
        self.looked = False  # whether it has seen what the replicas hold
        self.lives: list[Any] = []  # of the replicas: another number and pid after each restart
        self._loaded: set[str] = set()
        self._replicas = 1
        self._open = True
        self._staging = False
        self._only: str | None = None
        self._in_use = Counter[str]()
        self._since = 0.0  # when the last change was done
        self._change = 0.0  # seconds that it took
        self._changed = asyncio.Event()
        self._work: asyncio.Task[ProbeReport] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._received = ""  # the job whose weights a replica was asked to receive

    async def stage(self, version: ModelVersion, *, force: bool = True) -> ProbeReport:
        """Load and prove a version; wait while other calls use the replicas.

        Raises SwapError; the old one then serves. Without `force` every promoted version stays
        served: raises Displaces or PoolBusy where no replica can be spared.
        """
        await self._until_open()
        self._open = False
        self._work = asyncio.create_task(self._load(version, force))
        return await asyncio.shield(self._work)  # who waits may be cancelled, the change goes on

    def receive(self, job_id: str, *, rollouts: bool, evaluates: bool) -> None:
        """Let a replica receive a job's weights while it writes its files, if one can be spared.

        `rollouts` go on meanwhile, so that every version stays served. `evaluates`: the incumbent
        may be asked before the candidate, so that the only replica stays. Where none can be spared,
        the weights are loaded later.
        """
        if job_id != self._received:
            self._received = job_id
            in_use = rollouts or self._in_use.total() > 0
            force = not (in_use or (evaluates and self._replicas == 1))
            self._receiving = asyncio.create_task(self._receive(job_id, force))

    async def _receive(self, job_id: str, force: bool) -> None:
        try:
            if await self._platform.receive(job_id, force=force, holder=self._holder):
                self._keep_renewing()
        except CrayError as error:
            log.info("the weights of %s are read from files: %s", job_id, error)

    def _keep_renewing(self) -> None:
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._platform.keep_renewing(self._holder))

    async def stop(self) -> None:
        """Stop renewing the lease on the replica."""
        tasks = [task for task in (self._renewing, self._receiving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._renewing = self._receiving = None

    async def promote(
        self, version: ModelVersion, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> None:
        """Make the bare name stand for a version, on every replica. Raises SwapError."""
        while True:
            try:
                async with self._closed():
                    await self._platform.promote(version, who=who, reason=reason, numbers=numbers)
                return
            except PoolBusy as busy:
                await self._later(busy)

    @asynccontextmanager
    async def only(self, version: ModelVersion) -> AsyncIterator[ProbeReport]:
        """Stage a version that is not displaced inside the block. Raises SwapError."""
        self._only = version.id
        try:
            yield await self.stage(version)
        finally:
            self._only = None
            self._notify()

    async def look(self) -> None:
        """Read from the platform which versions the replicas hold."""
        replicas = await self._platform.pool()
        self.looked = True
        self._replicas = len(replicas)
        self.lives = _lives(replicas)
        serving = [replica for replica in replicas if replica["state"] == "serving"]
        self._loaded = {version for replica in serving for version in replica["versions"]}

    async def outage(self, version: ModelVersion, lives: Sequence[Any]) -> str | None:
        """The reason, if any, why the pool may have delayed a call that passed at `lives`."""
        try:
            replicas = await self._platform.pool()
        except CrayError as error:
            return str(error)
        self.lives = _lives(replicas)
        serving = [n for n, replica in enumerate(replicas) if version.id in replica["versions"]]
        if not serving:
            return f"no replica serves {version.id}"
        if any([self.lives[n]] != lives[n : n + 1] for n in serving):
            return f"a replica that serves {version.id} was restarted"
        return None

    @asynccontextmanager
    async def passing(
        self, version: ModelVersion, waiting: AbstractContextManager[None]
    ) -> AsyncIterator[None]:
        """Wait before a model call until a replica holds the version. Raises SwapError.

        `waiting` is entered for as long as the call waits.
        """
        if not self._passes(version.id):
            with waiting:
                await self._until_it_passes(version)
        self._in_use[version.id] += 1
        try:
            yield
        finally:
            self._in_use[version.id] -= 1
            if not self._in_use[version.id]:
                self._notify()

    async def _until_it_passes(self, version: ModelVersion) -> None:
        while not self._passes(version.id):
            left = self._turn_left(version.id)
            if left is not None and left <= 0:
                await self.stage(version)
                continue
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the turn of the other version is over

    def _passes(self, version: str) -> bool:
        if version not in self._loaded:
            return False
        if not self._open:
            return self._replicas > 1 and self._staging and version == self.staying
        return self._only in (None, version) or self._replicas > 1 or len(self._loaded) > 1

    def _turn_left(self, version: str) -> float | None:
        """Seconds until the loaded version may be displaced: longer while it is in use.

        None: this version may not displace it before the next change.
        """
        if not self._open or version in self._loaded or self._only not in (None, version):
            return None
        busy = any(self._in_use[loaded] for loaded in self._loaded)
        turn = max(LEAST_TURN, BUSY_TURNS * self._change) if busy else self._change
        return self._since + turn - time.monotonic()

    async def _load(self, version: ModelVersion, force: bool) -> ProbeReport:
        if self._receiving is not None:
            await asyncio.wait({self._receiving})  # else it might displace this version
        while True:
            try:
                async with self._closed():
                    self._staging = True
                    if force:
                        self._keep_renewing()
                    proof = await self._platform.stage(version, force=force, holder=self._holder)
                if force or version.id in self._loaded:
                    return proof
                raise PoolBusy(f"{version.id} is on a spare replica, which comes and goes")
            except PoolBusy as busy:
                if not force:
                    raise
                await self._later(busy)
            finally:
                self._staging = False

    async def _later(self, busy: PoolBusy) -> None:
        self._on_busy(str(busy))
        await asyncio.sleep(BUSY_SECONDS)
        await self._until_open()

    async def _until_open(self) -> None:
        while not self._open:
            await self._changed.wait()

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Hold calls back while the replicas change version."""
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
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class GatedEngine:
    """A ports.ChatEngine for one run and its sub-agents: its calls pass a gate, all at one version.

    `base_url` stands for the server behind it.
    """

    def __init__(self, engine: ChatEngine, gate: VersionGate, version: ModelVersion) -> None:
        self.base_url = getattr(engine, "base_url", engine)
        self._engine, self._gate, self._version = engine, gate, version
        self._gate_waited = 0.0
        self._waiting = 0  # calls at the gate now
        self._since = 0.0  # when the first of them came
        self._waited = -math.inf  # when a call last left the gate that had to wait there
        self._cut_off = -math.inf  # when one that had passed was last cut off
        self._lives: Sequence[Any] = ()  # of the replicas, when that one passed

    @property
    def gate_wait_seconds(self) -> float:
        """Seconds that its calls have waited at the gate so far."""
        return self._gate_waited + (time.monotonic() - self._since if self._waiting else 0.0)

    async def excuse(self, since: float) -> RunError | None:
        """The reason why a run that began at `since` (monotonic) lost time; None: its own."""
        if self._waited > since:
            waited = self.gate_wait_seconds
            message = f"its time was up, {waited:.1f} s of which it was held back for a swap"
            return RunError(type="HeldBack", message=message, infrastructure=True)
        if self._cut_off > since and (why := await self._gate.outage(self._version, self._lives)):
            message = f"its time was up while a model call waited for an answer: {why}"
            return RunError(type="EngineUnavailable", message=message, infrastructure=True)
        return None

    async def record(self, run: Run) -> None:
        """Record a sub-agent's run, unless it was cut off: it is repeated under the same id."""
        record = getattr(self._engine, "record", None)
        if record is not None and run.stop_reason is not StopReason.cancelled:
            await record(run)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer once the version is loaded. Raises EngineError and its kinds, SwapError."""
        try:
            async with self._pass():
                return await self._engine.chat(request)
        except EngineUnavailable:
            await self._gate.look()  # somebody else may have changed what is served
            async with self._pass():
                return await self._engine.chat(request)

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer in chunks, otherwise as `chat`."""
        async with self._pass():
            chunks: Any = self._engine.stream(request)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    @asynccontextmanager
    async def _pass(self) -> AsyncIterator[None]:
        async with self._gate.passing(self._version, self._at_the_gate()):
            lives = self._gate.lives
            try:
                yield
            except asyncio.CancelledError:
                self._cut_off, self._lives = time.monotonic(), lives
                raise

    @contextmanager
    def _at_the_gate(self) -> Iterator[None]:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._waited = time.monotonic()
            if not self._waiting:
                self._gate_waited += self._waited - self._since


def _lives(replicas: Sequence[dict[str, Any]]) -> list[Any]:
    return [(replica["restarts"], replica["pid"]) for replica in replicas]
