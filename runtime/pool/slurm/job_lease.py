"""Job lease: the files by which a replica's Slurm job and the gateway find each other.

    replicas/<n>/<attempt>/spec.json    the order, written once by the gateway that submits the job
    replicas/<n>/<attempt>/secret       written by the supervisor, for its own user's eyes (0600)
    replicas/<n>/<attempt>/lease.json   where the supervisor listens, with its heartbeat
    replicas/<n>/<attempt>/job.txt, engine.txt   what supervisor and engine say

Attempts of a replica are numbered. A number is claimed by making its folder, and a job claims its
attempt by making the secret, so neither is ever used twice. Written and read by slurm_replica.py
and replica_supervisor.py.
"""

import fcntl
import importlib.metadata
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import Corrupt, SetupError
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.pool.engine.vllm_replica import EngineSettings

HEARTBEAT = 2.0  # seconds between two writes of a lease
STATE_SECONDS = 5.0  # that a supervisor waits for news when it is asked for its state
SPEC, SECRET, LEASE = "spec.json", "secret", "lease.json"
TERM_HEADER = "x-cray-term"  # the term of the controller that asks a supervisor
JOB_PREFIX = "replica-"  # of the names of replicas' jobs
ATTEMPTS_KEPT = 5  # folders of a replica
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, of Linux


def package_version() -> str:
    """Return the version of this package, which both sides of a lease must share."""
    return importlib.metadata.version("cray-agents")


class ReplicaSpec(Record):
    """The order of a replica's job.

    `gateway`: the name of the host that submitted it. `interface`: the network interface to listen
    on; None: the one that leads to the gateway's host. `tls`: the folder with the CA of its servers
    (tls_files.py); None: no TLS. `nodes`: over which each server spreads.
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
    content = checksums.with_crc(spec.model_dump_json().encode())
    durable.replace_file(folder / str(number) / SPEC, content)
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
    content = checksums.with_crc(lease.model_dump_json().encode())
    durable.replace_file(folder / LEASE, content, 0o600)


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
