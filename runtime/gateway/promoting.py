"""Versions into and out of service: proven on a replica, then in the history, then on the others.

So the bare name never means weights that nobody serves: the last replica of the old version is
changed when the name has long meant the new one. One change is under way at a time: two swaps at
once would each undo the other. A rollback waits for none that waits for requests to end: a replica
that has not yet let go of the old version answers with it at once. Called by routes/models.py;
live.py sends sessions to a canary and tells here what came of it. Read next: pool.py, registry.py,
canary.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput, CrayError, NotFound, Overtaken, SwapError
from cray_agents.paths import Home
from cray_agents.records import ModelVersion, ProbePrompt, ProbeReport
from cray_agents.runtime import checkpoints
from cray_agents.runtime.canary import Canary, CanaryTest, Verdict
from cray_agents.runtime.gateway.admission import Admission
from cray_agents.runtime.gateway.live import Live
from cray_agents.runtime.gateway.metrics import Metrics
from cray_agents.runtime.history import ModelEvent
from cray_agents.runtime.registry import Registry
from cray_agents.runtime.store import Store

if TYPE_CHECKING:  # services.py makes this
    from cray_agents.runtime.gateway.services import Pool

log = logging.getLogger(__name__)

BY_ITSELF = "canary"  # who ends or promotes a canary when its test does
JUDGED_AGAIN = 60.0  # seconds after a verdict that could not be carried out


class Promoting:
    """What changes which version a name means; `live` answers which one it means to whom."""

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        pool: "Pool",
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.live = Live(home, store, registry, self._missing, self._decided)
        self._home = home
        self._registry = registry
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._changing = asyncio.Lock()
        self._line = asyncio.Lock()  # in which all wait but rollbacks
        self._coming: ModelVersion | None = None  # being proven, to be promoted
        self._cut_off = False  # whether a rollback came before all replicas held what was promoted
        self._tasks: set[asyncio.Task[None]] = set()

    async def stage(self, version: ModelVersion) -> ProbeReport:
        """Let a replica hold a version, proven; all of them, where there is one. Raises SwapError.

        The version of a running canary is not taken away for it. Raises BadInput where there is no
        other replica to spare.
        """
        while True:
            async with self._line, self._changing:
                with suppress(Overtaken):  # the rollback is next; then once more
                    return await self._stage(version)

    async def promote(
        self, version: ModelVersion, *, who: str, reason: str, numbers: dict[str, Any] | None = None
    ) -> ModelEvent:
        """Let the bare name mean a version, and all replicas hold it. Raises SwapError.

        A rollback may take it back before all do; one that comes before the name means the version
        keeps it from being promoted, which raises Overtaken.
        """
        async with self._line, self._changing:
            return await self._promote(version, who, reason, numbers)

    async def roll_back(
        self, name: str, to: int | None, *, who: str, reason: str, force: bool = False
    ) -> ModelEvent:
        """Let the bare name mean what it meant before, or `to`. Raises BadInput, SwapError.

        Before a promotion that is under way: then the name goes on to mean what it means. Where it
        is refused, or fails, what gave way to it goes on.
        """
        coming = self._coming
        self._back(name, to, force, coming)  # what is refused overtakes nothing
        async with self._overtaking():
            try:
                version = self._back(name, to, force, coming)
                await self._prove(version)
                await self._end(name, who, f"rolled back to {version.id}")
                event = await asyncio.to_thread(
                    self._registry.roll_back, name, version.number, who=who, reason=reason
                )
            except BaseException:
                if self._cut_off:
                    self._spawn(self._go_on(name))
                raise
            self._tell()
            await self._spread(version)
        return event

    async def start_canary(
        self, version: ModelVersion, test: CanaryTest, *, who: str, reason: str
    ) -> ModelEvent:
        """Answer a share of the live sessions by a version. Raises BadInput, SwapError."""
        replicas = len(self._pool.status())
        if replicas < 2:
            raise BadInput(
                f"a canary needs two replicas, one for each version, and there is {replicas}: start"
                " the platform with `--replicas 2`, or promote at once and roll back if need be",
                param="share",
            )
        async with self._line, self._changing:
            incumbent = self._registry.promoted(version.name)
            if incumbent is None or incumbent.number == version.number:
                raise BadInput(
                    f"{version.id} {'is promoted already' if incumbent else 'has no incumbent'}: a "
                    "canary compares a candidate with the promoted version",
                    param="version",
                )
            self._registry.check_no_canary(version.name)
            await self._stage(version)
            event = await asyncio.to_thread(
                self._registry.start_canary,
                version.name,
                version.number,
                who=who,
                reason=reason,
                numbers=test.model_dump(mode="json"),
            )
            canary = self.live.canary(version.name)
            if canary is not None:
                canary.staged = True
        self._tell()
        return event

    async def stop_canary(self, name: str, *, who: str, reason: str) -> ModelEvent:
        """Answer all sessions by the promoted version again. Raises NotFound."""
        async with self._line, self._changing:
            event = await self._stop_canary(name, who, reason or "ended")
        if event is None:
            raise NotFound(f"no canary of {name!r} is running", param="name")
        return event

    async def close(self) -> None:
        """Give up what is under way; what was seen of canaries is kept."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.live.close()

    @asynccontextmanager
    async def _overtaking(self) -> AsyncIterator[None]:
        """A rollback's turn: the next, and what waits for requests to end gives way to it."""
        with self._pool.overtaking():
            await self._changing.acquire()
        try:
            yield
        finally:
            self._changing.release()

    async def _promote(
        self, version: ModelVersion, who: str, reason: str, numbers: dict[str, Any] | None
    ) -> ModelEvent:
        self._coming = version
        try:
            await self._prove(version)
        finally:
            self._coming = None
        await self._end(version.name, who, f"{version.id} is promoted")
        event = await asyncio.to_thread(
            self._registry.promote,
            version.name,
            version.number,
            who=who,
            reason=reason,
            numbers=numbers,
        )
        self._tell()
        await self._spread(version)
        return event

    def _back(
        self, name: str, to: int | None, force: bool, coming: ModelVersion | None
    ) -> ModelVersion:
        """Where a rollback goes. Raises BadInput, NotFound."""
        version = self._registry.promoted(name)
        taken_back = coming is not None and coming.name == name and coming != version
        if version is None or to is not None or not taken_back:
            return self._registry.before(name, to, force=force)
        return version

    async def _spread(self, version: ModelVersion) -> None:
        """Let all replicas hold the promoted version, unless a rollback comes first."""
        self._cut_off = True
        with suppress(Overtaken):
            await self._swap(version)
            self._cut_off = False

    async def _go_on(self, name: str) -> None:
        """Do what a rollback cut off that came to nothing."""
        try:
            async with self._line, self._changing:
                version = self._registry.promoted(name)
                if self._cut_off and version is not None and self._registry.canary(name) is None:
                    await self._spread(version)
        except CrayError as error:
            log.error("%s is not on every replica: %s", name, error)

    async def _stop_canary(self, name: str, who: str, reason: str) -> ModelEvent | None:
        event = await self._end(name, who, reason)
        if event is not None:
            self._tell()
            with suppress(Overtaken):
                await self._restore(name)
        return event

    async def _end(self, name: str, who: str, reason: str) -> ModelEvent | None:
        canary = self.live.canary(name)
        numbers = canary.numbers() if canary is not None else {}
        event = await asyncio.to_thread(
            self._registry.end_canary, name, who=who, reason=reason, numbers=numbers
        )
        self.live.canary(name)  # it looks again, and has none
        return event

    async def _restore(self, name: str) -> None:
        """Let the replica that held a canary hold the promoted version."""
        incumbent = self._registry.promoted(name)
        if incumbent is not None:
            await self._stage(incumbent)

    async def _stage(self, version: ModelVersion) -> ProbeReport:
        canary = self._registry.canary(version.name)
        promoted = self._registry.promoted(version.name)
        if canary is not None and version == promoted:
            for replica in self._pool.status():  # it is served, and the canary's replica stays
                if replica["version"] == version.id and replica["probe"]:
                    return ProbeReport.model_validate(replica["probe"])
        needed = [promoted.id] if promoted is not None else []
        if canary is not None:
            needed.append(f"{canary.name}@{canary.version}")
        directory, probe = await self._proof_of(version)
        return await self._timed(
            version, self._pool.stage(directory, version.id, probe, needed=needed)
        )

    async def _prove(self, version: ModelVersion) -> None:
        """Let a replica serve a version; all of them, where there is one. Raises SwapError.

        A canary may have to make room for it; meanwhile its sessions get the promoted version.
        """
        serving = [r["version"] for r in self._pool.status() if r["state"] == "serving"]
        if version.id in serving:
            return
        if len(serving) < 2:
            await self._swap(version)
            return
        canary = self.live.canary(version.name)
        if canary is not None:
            canary.staged = False
            self._tell()
        try:
            directory, probe = await self._proof_of(version)
            await self._timed(version, self._pool.stage(directory, version.id, probe))
        finally:
            if canary is not None:
                held = [r["version"] for r in self._pool.status() if r["state"] == "serving"]
                canary.staged = canary.version in held

    async def _swap(self, version: ModelVersion) -> None:
        if any(replica["version"] != version.id for replica in self._pool.status()):
            directory, probe = await self._proof_of(version)
            await self._timed(version, self._pool.swap(directory, version.id, probe))

    async def _proof_of(self, version: ModelVersion) -> tuple[Path, list[ProbePrompt]]:
        """Where its weights are, and the golden probe that comes with them."""
        directory = self._home.checkpoint(version.checkpoint)
        manifest = await asyncio.to_thread(checkpoints.read_manifest, directory)
        return directory, manifest.probe

    async def _timed(
        self, version: ModelVersion, change: Coroutine[Any, Any, ProbeReport]
    ) -> ProbeReport:
        begun, good = time.perf_counter(), False
        try:
            report = await change
            good = report.passed
        finally:
            self._metrics.swapped(time.perf_counter() - begun, good)
        if not report.passed:
            raise SwapError(
                f"{version.id} is not what was trained: logprobs on its probe differ by "
                f"{report.max_logprob_diff:g}, tolerance {report.tolerance:g}"
            )
        return report

    def _tell(self) -> None:
        """A name means something else now: requests that wait are to ask again."""
        self._pool.wake()
        self._admission.look()

    # ---- what live.py finds

    def _missing(self, canary: Canary) -> None:
        """A canary runs and no replica holds its version: the platform was started again."""
        self._spawn(self._put_back(canary))

    async def _put_back(self, canary: Canary) -> None:
        name = canary.start.name
        async with self._line, self._changing:
            if canary.staged or self._registry.canary(name) != canary.start:
                return
            try:
                if len(self._pool.status()) < 2:
                    raise SwapError("it needs two replicas, and there is one")
                await self._stage(self._registry.resolve(canary.version))
                canary.staged = True
            except CrayError as error:
                log.error("the canary %s cannot go on: %s", canary.version, error)
                await self._end(name, BY_ITSELF, f"could not go on after a restart: {error}")
        self._tell()

    def _decided(self, canary: Canary, verdict: Verdict, reason: str) -> None:
        """A canary's test has come to its end."""
        self._pool.wake()  # sessions that wait for it go to the promoted version
        self._spawn(self._carry_out(canary, verdict, reason))

    async def _carry_out(self, canary: Canary, verdict: Verdict, reason: str) -> None:
        name = canary.start.name
        try:
            async with self._line, self._changing:
                if self._registry.canary(name) != canary.start:
                    return  # somebody else has ended it
                if verdict == "promote":
                    version = self._registry.resolve(canary.version)
                    await self._promote(version, BY_ITSELF, reason, canary.numbers())
                else:
                    log.error("the canary %s is rolled back: %s", canary.version, reason)
                    await self._stop_canary(name, BY_ITSELF, f"rolled back: {reason}")
        except CrayError as error:
            log.error("after the canary %s (%s): %s", canary.version, reason, error)
            await asyncio.sleep(JUDGED_AGAIN)
            canary.decided = None  # it goes on, and so does its judgement

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
