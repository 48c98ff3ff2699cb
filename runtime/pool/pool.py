"""Pool: the replicas, which version each holds, and how a version is changed with no request lost.

The gateway calls `answer`, `stage`, `swap` and `status`. A version is admitted to serve on a
replica only after its golden probe matched there (proof.py). This module routes requests; roll.py
knows which replica changes when, seat.py how one changes or revives.
"""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from cray_agents.errors import (
    Displaces,
    EngineError,
    EngineUnavailable,
    NotLoaded,
    Overtaken,
    PoolBusy,
    SwapError,
)
from cray_agents.ports import EngineCall
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.pool.engine_host import EngineHost
from cray_agents.runtime.pool.golden_probe import LoadedVersion
from cray_agents.runtime.pool.in_flight import News
from cray_agents.runtime.pool.replica_slot import ReplicaSlot


async def roll(
    seats: Sequence[ReplicaSlot], new: LoadedVersion, *, keep: bool, needed: Collection[str] = ()
) -> ProbeReport:
    """Let all seats hold a version; those that serve it already are left alone.

    `keep` and `needed`: see `Seat.change`.
    Returns the worst report; all passed. A replica that cannot prove what others could is left
    out. Raises SwapError if none could: then each serves what it served before. Raises Overtaken
    where a rollback waits: then those that had not begun serve what they served before.
    """
    reports: list[ProbeReport] = []
    failed: list[tuple[ReplicaSlot, SwapError]] = []
    for seat in sorted(seats, key=lambda s: (new.version not in s.versions, bool(s.versions))):
        if (report := seat.turn_to(new.version)) is not None:
            reports.append(report)
            continue
        try:
            reports.append(await seat.change(new, keep=keep, go_back=not reports, needed=needed))
        except Overtaken:
            raise
        except SwapError as error:
            failed.append((seat, error))
    if not reports:
        errors = [error for _, error in failed]
        raise next((error for error in errors if not isinstance(error, PoolBusy)), errors[0])
    for seat, why in failed:
        if seat.state != "out":  # it went back when nobody had proven the new version yet
            await seat.leave_out(new, str(why))
    return max(reports, key=lambda report: report.max_logprob_diff)


async def stage(
    seats: Sequence[ReplicaSlot],
    new: LoadedVersion,
    needed: Collection[str],
    *,
    former: str,
    keep: bool,
) -> ProbeReport:
    """Let one seat hold a candidate: the least busy that the needed versions can do without.

    Where it is an adapter over what seats hold, any of them will do, and of the adapters there
    `former` stays too.
    Where one that served nothing cannot prove it, that seat is to blame, and the next is asked.
    Raises SwapError; PoolBusy when there is none to spare.
    """
    over = sorted(
        (seat for seat in seats if seat.adapts(new)),
        key=lambda seat: (seat.version in needed, seat.in_flight),
    )
    if over:
        return await over[0].change(new, needed={former, *needed})
    left = list(seats)
    free = spare(left, needed)
    if not free:
        raise PoolBusy(
            f"no replica can be spared: each is the only one that serves one of "
            f"{', '.join(sorted(needed))}. Start the platform with more --replicas, or end the "
            "canary first"
        )
    while True:
        seat, served = free[0], free[0].versions
        try:
            return await seat.change(new, keep=keep)
        except Overtaken:
            raise
        except SwapError:
            left.remove(seat)
            free = spare(left, needed)
            if served or not free:
                raise


def spare(seats: Sequence[ReplicaSlot], needed: Collection[str]) -> list[ReplicaSlot]:
    """The seats of which any can be taken while each needed version is served on; best first."""
    count = Counter(version for seat in seats for version in seat.versions)
    used = {seat: [v for v in seat.versions if v in needed] for seat in seats}
    free = [seat for seat in seats if all(count[v] > 1 for v in used[seat])]
    return sorted(free, key=lambda seat: (bool(used[seat]), seat.in_flight))


Wanted = str | Callable[[], str]  # name@N, or what to ask for it each time a replica could serve
SwapMode = Literal["drain", "keep"]  # what requests in flight do when weights change

_RETRY = 0.2  # seconds before a request is given to a replica again after one was unavailable
_DEATHS = 2  # of engines, with the same request in flight


