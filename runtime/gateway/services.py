"""Services: the parts behind the routes of the gateway; `cray-agents up` builds them."""

import asyncio
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fastapi import Depends, Request

from cray_agents.config.settings import PriceSettings
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.controller_lease import ControllerLease
from cray_agents.runtime.dashboard.static_files import SignIns
from cray_agents.runtime.datasets.build_process import BuildProcess
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.uploads import Sweeper, Uploads
from cray_agents.runtime.fine_tuning.tuning_jobs import FineTuning
from cray_agents.runtime.gateway.http.auth import Mode
from cray_agents.runtime.gateway.http.bounds import MAX_BODY, MAX_FILE, MAX_SETTINGS, MAX_UPLOAD
from cray_agents.runtime.gateway.http.client_work import ClientWork
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission, GatewayShares
from cray_agents.runtime.gateway.model_calls.control_tokens import ControlTokens
from cray_agents.runtime.gateway.model_calls.idempotency import IdempotencyKeys
from cray_agents.runtime.gateway.ownership import RunOwners
from cray_agents.runtime.gateway.rollout_queue import RolloutQueue
from cray_agents.runtime.gateway.tinker.samples import TinkerSamples
from cray_agents.runtime.gateway.tinker.training_runs import TinkerFiles
from cray_agents.runtime.gateway.version_switch import VersionSwitcher
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.published_replicas import publish
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scans.text_scanners import Blocks
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import REWARD_LIMIT
from cray_agents.runtime.telemetry.audit_log import AuditLog
from cray_agents.runtime.telemetry.file_metrics import FileCollector
from cray_agents.runtime.views.change_feed import ChangeFeed
from cray_agents.runtime.views.run_pages import RunPages
from cray_agents.runtime.views.token_text import Vocabularies, Vocabulary

if TYPE_CHECKING:
    from cray_agents.runtime.telemetry.live_traces import LiveTraces


