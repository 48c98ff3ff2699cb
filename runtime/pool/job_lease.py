"""Job lease: how a replica's Slurm job and the gateway find each other, and speak.

    replicas/<n>/<attempt>/spec.json    the order, written once by the gateway that submits the job
    replicas/<n>/<attempt>/secret       written by the supervisor, for its own user's eyes (0600)
    replicas/<n>/<attempt>/lease.json   where the supervisor listens, with its heartbeat
    replicas/<n>/<attempt>/job.txt, engine.txt   what supervisor and engine say

Attempts of a replica are numbered. A number is claimed by making its folder, and a job claims its
attempt by making the secret, so neither is ever used twice. Then slurm_replica.py gives orders by
HTTP (`SupervisorClient`), and replica_supervisor.py answers.
"""

import fcntl
import json
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from cray_agents.errors import Corrupt, SetupError
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.pool.golden_probe import weights_of
from cray_agents.runtime.pool.start_phases import StartPhase
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import Http
from cray_agents.runtime.pool.vllm_process import EngineSettings

HEARTBEAT_INTERVAL = 2.0  # seconds between two writes of a lease
ANSWER = 20.0  # seconds that a supervisor may take to carry out an order
_SILENT_LAPSES = 4  # times LAPSE that a supervisor may renew its lease without an answer
STATE_SECONDS = 5.0  # that a supervisor waits for news when it is asked for its state
SPEC, SECRET, LEASE = "spec.json", "secret", "lease.json"
TERM_HEADER = "x-cray-term"  # the term of the controller that asks a supervisor
JOB_PREFIX = "replica-"  # of the names of replicas' jobs
ATTEMPTS_KEPT = 5  # folders of a replica
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, of Linux


class ReplicaSpec(Record):
    """The order of a replica's job.

    `gateway`: the name of the host that submitted it. `interface`: the network interface to listen
    on; None: the one that leads to the gateway's host. `tls`: the folder with the CA of its servers
    (replica_certificates.py); None: no TLS. `nodes`: over which each server spreads.
    `minutes`: the job's time limit; None: none.
    `keep_minutes`: it ends after so long without a gateway.
    """

    model: str
    number: int
    attempt: int
    settings: EngineSettings
    gateway: str
    package: str
    interface: str | None = None
    tls: Path | None = None
    nodes: int = 1
    minutes: int | None = None
    keep_minutes: float = 10.0

    @property
    def job_name(self) -> str:
        """The unique name of the attempt's job."""
        return f"{JOB_PREFIX}{self.number}-{self.attempt}"

    def serves_like(self, other: "ReplicaSpec") -> bool:
        """Tell whether two specs differ in attempt and submitting host alone."""
        return self == other.model_copy(update={"attempt": self.attempt, "gateway": self.gateway})


class JobLease(Record):
    """The lease of a replica's job, while its supervisor lives.

    The supervisor listens on `address` and `port`, with `tls` or without. `version` is what its
    engine was last loaded with; "" while it loads or sleeps. `asleep`: the level of its sleep.
    `beat` grows with each heartbeat, written at `time`. `ends_at`: the end of the job's time, in
    unix seconds.
    """

    address: str
    port: int
    host: str
    pid: int
    attempt: int
    job: str | None = None
    gpus: str | None = None
    version: str = ""
    asleep: int = 0
    beat: int = 0
    time: float = 0.0
    ends_at: float | None = None
    tls: bool = False

    @property
    def url(self) -> str:
        """The supervisor's URL."""
        return f"{'https' if self.tls else 'http'}://{self.address}:{self.port}"


def attempts(folder: Path) -> list[int]:
    """Return the numbers of a replica's attempts, oldest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def new_attempt(folder: Path, spec: ReplicaSpec) -> ReplicaSpec:
    """Claim the next attempt of a replica, write its spec, and delete the oldest folders."""
    numbers = attempts(folder)
    number = numbers[-1] if numbers else 0
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number += 1
        with suppress(FileExistsError):
            (folder / str(number)).mkdir()
            break
    spec = spec.model_copy(update={"attempt": number})
    durable.replace_file(folder / str(number) / SPEC, checksums.record_text(spec))
    for old in numbers[: -ATTEMPTS_KEPT + 1]:
        durable.remove(folder / str(old))
    return spec


def read_spec(folder: Path) -> ReplicaSpec | None:
    """Return the spec in an attempt's folder; None if there is none, or of an unknown form."""
    try:
        return checksums.read_record(ReplicaSpec, folder / SPEC)
    except (OSError, Corrupt):
        return None


