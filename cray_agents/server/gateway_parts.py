"""Parts of a gateway that the platform's own and further ones share: access, server, limits."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from cray_agents.config import Config
from cray_agents.errors import ConfigError, SetupError
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import is_loopback
from cray_agents.runtime.gateway.http.protocol import protocol
from cray_agents.runtime.pool.published_replicas import ServingLimits
from cray_agents.runtime.scans.text_scanners import Blocks
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.redaction import Redactor
from cray_agents.server.root_claim import say

if TYPE_CHECKING:
    from cray_agents.runtime.telemetry.live_traces import LiveTraces

PATIENCE = 2.0  # seconds before a message explains a slow start
SWITCH = 0.0005  # seconds that a busy event loop may delay the thread that commits to the store
GC = (10_000, 20, 100)  # full collections are rare: the store's index may have millions of objects


def check_access(config: Config) -> None:
    """Raise ConfigError if other hosts could reach the gateway without API keys."""
    if is_loopback(config.host):
        return
    if config.api_keys == "off":
        raise ConfigError(
            f"api_keys = 'off' on host {config.host!r}: without API keys the gateway listens on "
            "loopback only; leave it at 'auto', or forward a port (ssh -L)",
            param="api_keys",
        )
    if not Keys(config.root).working:
        raise ConfigError(
            f"host {config.host!r}: beyond loopback the gateway asks for API keys, and "
            f"{config.root.root} has none: make one with `cray-agents keys create NAME`, or forward"
            " a port (ssh -L)",
            param="host",
        )


async def open_store(config: Config) -> Store:
    """Open the store; a host new to this root first indexes the footers of its segments."""
    opening = asyncio.create_task(
        asyncio.to_thread(Store, config.root, redactor=Redactor.of(config))
    )
    done, _ = await asyncio.wait([opening], timeout=PATIENCE)
    if not done:
        say("reading what is recorded into this host's index, once: about 25 s for a million calls")
    return await opening


def live_traces(config: Config) -> "LiveTraces | None":
    """Return the sender of spans, if a collector is configured. Raises SetupError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from cray_agents.runtime.telemetry.live_traces import LiveTraces
    except ImportError as error:
        raise SetupError(
            "otlp_endpoint is set, and OpenTelemetry is not installed: pip install "
            f"opentelemetry-exporter-otlp-proto-http ({error})"
        ) from error
    return LiveTraces(config.otlp_endpoint, config.otlp_content)


def blocks_of(config: Config) -> Blocks | None:
    """Return the scanners that block, if any are named. Raises BadInput, SetupError."""
    return Blocks(config.watch.block) if config.watch.block else None


def admitted_each(limits: Config | ServingLimits) -> int:
    """Return how many calls are admitted for each replica: vLLM always has a next one."""
    return limits.max_num_seqs + limits.max_num_seqs // 8


def outage_seconds(limits: Config | ServingLimits, *, scales: bool) -> float:
    """Return how long a request waits without a replica. `scales`: the first one may have to start.

    The same for the platform's own gateway and for further ones.
    """
    return limits.swap_timeout + (limits.start_timeout if scales else 0.0)


def make_server(app: Starlette, config: Config) -> "Gateway":
    """Make the HTTP server of a gateway's application."""
    return Gateway(
        uvicorn.Config(
            app,
            http=protocol(config.head_timeout),
            ws="none",
            log_level="warning",
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=config.idle_timeout,
        )
    )


class Gateway(uvicorn.Server):
    """Uvicorn without signal handlers of its own: `wait_for_end` decides when the platform ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
