"""Further gateway: answers models' calls beside the controller's gateway, and forwards the rest.

It keeps nothing that another gateway could not rebuild. It samples at the replicas that the
controller publishes, records to the same store with a writer of its own, and reads versions and
canaries from the registry. All that has to be decided once is asked of the controller: every other
route is forwarded as it came, with the caller's own key, for callers who may use it. What happens
here that the controller must know goes to it in reports (routes/platform.py). Without a controller
calls are answered on, the rest is 503 `no_controller`.

The controller's claim on the root, `platform.json`, has its address and its key. It is read again
several times a second, and whenever the address does not answer: after a takeover another process
has claimed the root. Nothing is sent before the other side of the connection has proved to be of
the platform: runtime/vllm_plugins/proof.py.

Made by server/further_process.py. Read next: runtime/pool/published_replicas.py.
"""

import asyncio
import logging
import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from cray_agents.errors import CrayError, NoController, NotFound, NotLoaded
from cray_agents.exact_json import dump_json
from cray_agents.paths import Home
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.app import enclose, routes
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import Access, Mode, RoleCheck
from cray_agents.runtime.gateway.http.client_work import until_left
from cray_agents.runtime.gateway.http.middleware import REQUEST_ID
from cray_agents.runtime.gateway.model_calls.canary_traffic import LiveCanaries
from cray_agents.runtime.gateway.services import CallServices
from cray_agents.runtime.pool.published_replicas import FollowedPool
from cray_agents.runtime.pool.vllm_http import ProvedConnector
from cray_agents.runtime.registry.canary import Canary
from cray_agents.runtime.registry.registry import Registry

CLAIM_INTERVAL = 0.25  # seconds between two looks at the claim
_ASCII = bytes(range(0x21, 0x7F))
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"),
    )
)
_OWN_HEADERS = frozenset((b"x-request-id", b"openai-processing-ms"))  # the middleware adds them

Headers = list[tuple[bytes, bytes]]
REPORT_INTERVAL = 0.25  # seconds between two reports
ANSWER = 20.0  # seconds that a controller may take to answer a report
MOST_NOTES = 10_000  # of a kind that wait for a controller; older ones are dropped

log = logging.getLogger(__name__)


# ---- the link to the controller
@dataclass(frozen=True)
class ControllerClaim:
    """The address of the controller, for this host, its key and term, and if it is on this host.

    `replicas`: as `up --replicas` takes it; "" from a platform that did not tell.
    """

    url: str
    token: str
    term: int
    here: bool
    replicas: str = ""


UNKNOWN = ControllerClaim("", "", 0, here=False)


def read_claim(home: Home) -> ControllerClaim | None:
    """Return the claim on a root; None without one. Raises OSError, of which Corrupt is one.

    The address of a controller on another host, that only its own host reaches, is "".
    """
    try:
        info = checksums.read_json(home.platform)
    except FileNotFoundError:
        return None
    here = info["host"] == socket.gethostname()
    url = info.get("control") or info["url"] if here else info["elsewhere"] or ""
    replicas = str(info.get("replicas", ""))
    return ControllerClaim(str(url), str(info["token"]), int(info.get("term", 0)), here, replicas)