def read_lease(folder: Path) -> JobLease | None:
    """Return the lease in an attempt's folder; None before its first heartbeat."""
    if LEASE not in durable.names_in(folder):
        return None
    try:
        return checksums.read_record(JobLease, folder / LEASE)
    except (OSError, Corrupt):
        return None


def write_lease(folder: Path, lease: JobLease) -> None:
    """Write a heartbeat. Raises OSError."""
    durable.replace_file(folder / LEASE, checksums.record_text(lease), 0o600)


def create_secret(folder: Path, secret: str) -> bool:
    """Claim an attempt with its secret. Return False if another process has claimed it."""
    try:
        handle = os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(secret)
        file.flush()
        os.fsync(handle)
    return True


def own_address(interface: str | None, gateway: str) -> str:
    """Return the IPv4 address of this machine that a replica's servers listen on.

    `interface`: its network interface, such as `ib0`. Without one: loopback on the gateway's own
    host, else the address from which this machine reaches the gateway's. Raises SetupError.
    """
    if interface is None and socket.gethostname() == gateway:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if interface is None:
                probe.connect((gateway, 9))  # sends nothing: it looks up the route
                return str(probe.getsockname()[0])
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, request)
            return socket.inet_ntoa(answer[20:24])
    except OSError as error:
        name = f"interface {interface!r}" if interface else f"way to the gateway's host {gateway!r}"
        raise SetupError(
            f"{socket.gethostname()} has no IPv4 address for the {name} ({error}): name the "
            "interface on which gateway and replicas reach each other (replica_interface)"
        ) from error


class SharePlace(Record):
    """The checkpoint and port by which a replica's further nodes start their shares."""

    checkpoint: str
    port: int
    lora_rank: int = 0


class SupervisorState(Record):
    """The state of a supervisor: see `ReplicaSupervisor`. Times are spans, in seconds.

    `phases`: of its engine's start, as `EngineProcess.phases`. `memory_left`: bytes that its job
    may still take of its node.
    """

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
    phases: dict[StartPhase, float] = Field(default_factory=dict)
    memory_left: int | None = None


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
        """`patience`: seconds that an answer about its state may take, beside its own wait.

        `term`: returns the controller's term.
        """
        self._http = Http(url, secret, patience, tls)
        self._patience = patience
        self.term = term

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

    async def stage(self, checkpoint: Path, seconds: float) -> tuple[Path, str]:
        """Have a checkpoint copied; return where to read it, and why there is no copy, or ""."""
        async with self._send("stage", seconds, {"checkpoint": str(checkpoint)}) as response:
            answer = json.loads(await response.read())
            return Path(answer["path"]), str(answer["why"])

    def _send(
        self, name: str, seconds: float, body: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        path = f"/{name}"
        return self._http.answer("POST", path, body, seconds, once=True, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {TERM_HEADER: str(self.term())}

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
        await self._supervisor.order(
            "note", version=version, weights=weights_of(checkpoint), checkpoint=str(checkpoint)
        )
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
        return await super()._order(order | {"term": self._supervisor.term()})


class LapseClock:
    """The time since a supervisor's last answer or heartbeat, by this host's clock.

    Made when it answers, or at the first trouble with it. A moment in which this process itself
    stood still leaves time for a second look. A supervisor that renews its lease and does not
    answer is given up later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._beat: int | None = None
        self._silent_since = self._renewed = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until the lease lapses, unless it is found renewed."""
        return max(0.0, self._renewed + self._seconds - time.monotonic())

    def lapsed(self, folder: Path) -> bool:
        """Tell whether the lease in an attempt's folder has lapsed. Call it again and again."""
        now, lease = time.monotonic(), read_lease(folder)
        beat = -1 if lease is None else lease.beat
        if self._beat is None:  # a first look does not tell when the last heartbeat was
            self._renewed = max(self._renewed, now - self._seconds * 2 / 3)
        elif beat not in (-1, self._beat):
            self._renewed = now
        self._beat = beat
        return (
            now - self._renewed > self._seconds
            or now - self._silent_since > _SILENT_LAPSES * self._seconds
        )
