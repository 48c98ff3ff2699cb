"""Pool: the replicas, which version each holds, and how a version is changed with no request lost.

The gateway calls `answer`, `stage`, `swap` and `status`. A version is admitted to serve on a
replica only after its golden probe matched there (proof.py). This module routes requests; roll.py
knows which replica changes when, seat.py how one changes or revives.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

from cray_agents.errors import EngineUnavailable
from cray_agents.ports import Exchange
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.held import Held
from cray_agents.runtime.host import Host
from cray_agents.runtime.occupancy import News
from cray_agents.runtime.roll import roll, stage
from cray_agents.runtime.seat import Seat

Wanted = str | Callable[[], str]  # name@N, or what to ask for it each time a replica could serve
SwapMode = Literal["drain", "keep"]  # what requests in flight do when weights change

_RETRY = 0.2  # seconds before a request is given to a replica again after one was unavailable


class Pool:
    """Replicas behind one door. `hosts` are `Replica`s, or `Resident`s around a scripted engine.

    `tolerance`: largest allowed |logprob difference| on a probe; 1e-3 suits float32, 0.1 bf16 and
    fp16. `wait_timeout`: seconds a request waits for its version. `drain_timeout`: seconds a swap
    waits for the requests in flight before it gives up and changes nothing. `swap_mode` "keep":
    it does not wait, and they go on under the new weights; `Sampled.seams` tell where.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        tolerance: float = 1e-3,
        wait_timeout: float = 120.0,
        drain_timeout: float = 600.0,
        swap_mode: SwapMode = "drain",
    ) -> None:
        self._news = News()
        self._seats = [Seat(host, tolerance, drain_timeout, self._news) for host in hosts]
        self.swap_mode: SwapMode = swap_mode
        self._incumbent = ""  # the version that all replicas were last given
        self._former = ""  # ... before: what a rollback would want
        self._candidate = ""  # the version that was staged last
        self._wait_timeout = wait_timeout
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> None:
        """Start all replicas on a version and prove it. Raises SetupError, EngineError, SwapError.

        From then on, a replica that dies is brought back with what it held, until `stop`.
        """
        held = Held.of(checkpoint, version, probe)
        self._incumbent = self._candidate = version
        try:
            async with asyncio.TaskGroup() as group:
                for seat in self._seats:
                    group.create_task(seat.open(held))
        except ExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        for seat in self._seats:
            self._spawn(seat.keep())

    async def stop(self) -> None:
        """End all replicas; requests in flight fail."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(seat.close() for seat in self._seats))

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
        return sum(seat.state == "serving" for seat in self._seats)

    def serves(self, version: str) -> bool:
        """Whether a replica can answer with that version now."""
        return any(version in seat.versions for seat in self._seats)

    @property
    def swapping(self) -> bool:
        """Whether weights are being changed."""
        return self._swapping.locked()

    def status(self) -> list[dict[str, Any]]:
        """A dict per replica: see `Seat.status`."""
        return [seat.status() for seat in self._seats]

    async def answer(self, version: Wanted, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """See `Engine.answer`; the exchange's version becomes that which answers.

        A replica that dies while nothing has been sent is waited for, or another one asked: to
        sample again is safe then. Raises EngineError and its kinds.
        """
        deadline = self._deadline()
        while True:
            sent, exchange.samples = False, []
            async with self._admit(version, deadline) as (seat, exchange.version):
                try:
                    answer = seat.engine(exchange.version).answer(exchange)
                    async with aclosing(answer) as pieces:
                        async for piece in pieces:
                            sent = True
                            yield piece
                    return
                except EngineUnavailable:
                    if sent or self._now() > deadline:
                        raise
            await asyncio.sleep(_RETRY)

    async def stage(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        needed: Collection[str] = (),
    ) -> ProbeReport:
        """Let one replica hold a candidate, the least busy, while the others serve on.

        The last replica that serves the incumbent, or a `needed` version, is never taken. A single
        replica changes in place. An adapter over what a replica holds is loaded beside that, and
        displaces nothing. Where the version is the incumbent, the replicas that hold another one
        go back to it. Raises SwapError: then all is as before.
        """
        held = Held.of(checkpoint, version, probe)
        return await asyncio.shield(self._spawn(self._stage(held, needed)))

    async def swap(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        replicas: Sequence[int] | None = None,
    ) -> ProbeReport:
        """Let all replicas (or those of the given indexes) hold a version, one after the other.

        See `roll`. Swapped to by all, it is the incumbent. An empty probe is accepted only of a
        checkpoint that no job made. Once begun, it goes on if the caller is cancelled.
        """
        held = Held.of(checkpoint, version, probe)
        return await asyncio.shield(self._spawn(self._swap(held, replicas)))

    async def _stage(self, new: Held, needed: Collection[str]) -> ProbeReport:
        async with self._swapping:
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

    async def _swap(self, new: Held, replicas: Sequence[int] | None) -> ProbeReport:
        async with self._swapping:
            chosen = self._seats if replicas is None else [self._seats[i] for i in replicas]
            needed = {self._incumbent, self._former, self._candidate}
            report = await roll(chosen, new, keep=self.swap_mode == "keep", needed=needed)
            if replicas is None and new.version != self._incumbent:
                self._former, self._incumbent = self._incumbent, new.version
            await self._tidy()
            return report

    async def _tidy(self, needed: Collection[str] = ()) -> None:
        """Unload the adapters that nobody will want."""
        needed = {self._incumbent, self._former, self._candidate, *needed}
        await asyncio.gather(*(seat.tidy(needed) for seat in self._seats))

    @asynccontextmanager
    async def _admit(self, version: Wanted, deadline: float) -> AsyncIterator[tuple[Seat, str]]:
        seat, found = await self._pick(version, deadline)
        with seat.occupancy.occupied(found):
            yield seat, found

    async def _pick(self, version: Wanted, deadline: float) -> tuple[Seat, str]:
        """The least busy seat that holds the version; nothing happens between choice and return."""
        while True:
            wanted = version if isinstance(version, str) else version()
            fit = [
                (seat.in_flight, index)
                for index, seat in enumerate(self._seats)
                if wanted in seat.versions
            ]
            if fit:
                return self._seats[min(fit)[1]], wanted
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
