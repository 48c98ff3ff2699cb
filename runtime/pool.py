"""Pool: the replicas, which version each holds, and how a version is changed with no request lost.

The gateway calls `answer`, `swap` and `status`. A version is admitted to serve on a replica
only after its golden probe matched there (proof.py). seat.py knows how one replica changes or
revives; this module routes requests and rolls a swap over the seats.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from cray_agents.errors import EngineUnavailable, SwapError
from cray_agents.ports import Exchange
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.proof import was_trained
from cray_agents.runtime.seat import Held, Host, News, Seat

Wanted = str | Callable[[], str]  # name@N, or what to ask for it each time a replica could serve

_RETRY = 0.2  # seconds before a request is given to a replica again after one was unavailable


class Pool:
    """Replicas behind one door. `hosts` are `Replica`s, or `Resident`s around a scripted engine.

    `tolerance`: largest allowed |logprob difference| on a probe; 1e-3 suits float32, 0.1 bf16 and
    fp16. `wait_timeout`: seconds a request waits for its version. `drain_timeout`: seconds a swap
    waits for the requests in flight before it gives up and changes nothing.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        tolerance: float = 1e-3,
        wait_timeout: float = 120.0,
        drain_timeout: float = 600.0,
    ) -> None:
        self._news = News()
        self._seats = [Seat(host, tolerance, drain_timeout, self._news) for host in hosts]
        self._wait_timeout = wait_timeout
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> None:
        """Start all replicas on a version and prove it. Raises SetupError, EngineError, SwapError.

        From then on, a replica that dies is brought back with what it held, until `stop`.
        """
        held = _checked(checkpoint, version, probe)
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
        return any(
            seat.state == "serving" and seat.held is not None and seat.held.version == version
            for seat in self._seats
        )

    @property
    def swapping(self) -> bool:
        """Whether weights are being changed."""
        return self._swapping.locked()

    def status(self) -> list[dict[str, Any]]:
        """A dict per replica: version, state, in_flight, restarts, pid, port, probe, error."""
        return [seat.status() for seat in self._seats]

    async def answer(self, version: Wanted, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """See `Engine.answer`; the exchange's version becomes that which answers.

        A replica that dies while nothing has been sent is waited for, or another one asked: to
        sample again is safe then. Raises EngineError and its kinds.
        """
        deadline = self._deadline()
        while True:
            sent, exchange.samples = False, []
            async with self._admit(version, deadline) as (seat, held):
                exchange.version = held.version
                try:
                    async with aclosing(seat.engine.answer(exchange)) as pieces:
                        async for piece in pieces:
                            sent = True
                            yield piece
                    return
                except EngineUnavailable:
                    if sent or self._now() > deadline:
                        raise
            await asyncio.sleep(_RETRY)

    async def swap(
        self,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        *,
        replicas: Sequence[int] | None = None,
    ) -> ProbeReport:
        """Let all replicas (or those of the given indexes) hold a version, one after the other.

        Returns the worst of their reports; all passed. Raises SwapError: then every replica serves
        what it served before. An empty probe is accepted only of a checkpoint that no job made.
        Once begun, it goes on if the caller is cancelled.
        """
        held = _checked(checkpoint, version, probe)
        chosen = [self._seats[i] for i in replicas] if replicas is not None else self._seats
        return await asyncio.shield(self._spawn(self._roll(chosen, held)))

    async def _roll(self, seats: Sequence[Seat], new: Held) -> ProbeReport:
        async with self._swapping:
            reports: list[ProbeReport] = []
            done: list[tuple[Seat, Held | None]] = []
            for seat in seats:
                before = seat.held
                try:
                    reports.append(await seat.change(new))
                except SwapError:
                    for other, old in reversed(done):
                        if old is not None:
                            await other.change(old)
                    raise
                done.append((seat, before))
            return max(reports, key=lambda report: report.max_logprob_diff)

    @asynccontextmanager
    async def _admit(self, version: Wanted, deadline: float) -> AsyncIterator[tuple[Seat, Held]]:
        seat, held = await self._pick(version, deadline)
        seat.in_flight += 1
        try:
            yield seat, held
        finally:
            seat.in_flight -= 1
            if not seat.in_flight:
                self._news.tell()

    async def _pick(self, version: Wanted, deadline: float) -> tuple[Seat, Held]:
        """The least busy seat that holds the version; nothing happens between choice and return."""
        while True:
            wanted = version if isinstance(version, str) else version()
            fit = [
                (seat.in_flight, index)
                for index, seat in enumerate(self._seats)
                if seat.state == "serving" and seat.held is not None and seat.held.version == wanted
            ]
            if fit:
                seat = self._seats[min(fit)[1]]
                if seat.held is not None:
                    return seat, seat.held
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                states = ", ".join(
                    f"{seat.held.version if seat.held else 'nothing'} ({seat.state})"
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


def _checked(checkpoint: Path, version: str, probe: list[ProbePrompt]) -> Held:
    if not probe and was_trained(checkpoint):
        raise SwapError(
            f"{version} was made by a training job and brings no golden probe: it cannot "
            f"be proven. Train it again, or look at {checkpoint / 'manifest.json'}"
        )
    return Held(version, checkpoint, tuple(probe))
