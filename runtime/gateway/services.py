"""Services: the parts behind the routes of the gateway; `cray-agents up` builds them."""

import asyncio
from dataclasses import KW_ONLY, dataclass, field
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
class CallServices:
    """The parts behind routes that every gateway answers itself: `Services` | `FurtherServices`.

    keep_alive: seconds after which a waiting stream gets a comment line. max_body: bytes.
    body_timeout: seconds that a request's body may stand still. reward_limit: the largest reward.
    run_headers: headers that name a request's run, beside X-Run-Id. traces: sends spans of calls,
    runs and jobs; None: none. work: what may take long for a client (http/client_work.py).
    blocks: what refuses requests and withholds answers, if that is asked for.
    several_gateways: whether others record to the same store. tasks: those of the platform itself.
    """

    home: Home
    store: Store
    registry: Registry
    _: KW_ONLY
    admission: Admission = field(default_factory=Admission)
    keep_alive: float = 2.0
    max_body: int = MAX_BODY
    body_timeout: float = 60.0
    reward_limit: float = REWARD_LIMIT
    run_headers: tuple[str, ...] = ()
    traces: "LiveTraces | None" = None
    blocks: Blocks | None = None
    work: ClientWork = field(default_factory=ClientWork)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        """Make the parts that consist of other parts."""
        self.several_gateways = False
        self.tasks = BackgroundTasks()
        self.run_owners = RunOwners(self.store)
        self.idempotency_keys = IdempotencyKeys(self.store)
        self.control_tokens = ControlTokens(self.registry)

    async def close(self) -> None:
        """Close the parts made here; the other parts stay their maker's to close."""
        await self.tasks.close()
        await self.work.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)


@dataclass
class Services(CallServices):
    """The parts behind all routes, and the settings of the gateway.

    platform: the facts that /v1/platform returns. code: the version of the trainer's code, which
    job ids depend on. max_file: bytes of a file sent in one request; max_upload: of one sent in
    parts. model_roots: the folders whose directories keys of the role `train` may name. api_keys:
    see Access in http/auth.py. delta_checkpoints: the `changes_only` of jobs that leave it out.
    token: the key of the platform's own processes; "" for none. lease: of the controller, which
    decides; None in tests of the gateway alone. shares: of this gateway and further ones in the
    engines' capacity. exports: an object for each. sign_ins: of browsers to the dashboard.
    prices: by which costs are counted.
    """

    trainer: Trainer
    pool: Pool
    _: KW_ONLY
    platform: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    max_file: int = MAX_FILE
    max_upload: int = MAX_UPLOAD
    model_roots: tuple[Path, ...] = ()
    delta_checkpoints: bool = False
    api_keys: Mode = "auto"
    token: str = ""
    lease: ControllerLease | None = None
    shares: GatewayShares = field(default_factory=GatewayShares)
    exports: set[object] = field(default_factory=set)
    sign_ins: SignIns = field(default_factory=SignIns)
    prices: PriceSettings = field(default_factory=PriceSettings)

    @property
    def max_settings(self) -> int:
        """The bytes of a body that no model reads and that holds no runs."""
        return min(self.max_body, MAX_SETTINGS)

    def __post_init__(self) -> None:
        """Make the parts that consist of other parts."""
        super().__post_init__()
        self.vocabularies = Vocabularies()
        self.tinker_samples = TinkerSamples()
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
            self.tasks.keep("publishing of replicas", partial(self.pool.publish, self.home.serving))

    def _replica_states(self) -> list[Any]:
        """Return what of the replicas is worth a look at the pool when it changes."""
        replicas = [*self.pool.status(), *self.pool.spares_status()]
        return [[one["version"], one["versions"], one["state"], one["error"]] for one in replicas]

    async def close(self) -> None:
        """Close the parts made here: see `CallServices`."""
        await super().close()
        await self.changes.close()
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
