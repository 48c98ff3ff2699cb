"""What the gateway stands on; `cray-agents up` builds it, tests build it with a scripted engine."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.records import Layout, ProbePrompt, ProbeReport
from cray_agents.runtime.registry import Registry
from cray_agents.runtime.store import Store

Wanted = str | Callable[[], str]  # a name@N, or what to ask for it each time one could serve


class Pool(Protocol):
    """The replicas, as the gateway sees them. Answers and chunks are stamped: `model` is `name@N`.

    A request for a bare name gives a function, so that one that waits through a promotion is
    served by the version which the name means then.
    """

    async def chat(self, version: Wanted, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request on a replica that holds the version. Raises EngineError's kinds."""
        ...

    def stream(self, version: Wanted, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chunks; closing the iterator ends the request. Raises as `chat` does."""
        ...

    async def swap(self, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> ProbeReport:
        """Let all replicas hold the version, proven by its probe. Raises SwapError."""
        ...

    def wake(self) -> None:
        """A name's meaning has changed: let waiting requests ask for it again."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """A dict per replica; `version` is what it holds."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a replica can answer now."""
        ...


@dataclass
class Services:
    """The parts behind the routes. `code` is the trainer's code version that jobs are named by,
    `layout` that of jobs which name none.

    `keep_alive`: seconds after which a waiting stream gets a comment line. `max_body`: bytes.
    """

    home: Home
    store: Store
    registry: Registry
    trainer: Trainer
    pool: Pool
    platform: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    layout: Layout = field(default_factory=Layout)
    keep_alive: float = 2.0
    max_body: int = 64 * 2**20
