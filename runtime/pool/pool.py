"""Pool: route each request to a replica of its version, and change versions without losses.

The gateway calls `answer`, `stage`, `swap` and `status`. A replica serves a version only after the
golden probe matched there (golden_probe.py). This module routes requests and decides which replica
changes when. Read next: rolling_swap.py; replica.py, the change of one replica.
"""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from cray_agents.errors import CrayError, Displaces, NotLoaded, PoolBusy
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, LogprobLimits
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.place import EngineHost
from cray_agents.runtime.pool.published_replicas import PublishedPool, ServingLimits, publish
from cray_agents.runtime.pool.replica import Replica
from cray_agents.runtime.pool.request_router import PoolNotifier, RequestRouter
from cray_agents.runtime.pool.rolling_swap import (
    copy_weights,
    find_free_slots,
    rolling_swap,
    stage_on_one_slot,
)
from cray_agents.runtime.pool.upkeep import PoolReplica
from cray_agents.runtime.pool.vllm_engine import ReplicaServer

T = TypeVar("T")
Given = ParamSpec("Given")


SwapMode = Literal["drain", "keep"]  # drain: requests in flight end before weights change


def _to_the_end(
    change: Callable[Concatenate["Pool", Given], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Pool", Given], Coroutine[Any, Any, T]]:
    """Return a change of weights that goes on to its end, though its caller be cancelled."""

    @wraps(change)
    async def shielded(pool: "Pool", /, *args: Given.args, **options: Given.kwargs) -> T:
        work = change(pool, *args, **options)
        return await asyncio.shield(pool._tasks.run("weight change", work))

    return shielded


def _note_slowest(seconds: dict[str, float], replica: dict[str, float]) -> None:
    for phase, value in replica.items():
        seconds[phase] = max(seconds.get(phase, 0.0), value)


class Pool(RequestRouter):
    """The replicas of a platform, and the routing of requests to them.

    Args:
        engines: a `VllmProcess` or `SlurmReplica` each; in tests an `InProcessEngine`.
        probe_limits: largest allowed logprob differences on a probe, by the engines' dtype.
        wait_timeout: see `RequestRouter`.
        slots, start_timeout: of each replica: what further gateways go by.
        drain_timeout: seconds that a swap waits for the requests in flight. After that it changes
            nothing.
        swap_mode: "drain" waits for requests in flight. "keep" lets them go on under the new
            weights; `SampledSequence.seams` record the positions of the changes.
        swap_share: share of the replicas that may change at once: see rolling_swap.py.
        silence_timeout: seconds after which a silent replica is restarted.
        spares: replicas that start when a request names a version that no other holds
            (`load_beside`). No promoted version and no candidate is loaded on them.
        spare_seconds: seconds without a request after which a spare replica is ended.
        name_of: returns the version that a checkpoint is, for the base of an adapter version.
        affinity: the setting `replica_affinity`.
    """

    def __init__(
        self,
        engines: Sequence[EngineHost],
        *,
        probe_limits: LogprobLimits = FLOAT32_PROBE,
        wait_timeout: float = 120.0,
        slots: int = 64,
        start_timeout: float = 300.0,
        drain_timeout: float = 600.0,
        swap_mode: SwapMode = "drain",
        swap_share: float = 0.25,
        silence_timeout: float = 60.0,
        spares: Sequence[EngineHost] = (),
        spare_seconds: float = 600.0,
        name_of: Callable[[Path], str] = lambda directory: directory.name,
        affinity: float = 1.5,
    ) -> None:
        self._name_of = name_of
        self._changes = PoolNotifier()
        limits = (probe_limits, drain_timeout, self._changes)
        self._slots = [PoolReplica(engine, *limits) for engine in engines]
        self._spares = [PoolReplica(engine, *limits) for engine in spares]
        self._all = [*self._slots, *self._spares]
        super().__init__(self._all, self._changes, wait_timeout, affinity)
        self._spare_seconds = spare_seconds
        self.swap_mode: SwapMode = swap_mode
        self._swap_share = swap_share
        self._incumbent = ""  # the version most recently loaded on all replicas
        self._former = ""  # the incumbent before, for a rollback
        self._candidate = ""  # the version most recently staged
        self.limits = ServingLimits(
            max_num_seqs=slots, start_timeout=start_timeout, swap_timeout=wait_timeout
        )
        self._silence_timeout = silence_timeout
        self._swapping = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._turns: dict[str, float] | None = None

    async def start(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        replicas: int | None = None,
    ) -> None:
        """Start replicas on a version and prove it. Raises SetupError, EngineError, SwapError.

        `replicas`: as many are started, and the others are away (`call_back`); None: all.

        Until `stop`, a replica that dies is brought back with the versions it held. Replicas in
        Slurm come as they get their places. One that does not start is tried again, unless all
        fail.
        """
        loaded = await LoadedVersion.verify_and_create(checkpoint, version, probe, self._name_of)
        self._incumbent = self._candidate = version
        failed: set[PoolReplica] = set()
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots[:replicas]:
                    group.create_task(self._open(slot, loaded, failed))
                for slot in self._slots[len(self._slots[:replicas]) :]:
                    slot.stay_away(await slot.adapters.whole(loaded, None))
                    self._keep(slot)
        except ExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        for slot in self._spares:
            self._keep(slot)
            self._tasks.keep("idle spare", partial(self._end_when_idle, slot))

    async def _open(
        self, slot: PoolReplica, loaded: LoadedVersion, failed: set[PoolReplica]
    ) -> None:
        waits = not slot.placed
        try:
            await slot.open(loaded)
        except (CrayError, OSError):
            failed.add(slot)
            if not waits or len(failed) == len(self._slots) - self.away:
                raise
        self._keep(slot)

    def _keep(self, slot: PoolReplica) -> None:
        silence = partial(slot.keep_listening, self._silence_timeout)
        self._tasks.keep("replica watch", slot.keep_alive)
        self._tasks.keep("silence watch", silence)
        self._tasks.keep("place watch", slot.keep_place)

    async def stop(self) -> None:
        """End all replicas; requests in flight fail."""
        await self._tasks.close()
        await asyncio.gather(*(slot.close() for slot in self._all))

    def wake(self) -> None:
        """Let waiting requests look up their version again: a name's meaning has changed."""
        self._changes.notify()

    @contextmanager
    def rollback_waiting(self) -> Iterator[None]:
        """Make a change under way raise Overtaken while the block runs.

        The change stops waiting for requests and starts on no further replica. A replica whose
        weights are being loaded proves them first.
        """
        with self._changes.rollback_waiting():
            yield

    @property
    def ready(self) -> bool:
        """True if a replica can answer now, or will for the first request that comes."""
        return self.serving > 0 or 0 < len(self._slots) == self.away

    def published(self) -> PublishedPool:
        """Return the record of the pool for other gateways."""
        return PublishedPool(
            limits=self.limits,
            replicas=[slot.published() for slot in self._all],
            incumbent=self.incumbent,
            swapping=self.swapping,
        )

    async def publish(self, path: Path) -> None:
        """Let other gateways send requests to the same replicas, until cancelled."""
        self.shared = True
        await publish(self.published, self._changes, path)

    def fail(self, number: int, losses: int, why: str) -> None:
        """Note that another gateway found the engine of a replica, by its place, dead."""
        if 0 <= number < len(self._all):
            self._all[number].fail(losses, why)

    @property
    def away(self) -> int:
        """The number of replicas that gave their places back, until more are needed."""
        return sum(slot.state == "away" for slot in self._slots)

    def call_back(self) -> bool:
        """Start a replica that is away, first one that sleeps. Return False if none is."""
        slots = sorted(self._slots, key=lambda slot: slot.asleep or 3)
        return any(slot.come_back() for slot in slots)

    def give_back(self, *, sleep: bool = False) -> bool:
        """Let the least busy replica end its requests and leave its place; see `call_back`.

        With `sleep` it keeps its place and sleeps there, with its GPU's memory free for others.
        A version stays served, but for the incumbent alone on the last replica. Return False if no
        replica can leave now.
        """
        serving = [slot for slot in self._slots if slot.state == "serving"]
        count = Counter(version for slot in serving for version in slot.versions)
        last = len(serving) == 1 and serving[0].versions == [self._incumbent]
        spared = (slot for slot in serving if last or all(count[v] > 1 for v in slot.versions))
        free = [slot for slot in spared if slot.can_leave]
        if self.swapping or not free:
            return False
        slot = min(free, key=lambda slot: slot.in_flight)
        self._tasks.run("replica leave", slot.leave(sleep=sleep))
        return True

    async def _call_back_for_change(self, count: int) -> None:
        """Start replicas that are away until `count` are not, and wait for those."""
        called, count = False, min(count, len(self._slots))
        while len(self._slots) - self.away < count and self.call_back():
            called = True
        if called:
            with suppress(TimeoutError):  # the change then says that none can be spared
                await self._changes.wait_until(
                    lambda: sum(slot.state == "serving" for slot in self._slots) >= count,
                    self.wait_timeout,
                )

    @property
    def incumbent(self) -> str:
        """The version most recently loaded on all replicas."""
        return self._incumbent

    def expects(self, version: str) -> bool:
        """Tell whether a replica answers with a version now or after a change or a restart."""
        return any(s.loaded is not None and version in s.loaded.versions for s in self._all)

    def holds(self, version: str) -> bool:
        """Tell the same as `expects`, of the replicas without the spare ones."""
        return any(s.loaded is not None and version in s.loaded.versions for s in self._slots)

    def brings_back(self, version: str) -> bool:
        """Tell whether a replica that is away would start with a version."""
        return any(s.state == "away" and s.loaded and s.loaded.version == version
                   for s in self._slots)  # fmt: skip

    def checkpoints(self) -> set[Path]:
        """Return the directories that replicas hold, and would start again from."""
        loaded = [slot.loaded for slot in self._all if slot.loaded is not None]
        return {v.checkpoint for one in loaded for v in (one, *one.beside)}

    @property
    def swapping(self) -> bool:
        """True while weights are being changed."""
        return self._swapping.locked()

    def status(self) -> list[dict[str, Any]]:
        """Return a dict per replica: see `Replica.status`."""
        return [slot.status() for slot in self._slots]

    def spares_status(self) -> list[dict[str, Any]]:
        """Return a dict per spare replica that is started."""
        return [slot.status() for slot in self._spares if slot.loaded is not None]

    def engines(self) -> list[ReplicaServer]:
        """Return the server of each replica, and of each spare one that is started."""
        named = [(str(number), slot) for number, slot in enumerate(self._slots)]
        named += [(f"spare-{number}", slot) for number, slot in enumerate(self._spares)]
        return [slot.server(name) for name, slot in named if slot.loaded is not None]

    @property
    def turns(self) -> dict[str, float] | None:
        """The number of turns that others had on the GPUs, and all their seconds by phase."""
        return self._turns

    def note_turn(self, seconds: dict[str, float]) -> None:
        """Add a turn's seconds to `turns`."""
        before = self._turns or {}
        added = {"turns": 1.0} | seconds
        self._turns = before | {name: before.get(name, 0.0) + added[name] for name in added}

    @_to_the_end
    async def load_beside(
        self, checkpoint: Path, version: str, probe: list[ProbePrompt], protected: Collection[str]
    ) -> ProbeReport:
        """Serve a version without displacing another: as an adapter, or on a spare replica.

        `protected`: adapters that are not unloaded to make room. A load that has begun goes on if
        the caller is cancelled. Raises NotLoaded at once where neither way is possible; SwapError,
        EngineError.
        """
        new = LoadedVersion.create(checkpoint, version, probe, self._name_of)
        protected = {self._incumbent, self._former, self._candidate, *protected}
        adaptable = [slot for slot in self._slots if slot.can_load_as_adapter(new)]
        if adaptable:
            least_busy = min(adaptable, key=lambda slot: slot.in_flight)
            with suppress(PoolBusy):
                return await least_busy.add_adapter(new, protected)
        if not self._spares:
            raise NotLoaded(f"no replica holds {new.version}, and there is no spare one to load it")
        slot = min(self._spares, key=lambda s: (s.state == "serving", s.in_flight))
        if missing := slot.missing_resource(new):
            raise NotLoaded(
                f"no replica holds {new.version}, and a spare one cannot be started for lack of "
                f"{missing}"
            )
        try:
            return await slot.change(new)
        finally:
            if slot.state != "serving":
                await slot.shut_down()

    async def _end_when_idle(self, slot: PoolReplica) -> None:
        busy, since = -1.0, self._now()
        while True:
            await asyncio.sleep(self._spare_seconds / 10)
            if slot.requests.busy_seconds != busy or slot.state != "serving":
                busy, since = slot.requests.busy_seconds, self._now()
            elif self._now() - since >= self._spare_seconds:
                await slot.shut_down()
                busy = -1.0  # what is started next has a time of its own

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[dict[str, float]]:
        """Let all replicas sleep while the block runs: their GPUs are free for others.

        Requests in flight end first. Others wait, and so do changes of versions. Yields the seconds
        by phase (drain, sleep), to which those of the awakening are added: wake, load, prove. Each
        is the slowest replica's. A cancelled block leaves the replicas asleep. Raises PoolBusy or
        Overtaken, with all replicas serving, if requests do not end or a rollback waits.
        """
        async with self._swapping:
            seconds: dict[str, float] = {}
            sleeping, failed = [], []
            results = await asyncio.gather(
                *(slot.fall_asleep() for slot in self._all), return_exceptions=True
            )
            for slot, result in zip(self._all, results, strict=True):
                if isinstance(result, BaseException):
                    failed.append(result)
                else:
                    sleeping.append(slot)
                    _note_slowest(seconds, result)
            try:
                if failed:
                    raise failed[0]
                yield seconds
            except asyncio.CancelledError:  # the platform ends: the GPUs are still the others'
                raise
            except BaseException:
                await asyncio.gather(*(slot.wake_up() for slot in sleeping))
                raise
            for woken in await asyncio.gather(*(slot.wake_up() for slot in sleeping)):
                _note_slowest(seconds, woken)

    @_to_the_end
    async def stage(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        protected: Collection[str] = (),
        displace: bool = True,
    ) -> ProbeReport:
        """Load a candidate on the least busy replica, while the others keep serving.

        The last replica that serves the incumbent or a `protected` version is never changed. A
        single replica changes in place. An adapter over a replica's weights is loaded beside them
        and displaces nothing. If the version is the incumbent, replicas that hold another one load
        it again.

        Raises SwapError, with everything as before. Raises Displaces where a single replica serves
        a `protected` version and `displace` is False.
        """
        new = await LoadedVersion.verify_and_create(checkpoint, version, probe, self._name_of)
        async with self._swapping:
            await self._call_back_for_change(2)
            if len(self._slots) == 1 and not displace:
                self._check_room(self._slots, new, protected)
            keep, protected = self.swap_mode == "keep", {self._incumbent, *protected}
            if len(self._slots) == 1 or new.version == self._incumbent:
                protected_too = {self._former, *protected}
                await copy_weights(self._slots, new)
                report = await rolling_swap(
                    self._slots, new, keep=keep, share=self._swap_share, protected=protected_too
                )
            else:
                proofs = (slot.select_version(new.version) for slot in self._slots)
                report = next(filter(None, proofs), None) or await stage_on_one_slot(
                    self._slots, new, protected, former=self._former, keep=keep
                )
            self._candidate = new.version
            await self._unload_idle_adapters(protected)
            return report

    @_to_the_end
    async def receive(
        self, job: str, *, protected: Collection[str] = (), displace: bool = False
    ) -> bool:
        """Let a replica take the weights of a job that still writes its files.

        It answers nobody until `stage` or `swap` changes it. It goes back to the version that it
        served when the job offers its weights no more, and when a request needs that version.
        Without `displace` every version that is served stays served. With it, those of `stage` do:
        a single replica is changed. Returns False, with nothing changed, if the job offers no
        weights. Raises PoolBusy, or as `PoolReplica.receive`.
        """
        async with self._swapping:
            await self._call_back_for_change(2)
            served = {version for slot in self._slots for version in slot.versions}
            keep = {self._incumbent, *protected} if displace else served
            single = displace and len(self._slots) == 1
            free = self._slots if single else find_free_slots(self._slots, keep)
            slot = next((slot for slot in free if slot.state == "serving"), None)
            if slot is None:
                raise PoolBusy(f"the weights of {job} were not received: no replica can be spared")
            if not await slot.receive(job):
                return False
        self._tasks.keep("received weights", partial(slot.go_back_in_time, job), job)
        return True

    def recall(self, version: str) -> None:
        """Note that a request needs a version: replicas with received weights may have to go back.

        See `receive`.
        """
        if not self.serves(version):
            for slot in self._slots:
                slot.recall(version)

    @_to_the_end
    async def swap(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        replicas: Sequence[int] | None = None,
        protected: Collection[str] = (),
    ) -> ProbeReport:
        """Load a version on all replicas (or on those of the given indexes), a share at a time.

        See `rolling_swap`. A version on all replicas becomes the incumbent. An empty probe is
        accepted only for a checkpoint that no job trained. A swap that has begun goes on if the
        caller is cancelled. Raises Displaces where a `protected` version would lose its last
        replica.
        """
        new = await LoadedVersion.verify_and_create(checkpoint, version, probe, self._name_of)
        async with self._swapping:
            await self._call_back_for_change(1)
            chosen = self._slots if replicas is None else [self._slots[i] for i in replicas]
            self._check_room(chosen, new, protected)
            protected = {self._incumbent, self._former, self._candidate, *protected}
            keep = self.swap_mode == "keep"
            if new.version != self._former:  # a rollback does not wait for it
                await copy_weights(chosen, new)
            report = await rolling_swap(
                chosen, new, keep=keep, share=self._swap_share, protected=protected
            )
            if replicas is None and new.version != self._incumbent:
                self._former, self._incumbent = self._incumbent, new.version
            await self._unload_idle_adapters(protected)
            return report

    def _check_room(
        self, slots: Sequence[Replica], new: LoadedVersion, protected: Collection[str]
    ) -> None:
        """Raise Displaces where changing these slots would end serving a protected version."""
        changing = {
            slot
            for slot in slots
            if new.version not in slot.versions and not slot.can_load_as_adapter(new)
        }
        stays = {v for s in self._slots if s not in changing for v in s.versions}
        stays |= {v for s in changing for v in new.with_base(s.loaded).versions}
        served = {v for s in changing if s.loaded is not None for v in s.loaded.versions}
        gone = sorted(served & set(protected) - stays - {new.version})
        if gone:
            raise Displaces(
                f"{new.version} was not loaded: it would take {', '.join(gone)} off the last "
                "replica. Start the platform with more --replicas, or let an admin do it with "
                "`force`: what was staged so gives way again, what was promoted so stays"
            )

    async def _unload_idle_adapters(self, protected: Collection[str] = ()) -> None:
        """Unload the adapters of versions that are neither protected nor in recent use."""
        protected = {self._incumbent, self._former, self._candidate, *protected}
        await asyncio.gather(*(slot.unload_idle_adapters(protected) for slot in self._slots))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