class _Suspicion:
    """Whether a request is what engines died of, by who was there when they did.

    One that was there alone twice has killed them. One that was there twice in company is asked
    again when no other such one is, and has killed the engine that dies then.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self._holds = False
        self._deaths = 0
        self._alone = 0

    async def wait(self) -> None:
        """Return when it may be asked (again)."""
        if self._deaths >= _DEATHS and not self._holds:
            await self._turn.acquire()
            self._holds = True

    def add(self, alone: bool, why: str) -> None:
        """An engine died with it. Raises EngineError if it is to blame."""
        self._deaths += 1
        self._alone += alone
        if self._holds or self._alone >= _DEATHS:
            raise EngineError(
                f"the engine died {self._deaths} times while it answered this request, which is not"
                f" sent to it again: {why}",
                status=500,
                code="engine_died",
            )

    def end(self) -> None:
        """It is over: the next one's turn."""
        if self._holds:
            self._turn.release()


class Pool:
    """Replicas behind one door. `hosts` are `Replica`s, or `Resident`s around a scripted engine.

    `tolerance`: largest allowed |logprob difference| on a probe; 1e-3 suits float32, 0.1 bf16 and
    fp16. `wait_timeout`: seconds a request waits for its version. `drain_timeout`: seconds a swap
    waits for the requests in flight before it gives up and changes nothing. `swap_mode` "keep":
    it does not wait, and they go on under the new weights; `Sampled.seams` tell where.
    `silence_timeout`: seconds after which a replica that says nothing is given up and restarted.
    `spares` are started when a version is asked for that no other holds (`load_beside`), and ended
    when nobody asked for `spare_seconds`; no promotion and no candidate is loaded there.
    """

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        *,
        tolerance: float = 1e-3,
        wait_timeout: float = 120.0,
        drain_timeout: float = 600.0,
        swap_mode: SwapMode = "drain",
        silence_timeout: float = 60.0,
        spares: Sequence[EngineHost] = (),
        spare_seconds: float = 600.0,
    ) -> None:
        self._news = News()
        self._seats = [ReplicaSlot(host, tolerance, drain_timeout, self._news) for host in hosts]
        self._spares = [ReplicaSlot(host, tolerance, drain_timeout, self._news) for host in spares]
        self._all = [*self._seats, *self._spares]
        self._spare_seconds = spare_seconds
        self.swap_mode: SwapMode = swap_mode
        self._incumbent = ""  # the version that all replicas were last given
        self._former = ""  # ... before: what a rollback would want
        self._candidate = ""  # the version that was staged last
        self._wait_timeout = wait_timeout
        self._silence_timeout = silence_timeout
        self._suspects = asyncio.Lock()  # they are asked again one at a time
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> None:
        """Start all replicas on a version and prove it. Raises SetupError, EngineError, SwapError.

        From then on, a replica that dies is brought back with what it held, until `stop`.
        """
        held = await LoadedVersion.proven(checkpoint, version, probe)
        self._incumbent = self._candidate = version
        try:
            async with asyncio.TaskGroup() as group:
                for seat in self._seats:
                    group.create_task(seat.open(held))
        except ExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        for seat in self._all:
            self._spawn(seat.keep())
            self._spawn(seat.watch(self._silence_timeout))
        for seat in self._spares:
            self._spawn(self._end_when_idle(seat))

    async def stop(self) -> None:
        """End all replicas; requests in flight fail."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(seat.close() for seat in self._all))

    def wake(self) -> None:
        """A name's meaning has changed: let waiting requests ask for it again."""
        self._news.tell()

    @contextmanager
    def overtaking(self) -> Iterator[None]:
        """Meanwhile a change under way ends with Overtaken where it would wait or go on.

        It waits for no request any more and begins with no further replica; one whose weights are
        being loaded proves them first.
        """
        self._news.overtaking += 1
        self._news.tell()
        try:
            yield
        finally:
            self._news.overtaking -= 1

    @property
    def ready(self) -> bool:
        """Whether a replica can answer now."""
        return self.serving > 0

    @property
    def serving(self) -> int:
        """How many replicas can answer now."""
        return sum(seat.state == "serving" for seat in self._all)

    @property
    def incumbent(self) -> str:
        """The version that all replicas were last given."""
        return self._incumbent

    def serves(self, version: str) -> bool:
        """Whether a replica can answer with that version now."""
        return any(version in seat.versions for seat in self._all)

    def expects(self, version: str) -> bool:
        """Whether a replica will answer with that version, when it has changed or come back."""
        return any(s.held is not None and version in s.held.versions for s in self._all)

    def holds(self, version: str) -> bool:
        """The same, of the replicas that are no spares."""
        return any(s.held is not None and version in s.held.versions for s in self._seats)

    @property
    def swapping(self) -> bool:
        """Whether weights are being changed."""
        return self._swapping.locked()

    def status(self) -> list[dict[str, Any]]:
        """A dict per replica: see `Seat.status`."""
        return [seat.status() for seat in self._seats]

    def spares(self) -> list[dict[str, Any]]:
        """The same of the spares that were started."""
        return [seat.status() for seat in self._spares if seat.held is not None]

    async def load_beside(
        self, checkpoint: Path, version: str, probe: list[ProbePrompt], needed: Collection[str]
    ) -> ProbeReport:
        """Serve a version where it displaces nothing: as an adapter, or by a spare replica.

        `needed`: adapters that do not make room for it. Raises NotLoaded at once where that cannot
        be; SwapError, EngineError. Once begun, it goes on if the caller is cancelled.
        """
        held = LoadedVersion.of(checkpoint, version, probe)
        return await asyncio.shield(self._spawn(self._load_beside(held, needed)))

    async def _load_beside(self, new: LoadedVersion, needed: Collection[str]) -> ProbeReport:
        needed = {self._incumbent, self._former, self._candidate, *needed}
        over = sorted((s for s in self._seats if s.adapts(new)), key=lambda s: s.in_flight)
        if over:
            with suppress(PoolBusy):
                return await over[0].add(new, needed)
        if not self._spares:
            raise NotLoaded(f"no replica holds {new.version}, and there is no spare one to load it")
        seat = min(self._spares, key=lambda s: (s.state == "serving", s.in_flight))
        if lacking := seat.lacks(new):
            raise NotLoaded(
                f"no replica holds {new.version}, and a spare one cannot be started for lack of "
                f"{lacking}"
            )
        try:
            return await seat.change(new)
        finally:
            if seat.state != "serving":
                await seat.cool()

    async def _end_when_idle(self, seat: ReplicaSlot) -> None:
        busy, since = -1.0, self._now()
        while True:
            await asyncio.sleep(self._spare_seconds / 10)
            if seat.occupancy.busy_seconds != busy or seat.state != "serving":
                busy, since = seat.occupancy.busy_seconds, self._now()
            elif self._now() - since >= self._spare_seconds:
                await seat.cool()

    async def answer(self, version: Wanted, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """See `Engine.answer`; the exchange's version becomes that which answers.

        A replica that dies while nothing has been sent is waited for, or another one asked: to
        sample again is safe then. But what was there when an engine died may have killed it, and is
        not sent for ever: see `_Suspicion`. Raises EngineError and its kinds.
        """
        deadline = self._deadline()
        suspicion = _Suspicion(self._suspects)
        try:
            while True:
                sent, exchange.samples = False, []
                await suspicion.wait()
                async with self._admit(version, deadline) as (seat, exchange.version):
                    losses, alone = seat.losses, seat.in_flight == 1
                    try:
                        answer = seat.engine(exchange.version).answer(exchange)
                        async with aclosing(answer) as pieces:
                            async for piece in pieces:
                                sent = True
                                yield piece
                        return
                    except EngineUnavailable as error:
                        if (
                            error.status >= 500
                        ):  # its server lives, and says that the engine does not
                            seat.fail(losses, "its engine died")
                        if sent or self._now() > deadline:
                            raise
                        alone = alone and seat.in_flight == 1
                if await seat.lost(losses, _RETRY):
                    suspicion.add(alone, seat.why_lost)
        finally:
            suspicion.end()

    async def stage(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        needed: Collection[str] = (),
        displace: bool = True,
    ) -> ProbeReport:
        """Let one replica hold a candidate, the least busy, while the others serve on.

        The last replica that serves the incumbent, or a `needed` version, is never taken. A single
        replica changes in place. An adapter over what a replica holds is loaded beside that, and
        displaces nothing. Where the version is the incumbent, the replicas that hold another one
        go back to it. Raises SwapError: then all is as before. Displaces: not to `displace`, a
        single replica that serves a `needed` version is not changed in place.
        """
        held = await LoadedVersion.proven(checkpoint, version, probe)
        return await asyncio.shield(self._spawn(self._stage(held, needed, displace)))

    async def swap(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        replicas: Sequence[int] | None = None,
        needed: Collection[str] = (),
    ) -> ProbeReport:
        """Let all replicas (or those of the given indexes) hold a version, one after the other.

        See `roll`. Swapped to by all, it is the incumbent. An empty probe is accepted only of a
        checkpoint that no job made. Once begun, it goes on if the caller is cancelled. Raises
        Displaces where a `needed` version would be served no more.
        """
        held = await LoadedVersion.proven(checkpoint, version, probe)
        return await asyncio.shield(self._spawn(self._swap(held, replicas, needed)))

    async def _stage(
        self, new: LoadedVersion, needed: Collection[str], displace: bool
    ) -> ProbeReport:
        async with self._swapping:
            if len(self._seats) == 1 and not displace:
                self._check_room(self._seats, new, needed)
            keep, needed = self.swap_mode == "keep", {self._incumbent, *needed}
            if len(self._seats) == 1 or new.version == self._incumbent:
                report = await roll(self._seats, new, keep=keep, needed={self._former, *needed})
            else:
                turned = (seat.turn_to(new.version) for seat in self._seats)
                report = next((report for report in turned if report), None) or await stage(
                    self._seats, new, needed, former=self._former, keep=keep
                )
            self._candidate = new.version
            await self._tidy(needed)
            return report

    def _check_room(
        self, seats: Sequence[ReplicaSlot], new: LoadedVersion, needed: Collection[str]
    ) -> None:
        """Raises Displaces where a needed version would be gone when these seats hold a new one."""
        change = {s for s in seats if new.version not in s.versions and not s.adapts(new)}
        stays = {v for s in self._seats if s not in change for v in s.versions}
        served = {v for s in change if s.held is not None for v in s.held.versions}
        gone = sorted(served & set(needed) - stays - {new.version})
        if gone:
            raise Displaces(
                f"{new.version} was not loaded: it would take {', '.join(gone)} off the last "
                "replica. Start the platform with more --replicas, or let an admin do it with "
                "`force`: what was staged so gives way again, what was promoted so stays"
            )

    async def _swap(
        self, new: LoadedVersion, replicas: Sequence[int] | None, others: Collection[str]
    ) -> ProbeReport:
        async with self._swapping:
            chosen = self._seats if replicas is None else [self._seats[i] for i in replicas]
            self._check_room(chosen, new, others)
            needed = {self._incumbent, self._former, self._candidate, *others}
            report = await roll(chosen, new, keep=self.swap_mode == "keep", needed=needed)
            if replicas is None and new.version != self._incumbent:
                self._former, self._incumbent = self._incumbent, new.version
            await self._tidy(needed)
            return report

    async def _tidy(self, needed: Collection[str] = ()) -> None:
        """Unload the adapters that nobody will want."""
        needed = {self._incumbent, self._former, self._candidate, *needed}
        await asyncio.gather(*(seat.tidy(needed) for seat in self._seats))

    @asynccontextmanager
    async def _admit(
        self, version: Wanted, deadline: float
    ) -> AsyncIterator[tuple[ReplicaSlot, str]]:
        seat, found = await self._pick(version, deadline)
        with seat.occupancy.occupied(found):
            yield seat, found

    async def _pick(self, version: Wanted, deadline: float) -> tuple[ReplicaSlot, str]:
        """The least busy seat that holds the version; nothing happens between choice and return."""
        while True:
            wanted = version if isinstance(version, str) else version()
            fit = [
                (seat.in_flight, index)
                for index, seat in enumerate(self._all)
                if wanted in seat.versions
            ]
            if fit:
                return self._all[min(fit)[1]], wanted
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                states = ", ".join(
                    f"{' and '.join(seat.held.versions) if seat.held else 'nothing'} ({seat.state})"
                    for seat in self._seats
                )
                raise EngineUnavailable(
                    f"no replica served {wanted} within {self._wait_timeout:g} s; "
                    f"the replicas hold: {states}"
                ) from None

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _deadline(self) -> float:
        return self._now() + self._wait_timeout

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
