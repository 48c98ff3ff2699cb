"""Further gateway: answers models' calls beside the controller's gateway, and forwards the rest.

It keeps nothing that another gateway could not rebuild. It samples at the replicas that the
controller publishes, records to the same store with a writer of its own, and reads versions and
canaries from the registry. All that has to be decided once is asked of the controller: every other
route is forwarded as it came, for callers who may use it. What happens here that the controller
must know goes to it in reports (routes/platform.py). Without a controller calls are answered on,
the rest is 503 `no_controller`.

Made by server/further_process.py. Read next: controller_link.py,
runtime/pool/published_replicas.py.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from cray_agents.errors import CrayError, NoController, NotFound
from cray_agents.ports import EngineCall
from cray_agents.records import ModelVersion
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.gateway.app import enclose, routes
from cray_agents.runtime.gateway.controller_link import ControllerLink
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import Access, Mode, RoleCheck
from cray_agents.runtime.gateway.http.bounds import MAX_BODY
from cray_agents.runtime.gateway.http.client_work import ClientWork
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.gateway.model_calls.canary_traffic import tell_outcome
from cray_agents.runtime.gateway.model_calls.control_tokens import ControlTokens
from cray_agents.runtime.gateway.model_calls.idempotency import IdempotencyKeys
from cray_agents.runtime.gateway.ownership import RunOwners
from cray_agents.runtime.pool.published_replicas import FollowedPool
from cray_agents.runtime.registry.canary import Canary
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scans.text_scanners import Blocks
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import REWARD_LIMIT

if TYPE_CHECKING:
    from cray_agents.runtime.telemetry.live_traces import LiveTraces

REPORT_INTERVAL = 0.25  # seconds between two reports
ANSWER = 20.0  # seconds that a controller may take to answer one
MOST_NOTES = 10_000  # of a kind that wait for a controller; older ones are dropped

log = logging.getLogger(__name__)


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
        self._outcomes, self._rewarded, self._failures = (
            deque[Any](maxlen=MOST_NOTES) for _ in range(3)
        )

    def note_outcome(self, model: str, session: str, version: str, *, failed: bool) -> None:
        """Let a canary's outcome be counted."""
        outcome = {"model": model, "session": session, "version": version, "failed": failed}
        self._outcomes.append(outcome)

    def note_reward(self, run_id: str) -> None:
        """Let a run's reward be counted."""
        self._rewarded.append(run_id)

    def note_failure(self, replica: int, losses: int, why: str) -> None:
        """Tell of a dead engine."""
        self._failures.append({"replica": replica, "losses": losses, "why": why})

    async def send(self) -> None:
        """Send a report. Raises as `ask` does; what was to be told is then kept."""
        kinds = {
            "outcomes": self._outcomes,
            "rewarded": self._rewarded,
            "failures": self._failures,
        }
        notes_of = {kind: list(notes) for kind, notes in kinds.items()}
        for notes in kinds.values():
            notes.clear()
        report = {"gateway": self._name, "demand": self.demand(), **notes_of}
        try:
            match await self._link.ask("/v1/gateways", report, ANSWER):
                case {"share": float(share)} if 0 < share <= 1:
                    self.share, self.answered = share, time.monotonic()
                case answer:
                    raise NoController(f"a report was answered with no share: {str(answer)[:200]}")
        except CrayError:
            for kind, notes in kinds.items():  # at the other end those that came meanwhile are lost
                newer = list(notes)
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


class FollowedCanaries:
    """Versions of live sessions, as the controller's `CanaryTraffic` draws them.

    Outcomes are reported to the controller, which alone judges. A canary whose version no replica
    serves gets no sessions.
    """

    def __init__(self, registry: Registry, pool: FollowedPool, reports: ControllerReports) -> None:
        self._registry = registry
        self._pool = pool
        self._reports = reports
        self._canaries: dict[str, Canary] = {}

    def _canary(self, name: str) -> Canary | None:
        start = self._registry.canary(name)
        if start is None:
            self._canaries.pop(name, None)
            return None
        canary = self._canaries.get(name)
        if canary is None or canary.start != start:
            canary = self._canaries[name] = Canary(start)
        return canary

    def resolve(self, model: str, session: str) -> ModelVersion:
        """Return the version that a model means now, in a session. Raises NotFound."""
        version = self._registry.resolve(model)
        if version.id == model or (canary := self._canary(model)) is None:
            return version
        drawn = canary.draws(session) and self._pool.serves(canary.version)
        return self._registry.resolve(canary.version) if drawn else version

    def count_outcome(
        self,
        model: str,
        session: str,
        exchange: EngineCall,
        pieces: AsyncGenerator[bytes, None],
        last_event: bytes | None,
    ) -> AsyncGenerator[bytes, None]:
        """Return the same pieces and, if a canary runs, report whether they end well."""
        if model not in self._canaries:
            return pieces
        note = partial(self._reports.note_outcome, model, session)
        return tell_outcome(note, exchange, pieces, last_event)

    async def note_reward(self, run_id: str) -> None:
        """Report the reward of a run."""
        self._reports.note_reward(run_id)


class FollowedVersions:
    """Stand-in for the `VersionSwitcher`, as far as calls need one. Changes are the controller's.

    `leases`: none are held here.
    """

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
class FurtherServices:
    """The parts behind the routes that are `local`, by the names that they have in `Services`."""

    store: Store
    registry: Registry
    pool: FollowedPool
    link: ControllerLink
    reports: ControllerReports
    admission: Admission
    keep_alive: float = 2.0
    max_body: int = MAX_BODY
    body_timeout: float = 60.0
    reward_limit: float = REWARD_LIMIT
    run_headers: tuple[str, ...] = ()
    traces: "LiveTraces | None" = None
    blocks: Blocks | None = None
    work: ClientWork = field(default_factory=ClientWork)
    metrics: Metrics = field(default_factory=Metrics)
    several_gateways: bool = field(default=True, init=False)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)
    run_owners: RunOwners = field(init=False)
    idempotency_keys: IdempotencyKeys = field(init=False)
    versions: FollowedVersions = field(init=False)
    control_tokens: ControlTokens = field(init=False)

    def __post_init__(self) -> None:
        """Make the parts that consist of other parts."""
        self.run_owners = RunOwners(self.store)
        self.idempotency_keys = IdempotencyKeys(self.store, shared=True)
        self.versions = FollowedVersions(self.registry, self.pool, self.reports, self.link)
        self.control_tokens = ControlTokens(self.registry)
        self.reports.demand = lambda: self.admission.demand

    @property
    def token(self) -> str:
        """The platform's own key."""
        return self.link.token

    async def follow(self) -> None:
        """Follow the controller and its replicas, until closed."""
        await self.link.look()
        await self.pool.look()
        self.tasks.keep("controller", self.link.follow)
        self.tasks.keep("published replicas", self.pool.follow)
        self.tasks.keep("reports", self.reports.keep_sending)

    async def close(self) -> None:
        """Close the parts that reach the controller and the replicas."""
        await self.tasks.close()
        await self.work.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await self.versions.close()
        await self.link.close()
        await self.pool.close()


def share_of(number: int, reports: ControllerReports) -> int:
    """Return this gateway's share of a number that all gateways have together; at least 1 of it."""
    return math.ceil(number * reports.share)


def create_further_app(services: FurtherServices, keys: Keys, mode: Mode) -> Starlette:
    """Return the ASGI application over these services. Keys and mode: see `Access`."""
    access = Access(keys, mode, lambda: services.link.token)
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
