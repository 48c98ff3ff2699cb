"""Published replicas: a further gateway's knowledge of the replicas that the controller changes.

The controller writes one file on the shared root at each change (`publish`). A further gateway
looks at it several times a second (`FollowedPool`), and sends requests on its own. The file may be
old when it is read: on another host even by seconds. Nothing relies on its age, for each replica
refuses a request whose version it does not serve any more (vllm_plugins/lock.py). Then, and when a
replica is gone, the request waits for news and is sent again, as in the controller's own pool.
Read next: request_router.py.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cray_agents.errors import Corrupt, EngineUnavailable
from cray_agents.records import Record
from cray_agents.runtime.background import ChangeNotifier
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.pool.request_router import RequestRouter, RoutedReplica
from cray_agents.runtime.pool.vllm_engine import VllmEngine

# down: being brought back; out: failed to prove a version that other replicas proved; sleeping: a
# job trains on its GPU; unproven: it holds the weights of a job that has not published them;
# waiting: Slurm has no place for it yet; leaving: Slurm takes its place away; away: it gave its
# place back, as fewer replicas are needed
State = Literal[
    "starting",
    "serving",
    "swapping",
    "down",
    "out",
    "sleeping",
    "unproven",
    "waiting",
    "leaving",
    "away",
]

POLL_INTERVAL = 0.25  # seconds between two looks at the file
_WRITE_INTERVAL = 0.05  # seconds between two writes, at least

log = logging.getLogger(__name__)


class PublishedReplica(Record):
    """A replica. `names`: the server's name of each version that answers now.

    `expected`: the versions that it holds now or after a change or a restart.
    """

    url: str
    secret: str
    names: dict[str, str]
    expected: list[str]
    state: State
    losses: int = 0
    why_lost: str = ""


class ServingLimits(Record):
    """The settings of serving that the platform chose, and that other gateways go by."""

    max_num_seqs: int = 64
    start_timeout: float = 300.0
    swap_timeout: float = 120.0


class PublishedPool(Record):
    """The content of the file. `incumbent`: the version last loaded on all replicas."""

    limits: ServingLimits = ServingLimits()
    replicas: list[PublishedReplica] = Field(default_factory=list)
    incumbent: str = ""
    swapping: bool = False


async def publish(
    published: Callable[[], PublishedPool], changes: ChangeNotifier, path: Path
) -> None:
    """Write the file at each change of the pool that `published` returns, until cancelled."""
    last = b""
    while True:
        content = checksums.record_text(published())
        if content != last:
            try:
                await asyncio.to_thread(_write, path, content)
                last = content
            except OSError as error:
                log.warning("other gateways do not hear of the replicas: %s", error)
        await asyncio.sleep(_WRITE_INTERVAL)
        with suppress(TimeoutError):  # a swap begins without a notice
            await asyncio.wait_for(changes.wait(), POLL_INTERVAL)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_file(path, content, 0o600)


class FollowedReplica(RoutedReplica):
    """A replica that the controller changes. What it is in is what the controller has said last.

    `on_failure` is told of a dead engine: the replica's losses, and why. `tls`: see `FollowedPool`.
    """

    def __init__(
        self,
        notifier: ChangeNotifier,
        timeout: float,
        on_failure: Callable[[int, str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(notifier)
        self._timeout = timeout
        self._on_failure = on_failure
        self._tls = tls
        self._latest = PublishedReplica(url="", secret="", names={}, expected=[], state="down")
        self._failed_at = -1  # the losses at which an engine was found dead
        self._server: VllmEngine | None = None
        self._former: list[VllmEngine] = []
        self._engines: dict[str, VllmEngine] = {}

    async def follow(self, latest: PublishedReplica) -> None:
        """Take what the controller says now.

        What a lost process was asked fails at once: no answer may ever come from a node that is
        gone.
        """
        lost = latest.losses != self.losses
        self._latest, self.losses, self.why_lost = latest, latest.losses, latest.why_lost
        server, at = self._server, (latest.url, latest.secret)
        if latest.url and (server is None or (server.url, server.secret) != at):
            if server is not None:
                self._former.append(server)  # it may still end what it has begun
            self._server = VllmEngine(
                latest.url, "", latest.secret, timeout=self._timeout, tls=self._tls
            )
        self._engines = {
            version: self._server.called(name)
            for version, name in latest.names.items()
            if self._server is not None
        }
        for former in [one for one in self._former if not one.busy]:
            self._former.remove(former)
            await former.close()
        if lost and server is not None:
            await server.close()

    @property
    def versions(self) -> list[str]:
        """The versions that can answer, as far as the controller has said."""
        latest = self._latest
        serves = latest.state == "serving" and self._failed_at != latest.losses
        return list(self._engines) if serves else []

    @property
    def state(self) -> str:
        """The state, as far as the controller has said."""
        return self._latest.state

    @property
    def contents(self) -> str:
        """Contents and state, for an error message."""
        return f"{' and '.join(self._latest.expected) or 'nothing'} ({self._latest.state})"

    def engine(self, version: str) -> VllmEngine:
        """Return the engine that answers with a version. Raises EngineUnavailable."""
        if version not in self._engines:
            raise EngineUnavailable(f"{version} is not held any more")
        return self._engines[version]

    def fail(self, since: int, why: str) -> None:
        """Send no more requests to a dead engine, until the controller has started another."""
        if self.losses == since:
            self._failed_at = since
            self._on_failure(since, why)

    async def close(self) -> None:
        """Drop the connections; requests in flight fail."""
        for server in (self._server, *self._former):
            if server is not None:
                await server.close()


class FollowedPool(RequestRouter):
    """The controller's pool, for a further gateway.

    Args:
        path: the file that the controller writes.
        answer_timeout: seconds without a byte of an answer.
        on_failure: told of a dead engine: the replica's place, its losses, and why.
        tls: whom replicas with TLS are verified by.
        affinity: the setting `replica_affinity`.
    """

    def __init__(
        self,
        path: Path,
        *,
        answer_timeout: float,
        on_failure: Callable[[int, int, str], None],
        tls: ssl.SSLContext | None = None,
        affinity: float = 1.5,
    ) -> None:
        self._path = path
        self._tls = tls
        self._answer_timeout = answer_timeout
        self._on_failure = on_failure
        self._followed: list[FollowedReplica] = []
        self._latest = PublishedPool()
        self._content = b""
        super().__init__(self._followed, ChangeNotifier(), self.limits.swap_timeout, affinity)
        self.shared = True

    async def follow(self) -> None:
        """Look at the file again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_INTERVAL)

    async def look(self) -> None:
        """Look at the file, and follow it if it has changed. A file that cannot be read is kept."""
        try:
            latest, content = await asyncio.to_thread(self._read)
        except (OSError, Corrupt) as error:
            log.warning("the replicas are not known anew: %s", error)
            return
        if latest is None:
            return
        self._latest = latest
        self.wait_timeout = latest.limits.swap_timeout
        while len(self._followed) < len(latest.replicas):
            on_failure = partial(self._on_failure, len(self._followed))
            self._followed.append(
                FollowedReplica(self._notifier, self._answer_timeout, on_failure, self._tls)
            )
        gone = self._followed[len(latest.replicas) :]
        del self._followed[len(latest.replicas) :]
        for replica, now in zip(self._followed, latest.replicas, strict=True):
            await replica.follow(now)
        for replica in gone:
            await replica.close()
        self._content = content
        self._notifier.notify()

    def _read(self) -> tuple[PublishedPool | None, bytes]:
        # opened anew for each look: a host may believe in attributes that are 30 s old (NFS)
        if self._path.name not in durable.names_in(self._path.parent):
            return None, b""
        content = self._path.read_bytes()
        if content == self._content:
            return None, content
        return checksums.parse_as(PublishedPool, content, self._path), content

    @property
    def ready(self) -> bool:
        """True if a replica can answer now."""
        return self.serving > 0

    @property
    def incumbent(self) -> str:
        """The version most recently loaded on all replicas."""
        return self._latest.incumbent

    @property
    def swapping(self) -> bool:
        """True while weights are being changed."""
        return self._latest.swapping

    @property
    def limits(self) -> ServingLimits:
        """The settings of serving that the controller chose."""
        return self._latest.limits

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each replica."""
        return [
            {"state": replica.state, "versions": replica.versions, "in_flight": replica.in_flight}
            for replica in self._followed
        ]

    async def close(self) -> None:
        """Drop the connections; requests in flight fail."""
        for replica in self._followed:
            await replica.close()
