"""Version switcher: prove a version on a replica, promote it in the registry, roll it out.

In this order the bare name never means weights that no replica serves. One change runs at a time,
as two swaps at once would each undo the other. A rollback overtakes a change that waits for
requests to end. A replica that still holds the old version then answers at once. Called by
routes/models.py; model_calls/canary_traffic.py reports verdicts to this module. Read next:
runtime/pool/pool.py, runtime/registry/registry.py, runtime/registry/canary.py.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
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
from cray_agents.paths import Home, host_cache
from cray_agents.platform.client import LEASE
from cray_agents.records import ModelVersion, ProbePrompt, ProbeReport
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.gateway.model_calls.canary_traffic import CanaryTraffic
from cray_agents.runtime.gateway.replica_lease import Lease, ReplicaLeases
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.canary import Canary, CanaryTest, Verdict
from cray_agents.runtime.registry.deltas import Shadows, materialize
from cray_agents.runtime.registry.registry import ModelEvent, Registry
from cray_agents.runtime.store import Store

log = logging.getLogger(__name__)

CANARY_ACTOR = "canary"  # `who` in the history of a change that a canary's verdict made
MIN_STAY = 1.0  # seconds that a version loaded on demand stays, at least
RETRY_INTERVAL = 60.0  # seconds until a verdict that could not be carried out is tried again


class VersionSwitcher:
    """All changes to the version that a name means. `live` resolves names for live sessions."""

    def __init__(
        self,
        home: Home,
        store: Store,
        registry: Registry,
        pool: Pool,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.live = CanaryTraffic(home, store, registry, self._on_unstaged, self._on_verdict)
        self.leases = ReplicaLeases(self._give_back)
        self._home = home
        self._shadow_lock = threading.Lock()  # of the threads that make shadows
        self._shadows: Shadows | None = None  # made for the first delta checkpoint
        self._registry = registry
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._change_lock = asyncio.Lock()
        self._queue_lock = asyncio.Lock()  # taken before the other one, except by rollbacks
        self._being_promoted: ModelVersion | None = None  # while it is proven
        self._rollout_interrupted = False  # by a rollback, before all replicas held the version
        self._names: set[str] = set()  # of the models that this platform serves
        self._loading: dict[str, asyncio.Task[None]] = {}  # loads on demand, by version
        self._load_lock = asyncio.Lock()
        self._stays_until = 0.0  # event loop time until which the last load on demand stays
        self._tasks = BackgroundTasks()

    def missing(self) -> list[str]:
        """Return the promoted versions that no replica can answer with now.

        Replicas that are away come back with the first request.
        """
        versions = (version.id for version in self._promoted_versions())
        pool = self._pool
        return [v for v in versions if not (pool.serves(v) or pool.brings_back(v))]

    async def stage(
        self,
        version: ModelVersion,
        *,
        force: bool = False,
        holder: str = "",
        seconds: float = LEASE,
    ) -> ProbeReport:
        """Load and prove a version on one replica.

        Only `force` takes a promoted version off its last replica. It makes a lease for `holder`,
        and the promoted version comes back `seconds` after the holder's last renewal; see
        replica_lease.py. A running canary's version keeps its replica. Raises SwapError. Raises
        Displaces without `force`. Raises PoolBusy if no replica can be spared, or another holder
        has the lease.
        """
        while True:
            async with self._queue_lock, self._change_lock:
                self.leases.check(holder, force=force)
                before = {v.id for v in self._promoted_versions() if self._pool.holds(v.id)}
                if self.leases.lease is not None:
                    before |= set(self.leases.lease.displaced)
                with suppress(Overtaken):  # retried after the rollback
                    try:
                        report = await self._stage(version, displace=force)
                    except Displaces:
                        directory, probe = await self._directory_and_probe(version)
                        with suppress(NotLoaded):
                            return await self._pool.load_beside(
                                directory, version.id, probe, sorted(before)
                            )
                        raise
                    gone = sorted(v for v in before if not self._pool.holds(v))
                    if gone:
                        self.leases.begin(holder or "admin", version.id, gone, seconds)
                    else:
                        self.leases.end()
                    return report

    async def receive(
        self, job: str, *, force: bool = False, holder: str = "", seconds: float = LEASE
    ) -> bool:
        """Let a replica take the weights of a job that still writes its files.

        A later `stage` of what the job publishes proves and serves them. `force`, `holder` and
        `seconds` are as for `stage`. Returns False if the job offers no weights, or has published
        them. Raises PoolBusy, SwapError.
        """
        async with self._queue_lock, self._change_lock:
            self.leases.check(holder, force=force)
            if (self._home.checkpoint(job) / checkpoints.MANIFEST).exists():
                return False
            promoted = self._promoted_versions()
            canaries = filter(None, (self._registry.canary(v.name) for v in promoted))
            protected = [*(v.id for v in promoted), *(f"{c.name}@{c.version}" for c in canaries)]
            before = [version for version in protected if self._pool.serves(version)]
            with suppress(Overtaken):
                received = await self._pool.receive(job, protected=protected, displace=force)
                if gone := [version for version in before if not self._pool.serves(version)]:
                    self.leases.begin(holder or "admin", job, gone, seconds)
                return received
            return False

    def load_on_demand(self, version_id: str) -> "asyncio.Task[None] | None":
        """Return the task that loads a version for a request, or None if none is necessary.

        A version is loaded only if no replica will hold it anyway, and where that displaces
        nothing. The task raises NotLoaded at once if it cannot be loaded, or SwapError.
        """
        self._pool.recall(version_id)
        if self._pool.serves(version_id) or self._pool.expects(version_id):
            return None
        name = version_id.partition("@")[0]
        if self._being_promoted is not None and self._being_promoted.id == version_id:
            return None
        if not self._pool.incumbent or any(v.id == version_id for v in self._promoted_versions()):
            return None  # the pool starts, or the version gave way and comes back
        canary = self.live.canary(name)
        if canary is not None and canary.version == version_id:
            return None
        task = self._loading.get(version_id)
        if task is None:
            work = self._load_beside(self._registry.resolve(version_id))
            task = self._loading[version_id] = self._tasks.run("load on demand", work, version_id)
            task.add_done_callback(lambda _: self._loading.pop(version_id, None))
        return task

    async def _load_beside(self, version: ModelVersion) -> None:
        async with self._load_lock:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._stays_until - now)  # requests for the last one are let in
            if self._pool.serves(version.id):
                return
            protected = [other.id for other in self._promoted_versions()]
            directory, probe = await self._directory_and_probe(version)
            try:
                await self._pool.load_beside(directory, version.id, probe, protected)
            except NotLoaded as error:
                raise NotLoaded(
                    f"{error}: promote it (`cray-agents models promote {version.id}`), or start the"
                    " platform with spare_replicas = 1, or with max_lora_rank where a LoRA job made"
                    " it"
                ) from None
            self._stays_until = asyncio.get_running_loop().time() + MIN_STAY
        self._wake_requests()

    async def promote(
        self,
        version: ModelVersion,
        *,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None = None,
        force: bool = False,
    ) -> ModelEvent:
        """Make the bare name mean a version, and load it on all replicas. Raises SwapError.

        Raises Displaces if another name's promoted version would lose its last replica. With
        `force` this platform no longer serves that name instead. A rollback may interrupt the
        roll-out. A rollback before the name means the version prevents the promotion, which then
        raises Overtaken.
        """
        async with self._queue_lock, self._change_lock:
            return await self._promote(version, who, reason, numbers, force=force)

    async def reject(
        self, version: ModelVersion, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> ModelEvent:
        """Record that a version is not good enough. Raises BadInput if it is promoted."""
        event = await asyncio.to_thread(
            self._registry.reject,
            version.name,
            version.number,
            who=who,
            reason=reason,
            numbers=numbers,
        )
        self.leases.end_rejected(version.id, who)
        return event

    async def roll_back(
        self, name: str, to: int | None, *, who: str, reason: str, force: bool = False
    ) -> ModelEvent:
        """Make the bare name mean its previous version, or `to`. Raises BadInput, SwapError.

        If this name's promotion is under way, it is given up, and without `to` the name keeps its
        meaning. If the rollback is refused or fails, the changes that gave way to it go on.
        """
        being_promoted = self._being_promoted
        self._rollback_target(name, to, force, being_promoted)  # a refused one overtakes nothing
        async with self._rollback_turn():
            try:
                version = self._rollback_target(name, to, force, being_promoted)
                await self._make_whole(version)
                await self._prove(version, force=True)
                await self._end_canary(name, who, f"rolled back to {version.id}")
                event = await asyncio.to_thread(
                    self._registry.roll_back, name, version.number, who=who, reason=reason
                )
            except BaseException:
                if self._rollout_interrupted:
                    self._tasks.keep("roll-out", partial(self._finish_rollout, name), name)
                raise
            await self._apply_promotion(version, force=True)
        return event

    async def start_canary(
        self, version: ModelVersion, test: CanaryTest, *, who: str, reason: str
    ) -> ModelEvent:
        """Let a version answer a share of the live sessions. Raises BadInput, SwapError."""
        replicas = len(self._pool.status())
        if replicas < 2:
            raise BadInput(
                f"a canary needs two replicas, one for each version, and there is {replicas}: start"
                " the platform with `--replicas 2`, or promote at once and roll back if need be",
                param="share",
            )
        async with self._queue_lock, self._change_lock:
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
        self._wake_requests()
        return event

    async def stop_canary(self, name: str, *, who: str, reason: str) -> ModelEvent:
        """Let the promoted version answer all sessions again. Raises NotFound."""
        async with self._queue_lock, self._change_lock:
            event = await self._stop_canary(name, who, reason or "ended")
        if event is None:
            raise NotFound(f"no canary of {name!r} is running", param="name")
        return event

    async def close(self) -> None:
        """Cancel all changes under way, and save what the canaries have counted."""
        await self._tasks.close()
        await self.leases.close()
        await self.live.close()
        if self._shadows is not None:
            await asyncio.to_thread(self._shadows.remove)

    @asynccontextmanager
    async def _rollback_turn(self) -> AsyncIterator[None]:
        """Hold the change lock for a rollback, ahead of the queue.

        A change that waits for requests to end gives way.
        """
        with self._pool.rollback_waiting():
            await self._change_lock.acquire()
        try:
            yield
        finally:
            self._change_lock.release()

    async def _promote(
        self,
        version: ModelVersion,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None,
        *,
        force: bool = False,
    ) -> ModelEvent:
        self._being_promoted = version
        try:
            await self._make_whole(version)
            await self._prove(version, force=force)
        finally:
            self._being_promoted = None
        await self._end_canary(version.name, who, f"{version.id} is promoted")
        event = await asyncio.to_thread(
            self._registry.promote,
            version.name,
            version.number,
            who=who,
            reason=reason,
            numbers=numbers,
        )
        await self._apply_promotion(version, force=force)
        return event

    async def _apply_promotion(self, version: ModelVersion, *, force: bool) -> None:
        """Roll out a version that its name means now and that one replica serves.

        Only `force` displaces other names' versions; this platform no longer serves those names.
        """
        other_ids = self._promoted_of_other_names(version)
        self._names.add(version.name)
        self._wake_requests()
        await self._roll_out(version, force=force)
        if force:
            gone = {other for other in other_ids if not self._pool.holds(other)}
            self._names -= {other.partition("@")[0] for other in gone}
        if not self.missing():
            self.leases.end()

    def _promoted_versions(self) -> list[ModelVersion]:
        """Return the promoted version of each name that this platform serves.

        These are the name it started with and the names promoted since.
        """
        if not self._names and self._pool.incumbent:
            self._names = {self._pool.incumbent.partition("@")[0]}
        versions = []
        for name in sorted(self._names):
            with suppress(NotFound):
                version = self._registry.promoted(name)
                versions += [version] if version is not None else []
        return versions

    def _promoted_of_other_names(self, version: ModelVersion) -> list[str]:
        return [other.id for other in self._promoted_versions() if other.name != version.name]

    async def _give_back(self, lease: Lease) -> None:
        """Load the promoted versions again after a lease has ended or run out."""
        while not lease.left and self.leases.lease is lease:
            async with self._queue_lock, self._change_lock:
                if lease.left or self.leases.lease is not lease:
                    return
                log.warning("%r holds the replica no longer", lease.holder)
                with suppress(Overtaken):
                    for version in self._promoted_versions():
                        if not self._pool.serves(version.id):
                            await self._stage(version, displace=True)
                    self.leases.end()

    def _rollback_target(
        self, name: str, to: int | None, force: bool, being_promoted: ModelVersion | None
    ) -> ModelVersion:
        """Return the version that a rollback leads to. Raises BadInput, NotFound."""
        version = self._registry.promoted(name)
        prevents_promotion = (
            being_promoted is not None and being_promoted.name == name and being_promoted != version
        )
        if version is None or to is not None or not prevents_promotion:
            return self._registry.rollback_target(name, to, force=force)
        return version

    async def _roll_out(self, version: ModelVersion, *, force: bool = False) -> None:
        """Load the promoted version on all replicas, unless a rollback comes first."""
        self._rollout_interrupted = True
        with suppress(Overtaken):
            await self._swap(version, force=force)
            self._rollout_interrupted = False

    async def _finish_rollout(self, name: str) -> None:
        """Finish a roll-out that a failed rollback interrupted."""
        try:
            async with self._queue_lock, self._change_lock:
                version = self._registry.promoted(name)
                if (
                    self._rollout_interrupted
                    and version is not None
                    and self._registry.canary(name) is None
                ):
                    await self._roll_out(version)
        except CrayError as error:
            log.error("%s is not on every replica: %s", name, error)

    async def _stop_canary(self, name: str, who: str, reason: str) -> ModelEvent | None:
        event = await self._end_canary(name, who, reason)
        if event is not None:
            self._wake_requests()
            incumbent = self._registry.promoted(name)
            with suppress(Overtaken):  # on the replica that held the canary
                if incumbent is not None:
                    await self._stage(incumbent)
        return event

    async def _end_canary(self, name: str, who: str, reason: str) -> ModelEvent | None:
        canary = self.live.canary(name)
        numbers = canary.numbers() if canary is not None else {}
        event = await asyncio.to_thread(
            self._registry.end_canary, name, who=who, reason=reason, numbers=numbers
        )
        self.live.canary(name)  # drops the ended canary
        return event

    async def _stage(self, version: ModelVersion, *, displace: bool = False) -> ProbeReport:
        canary = self._registry.canary(version.name)
        promoted = self._registry.promoted(version.name)
        if canary is not None and version == promoted:
            for replica in self._pool.status():  # served already; the canary keeps its replica
                if replica["version"] == version.id and replica["probe"]:
                    return ProbeReport.model_validate(replica["probe"])
        protected = [promoted.id] if promoted is not None else []
        protected += self._promoted_of_other_names(version)
        if canary is not None:
            protected.append(f"{canary.name}@{canary.version}")
        stage = partial(self._pool.stage, protected=protected, displace=displace)
        return await self._load(version, stage)

    async def _prove(self, version: ModelVersion, *, force: bool) -> None:
        """Load and prove a version on one replica. Raises SwapError.

        Raises Displaces if another name's promoted version would lose its last replica, unless
        `force`. A canary may have to make room: its sessions get the promoted version meanwhile.
        """
        serving = self._serving()
        if version.id in serving:
            return
        if len(serving) < 2:
            await self._swap(version, force=force)
            return
        canary = self.live.canary(version.name)
        if canary is not None:
            canary.staged = False
            self._wake_requests()
        try:
            protected = [] if force else self._promoted_of_other_names(version)
            await self._load(version, partial(self._pool.stage, protected=protected))
        finally:
            if canary is not None:
                canary.staged = canary.version in self._serving()

    def _serving(self) -> list[str]:
        return [one["version"] for one in self._pool.status() if one["state"] == "serving"]

    async def _swap(self, version: ModelVersion, *, force: bool) -> None:
        replicas = self._pool.status()
        # without a replica nothing is proven: the pool refuses that
        if not replicas or any(replica["version"] != version.id for replica in replicas):
            protected = [] if force else self._promoted_of_other_names(version)
            await self._load(version, partial(self._pool.swap, protected=protected))

    async def _load(
        self, version: ModelVersion, change: Callable[..., Coroutine[Any, Any, ProbeReport]]
    ) -> ProbeReport:
        """Change the pool's weights to a version's, and measure it. Raises SwapError."""
        directory, probe = await self._directory_and_probe(version)
        start, passed = time.perf_counter(), False
        try:
            report = await change(directory, version.id, probe)
            passed = True
            return report
        finally:
            self._metrics.swapped(time.perf_counter() - start, passed)

    def _wake_requests(self) -> None:
        """Let waiting requests resolve their names again, after a name's meaning has changed."""
        self._pool.wake()
        self._admission.recheck()

    # ---- weights: a delta checkpoint is rebuilt, on the shared root before its promotion, else in
    # this host's cache
    async def _make_whole(self, version: ModelVersion) -> None:
        """Rebuild a delta checkpoint's weights on the shared root. Raises NotFound, Corrupt."""
        directory = self._home.checkpoint(version.checkpoint)
        await asyncio.to_thread(materialize, self._home, directory)

    async def _directory_and_probe(self, version: ModelVersion) -> tuple[Path, list[ProbePrompt]]:
        """Return a whole directory of a version's weights, and their golden probe.

        Raises SwapError where a delta checkpoint cannot be made whole.
        """
        directory = self._home.checkpoint(version.checkpoint)
        manifest = await asyncio.to_thread(checkpoints.read_manifest, directory)
        if manifest.delta is not None:
            directory = await asyncio.to_thread(self._shadow, version, directory)
        return directory, manifest.probe

    def _shadow(self, version: ModelVersion, directory: Path) -> Path:
        with self._shadow_lock:
            try:
                if self._shadows is None:
                    self._shadows = Shadows(self._home, host_cache() / "shadows")
                shadow = self._shadows.directory(directory)
            except (CrayError, OSError) as error:
                raise SwapError(f"{version.id} was not loaded: {error}") from error
            self._shadows.sweep({shadow, *self._pool.checkpoints()})
            return shadow

    # ---- callbacks of CanaryTraffic

    def _on_unstaged(self, canary: Canary) -> None:
        """Stage a canary that ran before the platform was started again."""
        self._tasks.keep("canary", partial(self._restage_canary, canary), canary.version)

    async def _restage_canary(self, canary: Canary) -> None:
        name = canary.start.name
        async with self._queue_lock, self._change_lock:
            if canary.staged or self._registry.canary(name) != canary.start:
                return
            try:
                if len(self._pool.status()) < 2:
                    raise SwapError("it needs two replicas, and there is one")
                await self._stage(self._registry.resolve(canary.version))
                canary.staged = True
            except CrayError as error:
                log.error("the canary %s cannot go on: %s", canary.version, error)
                await self._end_canary(
                    name, CANARY_ACTOR, f"could not go on after a restart: {error}"
                )
        self._wake_requests()

    def _on_verdict(self, canary: Canary, verdict: Verdict, reason: str) -> None:
        """Carry out a canary's verdict."""
        self._pool.wake()  # its waiting sessions go to the promoted version
        work = partial(self._carry_out, canary, verdict, reason)
        self._tasks.keep("canary verdict", work, canary.version)

    async def _carry_out(self, canary: Canary, verdict: Verdict, reason: str) -> None:
        name = canary.start.name
        try:
            async with self._queue_lock, self._change_lock:
                if self._registry.canary(name) != canary.start:
                    return  # ended by another request
                if verdict == "promote":
                    version = self._registry.resolve(canary.version)
                    await self._promote(version, CANARY_ACTOR, reason, canary.numbers())
                else:
                    log.error("the canary %s is rolled back: %s", canary.version, reason)
                    await self._stop_canary(name, CANARY_ACTOR, f"rolled back: {reason}")
        except CrayError as error:
            log.error("after the canary %s (%s): %s", canary.version, reason, error)
            await asyncio.sleep(RETRY_INTERVAL)
            canary.decided = None  # the test goes on