class ControllerLink:
    """The way to the controller of a root, by its `claim` as last read. Close it when done."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.claim = UNKNOWN
        self._session: aiohttp.ClientSession | None = None

    async def follow(self) -> None:
        """Read the claim again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(CLAIM_INTERVAL)

    async def look(self) -> bool:
        """Read the claim; return True if the controller is another one now."""
        before = self.claim
        try:
            claim = await asyncio.to_thread(read_claim, self._home)
            self.claim = claim or UNKNOWN
        except (OSError, KeyError, TypeError, ValueError) as error:  # the last known may be right
            log.warning("the controller is not known anew: %s", error)
        return self.claim not in (UNKNOWN, before)

    async def ask(
        self, path: str, body: dict[str, Any], seconds: float | None = None
    ) -> dict[str, Any]:
        """POST to the controller as the platform itself. Raises NoController, NotLoaded, NotFound.

        It may take as long as the loading of a version; with `seconds`, no longer than these.
        """
        claim = self._known()
        headers = {"authorization": f"Bearer {claim.token}", "content-type": "application/json"}
        try:
            async with self._http().post(
                URL(claim.url).with_path(path),
                data=dump_json(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            await self.look()
            raise _nobody(error) from error
        if response.status == 200 and isinstance(answer, dict):
            return answer
        match answer:
            case {"error": {"code": code, "message": str(message)}}:
                for kind in (NotLoaded, NotFound):
                    if code in (kind.code, "model_not_found" if kind is NotFound else ""):
                        raise kind(message)
            case _:
                message = f"{response.status}, {str(answer)[:200]}"
        raise NoController(f"the controller refused {path}: {message}")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the controller answer a request, as an ASGI application. Raises NoController.

        The body and the answer pass in pieces. Nothing is sent twice: only a request that did not
        reach the controller is sent to its successor.
        """
        body = _Body(scope, receive)
        while True:
            claim = self._known()
            try:
                response = await self._send(claim, scope, body)
            except aiohttp.ClientConnectorError as error:
                await self.look()
                if not body.begun and self.claim != claim:
                    continue
                raise _nobody(error) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise NoController(
                    "the controller went away while it answered: look whether it has done what was"
                    " asked, and ask again if not"
                ) from error
            break
        try:
            await _pass_on(response, receive, send)
        finally:
            response.close()

    async def _send(
        self, claim: ControllerClaim, scope: Scope, body: "_Body"
    ) -> aiohttp.ClientResponse:
        at = URL(claim.url)
        assert at.host is not None
        target = URL.build(  # of parts: no text of a client decides about the host
            scheme=at.scheme,
            host=at.host,
            port=at.port,
            path=quote_from_bytes(scope.get("raw_path") or scope["path"].encode(), _ASCII),
            query_string=quote_from_bytes(scope["query_string"], _ASCII),
            encoded=True,
        )
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP_BY_HOP and name != b"x-request-id"
        ]
        headers.append(("x-request-id", scope[REQUEST_ID].decode()))
        return await self._http().request(
            scope["method"],
            target,
            headers=headers,
            data=body.pieces() if body.expected else None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def _known(self) -> ControllerClaim:
        if not self.claim.url:
            known = self.claim is not UNKNOWN
            raise _nobody("it listens on loopback of another host" if known else "")
        return self.claim

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:  # made late because it belongs to the running loop
            self._session = aiohttp.ClientSession(
                connector=ProvedConnector(lambda: self.claim.token),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()


def _nobody(why: object) -> NoController:
    because = f" ({why})" if why else ""
    return NoController(
        f"no controller answers for this root{because}: models are still asked, and everything else"
        " is to be asked again in a few seconds; `cray-agents status` tells more"
    )


class _Body:
    """The body of a request that is passed on."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.expected = bool(names & {b"content-length", b"transfer-encoding"})
        self.begun = False
        self._receive = receive
        self._ended = not self.expected

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        while not self._ended:
            message = await self._receive()
            self.begun = True
            self._ended = not message.get("more_body")
            if message.get("body"):
                yield message["body"]


async def _pass_on(response: aiohttp.ClientResponse, receive: Receive, send: Send) -> None:
    headers: Headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _HOP_BY_HOP | _OWN_HEADERS
    ]
    start: Message = {"type": "http.response.start", "status": response.status, "headers": headers}
    await send(start)
    left = asyncio.create_task(until_left(receive))
    left.add_done_callback(lambda done: None if done.cancelled() else response.close())
    try:
        async for piece in response.content.iter_any():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except aiohttp.ClientError:
        if not left.done():
            raise  # the connection to the client is broken off, as the controller's was
        return
    finally:
        left.cancel()
    await send({"type": "http.response.body", "body": b""})


# ---- what a gateway has beside its store
class ControllerReports:
    """Reports to the controller, and the share of the engines that it gives in return.

    demand: returns the requests inside and waiting. share: of the capacity of all engines.
    answered: when the controller last answered, in monotonic seconds.
    """

    def __init__(self, name: str, link: ControllerLink) -> None:
        self.demand: Callable[[], int] = lambda: 0
        self.share = 0.5
        self.answered = time.monotonic()
        self._name = name
        self._link = link
        self._notes = {
            kind: deque[Any](maxlen=MOST_NOTES) for kind in ("outcomes", "rewarded", "failures")
        }

    def note_outcome(self, model: str, session: str, version: str, *, failed: bool) -> None:
        """Let a canary's outcome be counted."""
        outcome = {"model": model, "session": session, "version": version, "failed": failed}
        self._notes["outcomes"].append(outcome)

    def note_reward(self, run_id: str) -> None:
        """Let a run's reward be counted."""
        self._notes["rewarded"].append(run_id)

    def note_failure(self, replica: int, losses: int, why: str) -> None:
        """Tell of a dead engine."""
        self._notes["failures"].append({"replica": replica, "losses": losses, "why": why})

    async def send(self) -> None:
        """Send a report. Raises as `ask` does; what was to be told is then kept."""
        notes_of = {kind: list(notes) for kind, notes in self._notes.items()}
        for notes in self._notes.values():
            notes.clear()
        report = {"gateway": self._name, "demand": self.demand(), **notes_of}
        try:
            match await self._link.ask("/v1/gateways", report, ANSWER):
                case {"share": float(share)} if 0 < share <= 1:
                    self.share, self.answered = share, time.monotonic()
                case answer:
                    raise NoController(f"a report was answered with no share: {str(answer)[:200]}")
        except CrayError:
            for kind, notes in self._notes.items():
                newer = list(notes)  # of too many the oldest are lost
                notes.clear()
                notes.extend(notes_of[kind] + newer)
            raise

    async def keep_sending(self) -> None:
        """Send reports, until cancelled."""
        last_problem = ""
        while True:
            try:
                await self.send()
                last_problem = ""
            except CrayError as error:
                if str(error) != last_problem:
                    log.warning("%s", last_problem := str(error))
                await self._link.look()
            await asyncio.sleep(REPORT_INTERVAL)


class FollowedCanaries(LiveCanaries):
    """The running canaries, whose outcomes are reported to the controller, which alone judges.

    A canary whose version no replica serves gets no sessions.
    """

    def __init__(self, registry: Registry, pool: FollowedPool, reports: ControllerReports) -> None:
        super().__init__(registry)
        self._pool = pool
        self._reports = reports

    def _takes_sessions(self, canary: Canary) -> bool:
        return self._pool.serves(canary.version)

    def note_outcome(self, model: str, session: str, version: str, *, failed: bool) -> None:
        """Report the outcome of an answer."""
        self._reports.note_outcome(model, session, version, failed=failed)

    async def note_reward(self, run_id: str) -> None:
        """Report the reward of a run."""
        self._reports.note_reward(run_id)


class FollowedVersions:
    """Stand-in for the `VersionSwitcher`, as far as calls need one: the controller changes."""

    def __init__(
        self,
        registry: Registry,
        pool: FollowedPool,
        reports: ControllerReports,
        link: ControllerLink,
    ) -> None:
        self.live = FollowedCanaries(registry, pool, reports)
        self.leases = self
        self.lease = None
        self._pool = pool
        self._link = link
        self._tasks = BackgroundTasks()
        self._loading: dict[str, asyncio.Task[None]] = {}

    def missing(self) -> list[str]:
        """Return the promoted version, if no replica can answer with it now."""
        incumbent = self._pool.incumbent
        return [] if not incumbent or self._pool.serves(incumbent) else [incumbent]

    def load_on_demand(self, version_id: str) -> "asyncio.Task[None] | None":
        """Return the task that lets the controller load a version; None if a replica has it.

        The task raises NotLoaded if it cannot be loaded. Without a controller requests wait.
        """
        if self._pool.serves(version_id):
            return None
        task = self._loading.get(version_id)
        if task is None:
            work = self._load(version_id)
            task = self._loading[version_id] = self._tasks.run("load on demand", work, version_id)
            task.add_done_callback(lambda _: self._loading.pop(version_id, None))
        return task

    async def _load(self, version_id: str) -> None:
        try:
            await self._link.ask("/v1/gateways/load", {"version": version_id})
        except (NoController, NotFound):  # a version this young is not known there for a second
            return

    async def close(self) -> None:
        """Stop waiting for the controller."""
        await self._tasks.close()


@dataclass
class FurtherServices(CallServices):
    """The parts behind the routes that are `local`, by the names that they have in `Services`."""

    pool: FollowedPool
    link: ControllerLink
    reports: ControllerReports

    def __post_init__(self) -> None:
        """Make the parts that consist of other parts."""
        super().__post_init__()
        self.several_gateways = self.idempotency_keys.shared = True
        self.versions = FollowedVersions(self.registry, self.pool, self.reports, self.link)
        self.reports.demand = lambda: self.admission.demand

    @property
    def token(self) -> str:
        """The platform's own key."""
        return self.link.claim.token

    async def follow(self) -> None:
        """Follow the controller and its replicas, until closed."""
        await self.link.look()
        await self.pool.look()
        self.tasks.keep("controller", self.link.follow)
        self.tasks.keep("published replicas", self.pool.follow)
        self.tasks.keep("reports", self.reports.keep_sending)

    async def close(self) -> None:
        """Close the parts that reach the controller and the replicas."""
        await super().close()
        await self.versions.close()
        await self.link.close()
        await self.pool.close()


def share_of(number: int, reports: ControllerReports) -> int:
    """Return this gateway's share of a number that all gateways have together; at least 1 of it."""
    return math.ceil(number * reports.share)


def create_further_app(services: FurtherServices, keys: Keys, mode: Mode) -> Starlette:
    """Return the ASGI application over these services. Keys and mode: see `Access`."""
    access = Access(keys, mode, lambda: services.link.claim.token)
    return enclose([*_routes(services.link)], services, access)


def _routes(link: ControllerLink) -> Iterator[BaseRoute]:
    """Yield the routes that are answered here, and a way to the controller in place of the others.

    `local` are those that need nothing but the store, the registry and the replicas.
    """
    for route in routes():
        if route.local:
            yield route
        else:
            methods = [*route.methods]
            yield Route(route.path, RoleCheck(link.forward, route.role), methods=methods)
