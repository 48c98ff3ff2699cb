"""Supervisor client: the HTTP by which slurm_replica.py gives a replica's supervisor its orders.

replica_supervisor.py answers. `PlacedEngine` is the engine that such a supervisor started, and
`LapseClock` tells when a supervisor that says nothing counts as dead.
"""

import ssl
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from cray_agents.records import Record
from cray_agents.runtime.pool.engine.vllm_engine import VllmEngine
from cray_agents.runtime.pool.engine.vllm_http import Http
from cray_agents.runtime.pool.engine.vllm_replica import EngineSettings
from cray_agents.runtime.pool.slot.golden_probe import weights_of
from cray_agents.runtime.pool.slurm.job_lease import STATE_SECONDS, TERM_HEADER, read_lease

ANSWER = 20.0  # seconds that a supervisor may take to carry out an order
_SILENT_LAPSES = 4  # times LAPSE that a supervisor may renew its lease without an answer


class SharePlace(Record):
    """The checkpoint and port by which a replica's further nodes start their shares."""

    checkpoint: str
    port: int


class SupervisorState(Record):
    """The state of a supervisor: see `ReplicaSupervisor`. Times are spans, in seconds."""

    serial: int
    starts: int
    alive: bool
    why: str
    url: str
    alias: str
    secret: str
    pid: int | None
    port: int | None
    share: SharePlace | None
    started_on: str
    version: str
    weights: str
    asleep: int
    leaving: bool
    joules: float | None
    seconds_left: float | None
    seconds: float | None


class SupervisorClient:
    """A supervisor over its HTTP. Close it when done.

    Each request names the controller's term. A supervisor refuses one that is lower than the
    highest it was told, so an engine that was taken over obeys its former controller no more.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        patience: float,
        term: Callable[[], int],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`patience`: seconds that an answer about its state may take, beside its own wait."""
        self._http = Http(url, secret, patience, tls)
        self._patience = patience
        self._term = term

    @property
    def term(self) -> int:
        """The controller's term."""
        return self._term()

    async def state(self, seen: int = -1, wait: float = STATE_SECONDS) -> SupervisorState:
        """Return the supervisor's state; `wait` so many seconds for news of the one `seen`."""
        path, limit = f"/state?seen={seen}&wait={wait:g}", wait + self._patience
        async with self._http.answer("GET", path, timeout=limit, headers=self._headers) as response:
            return SupervisorState.model_validate_json(await response.read())

    async def start(self, seconds: float, **body: str) -> SupervisorState:
        """Start an engine. Raises EngineError."""
        async with self._send("start", seconds, body) as response:
            return SupervisorState.model_validate_json(await response.read())

    async def order(self, name: str, seconds: float = ANSWER, **body: str) -> None:
        """Give an order. Raises EngineError."""
        async with self._send(name, seconds, body) as response:
            await response.read()

    def _send(
        self, name: str, seconds: float, body: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        path = f"/{name}"
        return self._http.answer("POST", path, body, seconds, once=True, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {TERM_HEADER: str(self.term)}

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()


class PlacedEngine(VllmEngine):
    """An engine whose supervisor notes its weights, for the platform that may take it over.

    Its guard and its supervisor obey no controller of a lower term than one before.
    """

    def __init__(
        self,
        supervisor: SupervisorClient,
        state: SupervisorState,
        s: EngineSettings,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(
            state.url,
            state.alias,
            state.secret,
            timeout=s.answer_timeout,
            load_timeout=s.load_timeout,
            transfer=s.transfer,
            tls=tls,
        )
        self._supervisor = supervisor

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """Load weights: see `VllmEngine.load`."""
        await self._supervisor.order("note", version="", weights="")
        seconds = await super().load(checkpoint, version, keep=keep)
        await self._supervisor.order("note", version=version, weights=weights_of(checkpoint))
        return seconds

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back: see `VllmEngine.sleep`. Who takes it over reads files."""
        await self._supervisor.order("note", version="", weights="", asleep=str(level))
        await super().sleep(level)

    async def wake(self, checkpoint: Path, version: str) -> None:
        """Take the GPU's memory again: see `VllmEngine.wake`."""
        await super().wake(checkpoint, version)
        weights = weights_of(checkpoint) if self._weights else ""
        await self._supervisor.order("note", version=version if weights else "", weights=weights)

    async def receive(self, job: str, like: Path) -> None:
        """Take weights that are not published yet: see `VllmEngine.receive`."""
        await self._supervisor.order("note", version="", weights="")
        await super().receive(job, like)

    async def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        return await super()._order(order | {"term": self._supervisor.term})


class LapseClock:
    """The time since a silent supervisor's last heartbeat, by this host's clock.

    A supervisor that renews its lease and does not answer is given up later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._beat = -1
        self._silent_since = self._renewed = time.monotonic()

    def lapsed(self, folder: Path) -> bool:
        """Tell whether the lease in an attempt's folder has lapsed. Call it again and again."""
        now, lease = time.monotonic(), read_lease(folder)
        if lease is not None and lease.beat != self._beat:
            self._beat, self._renewed = lease.beat, now
        return (
            now - self._renewed > self._seconds
            or now - self._silent_since > _SILENT_LAPSES * self._seconds
        )
