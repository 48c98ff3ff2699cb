"""What the gateway stands on; `cray-agents up` builds it, tests build it with a scripted engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.runtime.datasets.build_process import BuildProcess
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.tuning_jobs import FineTuning
from cray_agents.runtime.gateway.http.auth import Mode
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.gateway.ownership import RunOwners
from cray_agents.runtime.gateway.version_switch import Promoting
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import REWARD_LIMIT


@dataclass
class Services:
    """The parts behind the routes. `code` is the trainer's code version that jobs are named by.

    `keep_alive`: seconds after which a waiting stream gets a comment line. `max_body`: bytes.
    `max_file`: bytes of a file sent in one request; `max_upload`: of one sent in parts.
    `body_timeout`: seconds that a request's body may stand still.
    `model_roots`: where directories lie that keys of the role train may name.
    `api_keys`: when a key is needed (auth.py). `token`: a key for the platform's own processes,
    known to nobody else; "" for none. `reward_limit`: see feedback.py.
    """

    home: Home
    store: Store
    registry: Registry
    trainer: Trainer
    pool: Pool
    platform: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    keep_alive: float = 2.0
    max_body: int = 64 * 2**20
    max_file: int = 8 * 2**30
    max_upload: int = 2**40
    body_timeout: float = 60.0
    model_roots: tuple[Path, ...] = ()
    api_keys: Mode = "auto"
    token: str = ""
    reward_limit: float = REWARD_LIMIT
    admission: Admission = field(default_factory=Admission)
    metrics: Metrics = field(default_factory=Metrics)
    run_owners: RunOwners = field(init=False)
    fine_tuning: FineTuning = field(init=False)
    datasets: BuildProcess = field(init=False)
    promoting: Promoting = field(init=False)

    def __post_init__(self) -> None:
        """Make the parts that are made of other parts."""
        self.run_owners = RunOwners(self.store)
        self.datasets = BuildProcess(self.home)
        self.fine_tuning = FineTuning(
            self.home, self.registry, self.trainer, Files(self.home), code=self.code
        )
        self.promoting = Promoting(
            self.home, self.store, self.registry, self.pool, self.admission, self.metrics
        )

    async def close(self) -> None:
        """End what was made here; whoever made the other parts closes them."""
        await self.promoting.close()
        await self.fine_tuning.close()
        await self.datasets.close()
