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
from functools import partial
from pathlib import Path
from typing import Any

from cray_agents.errors import (
    BadInput,
    CrayError,
    Displaces,
    NotFound,
    NotLoaded,
    Overtaken,
    SwapError,
)
from cray_agents.paths import Home
from cray_agents.platform.client import LEASE
from cray_agents.records import ModelVersion, ProbePrompt, ProbeReport
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.gateway.model_calls.canary_traffic import CanaryTraffic
from cray_agents.runtime.gateway.replica_lease import Lease, Lending
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.canary import Canary, CanaryTest, Verdict
from cray_agents.runtime.registry.registry import ModelEvent, Registry
from cray_agents.runtime.store import Store

log = logging.getLogger(__name__)

BY_ITSELF = "canary"  # who ends or promotes a canary when its test does
TURN = 1.0  # seconds that what was loaded for its requests stays, at least
JUDGED_AGAIN = 60.0  # seconds after a verdict that could not be carried out


class Promoting:
    """What changes which version a name means; `live` answers which one it means to whom."""

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        pool: Pool,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.live = CanaryTraffic(home, store, registry, self._missing, self._decided)
        self.lending = Lending(self._give_back)
        self._home = home
        self._registry = registry
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._changing = asyncio.Lock()
        self._line = asyncio.Lock()  # in which all wait but rollbacks
        self._coming: ModelVersion | None = None  # being proven, to be promoted
        self._cut_off = False  # whether a rollback came before all replicas held what was promoted
        self._names: set[str] = set()  # that it is to answer for
        self._loading: dict[str, asyncio.Task[None]] = {}  # beside what is promoted, by version
        self._beside = asyncio.Lock()
        self._beside_until = 0.0  # when the next one may take the place of the last
        self._tasks: set[asyncio.Task[None]] = set()

    def missing(self) -> list[str]:
        """The promoted versions that this platform is to serve, and no replica can answer with."""
        return [v.id for v in self._standing() if not self._pool.serves(v.id)]

    async def stage(
        self,
        version: ModelVersion,
        *,
        force: bool = False,
        holder: str = "",
        seconds: float = LEASE,
    ) -> ProbeReport:
        """Let a replica hold a version, proven; all of them, where there is one. Raises SwapError.

        What is promoted is taken off its last replica only by `force`, for a `holder`, and comes
        back `seconds` after he last said that he lives: see lending.py. Else raises Displaces.
        The version of a running canary is not taken away for it. Raises PoolBusy where there is no
        other replica to spare, or another one holds it.
        """
        while True:
            async with self._line, self._changing:
                self.lending.check(holder, force=force)
                before = {v.id for v in self._standing() if self._pool.holds(v.id)}
                if self.lending.lease is not None:
                    before |= set(self.lending.lease.displaced)
                with suppress(Overtaken):  # the rollback is next; then once more
                    try:
                        report = await self._stage(version, displace=force)
                    except Displaces:
                        directory, probe = await self._proof_of(version)
                        with suppress(NotLoaded):
                            return await self._pool.load_beside(
                                directory, version.id, probe, sorted(before)
                            )
                        raise
                    gone = sorted(v for v in before if not self._pool.holds(v))
                    if gone:
                        self.lending.begin(holder or "admin", version.id, gone, seconds)
                    else:
                        self.lending.end()
                    return report

    def loaded(self, version_id: str) -> "asyncio.Task[None] | None":
        """What a request for a version waits for; None: nothing, or only its turn.

        A version that no replica holds, and that does not come back by itself, is loaded where that
        displaces nothing; the task raises NotLoaded at once where it cannot be, or SwapError.
        """
        if self._pool.serves(version_id) or self._pool.expects(version_id):
            return None
        name = version_id.partition("@")[0]
        if self._coming is not None and self._coming.id == version_id:
            return None
        if not self._pool.incumbent or any(v.id == version_id for v in self._standing()):
            return None  # it starts, or gave way and comes back
        canary = self.live.canary(name)
        if canary is not None and canary.version == version_id:
            return None
        task = self._loading.get(version_id)
        if task is None:
            work = self._load_beside(self._registry.resolve(version_id))
            task = self._loading[version_id] = asyncio.create_task(work)
            task.add_done_callback(partial(self._was_loaded, version_id))
        return task

    def _was_loaded(self, version_id: str, task: "asyncio.Task[None]") -> None:
        self._loading.pop(version_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s is not served: %s", version_id, error)

    async def _load_beside(self, version: ModelVersion) -> None:
        async with self._beside:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._beside_until - now)  # who waited for the last one is let in
            if self._pool.serves(version.id):
                return
            needed = [other.id for other in self._standing()]
            directory, probe = await self._proof_of(version)
            try:
                await self._pool.load_beside(directory, version.id, probe, needed)
            except NotLoaded as error:
                raise NotLoaded(
                    f"{error}: promote it (`cray-agents models promote {version.id}`), or start the"
                    " platform with spare_replicas = 1, or with max_lora_rank where a LoRA job made"
                    " it"
                ) from None
            self._beside_until = asyncio.get_running_loop().time() + TURN
        self._tell()

    async def promote(
        self,
        version: ModelVersion,
        *,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None = None,
        force: bool = False,
    ) -> ModelEvent:
        """Let the bare name mean a version, and all replicas hold it. Raises SwapError.

        Raises Displaces where another name's promoted version would be served no more, unless by
        `force`: then this platform serves that name no longer.
        A rollback may take it back before all do; one that comes before the name means the version
        keeps it from being promoted, which raises Overtaken.
        """
        async with self._line, self._changing:
            return await self._promote(version, who, reason, numbers, force=force)

    async def reject(
        self, version: ModelVersion, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> ModelEvent:
        """Note that a version was found not good enough. Raises BadInput if it is promoted."""
        event = await asyncio.to_thread(
            self._registry.reject,
            version.name,
            version.number,
            who=who,
            reason=reason,
            numbers=numbers,
        )
        self.lending.rejected(version.id, who)
        return event

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
                await self._prove(version, force=True)
                await self._end(name, who, f"rolled back to {version.id}")
                event = await asyncio.to_thread(
                    self._registry.roll_back, name, version.number, who=who, reason=reason
                )
            except BaseException:
                if self._cut_off:
                    self._spawn(self._go_on(name))
                raise
            await self._now_means(version, force=True)
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
        tasks = [*self._tasks, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.lending.close()
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
        self,
        version: ModelVersion,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None,
        *,
        force: bool = False,
    ) -> ModelEvent:
        self._coming = version
        try:
            await self._prove(version, force=force)
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
        await self._now_means(version, force=force)
        return event

    async def _now_means(self, version: ModelVersion, *, force: bool) -> None:
        """The name means a version, which a replica serves: let all of them.

        What other names mean is displaced by `force` alone; they are then answered for no longer.
        """
        others = self._others(version)
        self._names.add(version.name)
        self._tell()
        await self._spread(version, force=force)
        if force:
            gone = {other for other in others if not self._pool.holds(other)}
            self._names -= {other.partition("@")[0] for other in gone}
        if not self.missing():
            self.lending.end()

    def _standing(self) -> list[ModelVersion]:
        """What the names mean that this platform is to answer for: the first one's, and others'
        that were promoted while it runs.
        """
        if not self._names and self._pool.incumbent:
            self._names = {self._pool.incumbent.partition("@")[0]}
        found = []
        for name in sorted(self._names):
            with suppress(NotFound):
                version = self._registry.promoted(name)
                found += [version] if version is not None else []
        return found

    def _others(self, version: ModelVersion) -> list[str]:
        """What other names mean."""
        return [other.id for other in self._standing() if other.name != version.name]

    async def _give_back(self, lease: Lease) -> None:
        """Let what is promoted be served again: who displaced it has ended, or died."""
        while not lease.left and self.lending.lease is lease:
            async with self._line, self._changing:
                if lease.left or self.lending.lease is not lease:
                    return
                log.warning("%r holds the replica no longer", lease.holder)
                with suppress(Overtaken):
                    for version in self._standing():
                        if not self._pool.serves(version.id):
                            await self._stage(version, displace=True)
                    self.lending.end()

    def _back(
        self, name: str, to: int | None, force: bool, coming: ModelVersion | None
    ) -> ModelVersion:
        """Where a rollback goes. Raises BadInput, NotFound."""
        version = self._registry.promoted(name)
        taken_back = coming is not None and coming.name == name and coming != version
        if version is None or to is not None or not taken_back:
            return self._registry.before(name, to, force=force)
        return version

    async def _spread(self, version: ModelVersion, *, force: bool = False) -> None:
        """Let all replicas hold the promoted version, unless a rollback comes first."""
        self._cut_off = True
        with suppress(Overtaken):
            await self._swap(version, force=force)
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

    async def _stage(self, version: ModelVersion, *, displace: bool = False) -> ProbeReport:
        canary = self._registry.canary(version.name)
        promoted = self._registry.promoted(version.name)
        if canary is not None and version == promoted:
            for replica in self._pool.status():  # it is served, and the canary's replica stays
                if replica["version"] == version.id and replica["probe"]:
                    return ProbeReport.model_validate(replica["probe"])
        needed = [promoted.id] if promoted is not None else []
        needed += self._others(version)
        if canary is not None:
            needed.append(f"{canary.name}@{canary.version}")
        directory, probe = await self._proof_of(version)
        return await self._timed(
            version,
            self._pool.stage(directory, version.id, probe, needed=needed, displace=displace),
        )

    async def _prove(self, version: ModelVersion, *, force: bool) -> None:
        """Let a replica serve a version; all of them, where there is one. Raises SwapError.

        Raises Displaces where what another name means would be served no more, unless by `force`.

        A canary may have to make room for it; meanwhile its sessions get the promoted version.
        """
        serving = [r["version"] for r in self._pool.status() if r["state"] == "serving"]
        if version.id in serving:
            return
        if len(serving) < 2:
            await self._swap(version, force=force)
            return
        canary = self.live.canary(version.name)
        if canary is not None:
            canary.staged = False
            self._tell()
        try:
            directory, probe = await self._proof_of(version)
            others = [] if force else self._others(version)
            await self._timed(
                version, self._pool.stage(directory, version.id, probe, needed=others)
            )
        finally:
            if canary is not None:
                held = [r["version"] for r in self._pool.status() if r["state"] == "serving"]
                canary.staged = canary.version in held

    async def _swap(self, version: ModelVersion, *, force: bool) -> None:
        if any(replica["version"] != version.id for replica in self._pool.status()):
            directory, probe = await self._proof_of(version)
            others = [] if force else self._others(version)
            await self._timed(version, self._pool.swap(directory, version.id, probe, needed=others))

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