@dataclass
class Services:
    """The parts behind the routes, and the settings of the gateway.

    platform: the facts that /v1/platform returns. code: the version of the trainer's code, which
    job ids depend on. keep_alive: seconds after which a waiting stream gets a comment line.
    max_body: bytes. max_file: bytes of a file sent in one request; max_upload: of one sent in
    parts. body_timeout: seconds that a request's body may stand still. model_roots: the folders
    whose directories keys of the role `train` may name. api_keys: see Access in http/auth.py.
    delta_checkpoints: the `changes_only` of jobs that leave it out.
    shares: of this gateway and further ones in the engines' capacity. several_gateways: whether
    further ones record to the same store.
    token: the key of the platform's own processes; "" for none. reward_limit: the largest reward.
    run_headers: headers that name a request's run, beside X-Run-Id.
    traces: sends spans of calls, runs and jobs; None: none.
    lease: of the controller, which decides; None in tests of the gateway alone.
    work: what may take long for a client (http/client_work.py). exports: the processes under way.
    sign_ins: of browsers to the dashboard. prices: by which costs are counted.
    blocks: what refuses requests and withholds answers, if that is asked for.
    tasks: those of the platform itself.
    """

    home: Home
    store: Store
    registry: Registry
    trainer: Trainer
    pool: Pool
    platform: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    keep_alive: float = 2.0
    max_body: int = MAX_BODY
    max_file: int = MAX_FILE
    max_upload: int = MAX_UPLOAD
    body_timeout: float = 60.0
    model_roots: tuple[Path, ...] = ()
    delta_checkpoints: bool = False
    api_keys: Mode = "auto"
    token: str = ""
    reward_limit: float = REWARD_LIMIT
    run_headers: tuple[str, ...] = ()
    traces: "LiveTraces | None" = None
    lease: ControllerLease | None = None
    admission: Admission = field(default_factory=Admission)
    metrics: Metrics = field(default_factory=Metrics)
    shares: GatewayShares = field(default_factory=GatewayShares)
    work: ClientWork = field(default_factory=ClientWork)
    exports: set[Process] = field(default_factory=set)
    sign_ins: SignIns = field(default_factory=SignIns)
    prices: PriceSettings = field(default_factory=PriceSettings)
    blocks: Blocks | None = None
    several_gateways: bool = field(default=False, init=False)
    run_owners: RunOwners = field(init=False)
    idempotency_keys: IdempotencyKeys = field(init=False)
    audit: AuditLog = field(init=False)
    files: Files = field(init=False)
    uploads: Uploads = field(init=False)
    sweeper: Sweeper = field(init=False)
    batches: BatchQueue = field(init=False)
    rollouts: RolloutQueue = field(init=False)
    fine_tuning: FineTuning = field(init=False)
    datasets: BuildProcess = field(init=False)
    run_pages: RunPages = field(init=False)
    changes: ChangeFeed = field(init=False)
    vocabularies: Vocabularies = field(default_factory=Vocabularies, init=False)
    control_tokens: ControlTokens = field(init=False)
    versions: VersionSwitcher = field(init=False)
    tinker: TinkerFiles = field(init=False)
    tinker_samples: TinkerSamples = field(default_factory=TinkerSamples, init=False)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)

    @property
    def max_settings(self) -> int:
        """The bytes of a body that no model reads and that holds no runs."""
        return min(self.max_body, MAX_SETTINGS)

    def __post_init__(self) -> None:
        """Make the parts that consist of other parts."""
        self.run_owners = RunOwners(self.store)
        self.idempotency_keys = IdempotencyKeys(self.store)
        self.audit = AuditLog(self.home.audit)
        self.files = Files(self.home)
        self.uploads = Uploads(self.files)
        self.sweeper = Sweeper(self.files, self.uploads)
        self.batches = BatchQueue(self.home, self.files)
        self.rollouts = RolloutQueue(self.store)
        self.tinker = TinkerFiles(self.home)
        self.datasets = BuildProcess(self.home)
        self.run_pages = RunPages(self.store)
        self.changes = ChangeFeed(
            self.home, self.store, self._replica_states, lambda: self.several_gateways
        )
        self.fine_tuning = FineTuning(
            self.home, self.registry, self.trainer, self.files, code=self.code
        )
        self.control_tokens = ControlTokens(self.registry)
        self.versions = VersionSwitcher(
            self.home, self.store, self.registry, self.pool, self.admission, self.metrics
        )
        self.metrics.add(
            FileCollector(self.home, self.store, self.registry, self.batches, self.prices)
        )

    def note_other_gateways(self) -> None:
        """Let further gateways find the replicas, and reckon with what they record and send."""
        if not self.several_gateways:
            self.several_gateways = self.idempotency_keys.shared = True
            self.pool.note_other_gateways()
            work = partial(publish, self.pool, self.home.serving)
            self.tasks.keep("publishing of replicas", work)

    def _replica_states(self) -> list[Any]:
        """Return what of the replicas is worth a look at the pool when it changes."""
        replicas = [*self.pool.status(), *self.pool.spares_status()]
        return [[one["version"], one["versions"], one["state"], one["error"]] for one in replicas]

    async def close(self) -> None:
        """Close the parts made here; the other parts stay their maker's to close."""
        await self.tasks.close()
        await self.changes.close()
        await self.work.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.audit.close()
        await self.rollouts.close()
        await self.tinker_samples.close()
        await self.versions.close()
        await self.fine_tuning.close()
        await self.datasets.close()


async def _services_of(request: Request) -> Any:
    return request.app.state.services


#: The type of a handler's parameter that gets the services. A further gateway's are fewer.
Current: TypeAlias = Annotated[Services, Depends(_services_of)]


def vocabulary_of(services: Services, version: str) -> Vocabulary:
    """Return the vocabulary of a version's tokenizer. Blocks. Raises NotFound, Corrupt."""
    checkpoint = services.registry.resolve(version).checkpoint
    return services.vocabularies.of(services.home.checkpoint(checkpoint))
