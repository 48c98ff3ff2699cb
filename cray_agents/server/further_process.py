"""Further gateway process: one more gateway on a root that another process decides for.

`up` with `gateways` starts some at its own port (compose.py), and `up --gateway-only`
one by hand, as on another host. This module makes the parts and ends them; what such a gateway
answers itself is in runtime/gateway/further_gateway.py.
"""

import asyncio
import gc
import os
import signal
import socket
import ssl
import sys
import time
from contextlib import closing

import uvloop

from cray_agents.config import Config
from cray_agents.errors import CrayError, SetupError
from cray_agents.processes import SAFE_IMPORTS, alive
from cray_agents.runtime.gateway.further_gateway import (
    ControllerLink,
    ControllerReports,
    FurtherServices,
    create_further_app,
    share_of,
)
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import is_loopback
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.pool.published_replicas import FollowedPool
from cray_agents.runtime.pool.vllm_http import CA, client_context
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.server.gateway_parts import (
    GC,
    SWITCH,
    admitted_each,
    blocks_of,
    check_access,
    live_traces,
    make_server,
    open_store,
    outage_seconds,
)
from cray_agents.server.gateway_ports import address, listen_together
from cray_agents.server.platform_process import ReplicaCount, command
from cray_agents.server.root_claim import say

ORPHANED = 120.0  # seconds without a controller after which a gateway of `up` ends
_LOOK = 0.5  # seconds between two looks if it is still needed


def serve_further(config: Config, starter: int | None = None) -> None:
    """Run a further gateway until SIGINT or SIGTERM. Raises SetupError.

    `starter`: the pid of the platform that started it. Without that platform it ends when another
    one of this host has taken over, or when none does.
    """
    check_access(config)
    listener, seat = listen_together(config.root, config.host, config.port)
    os.environ.update(SAFE_IMPORTS)  # of all that is started from here
    with listener, closing(seat):
        uvloop.run(run_further(config, listener, starter))


async def run_further(config: Config, listener: socket.socket, starter: int | None) -> None:
    """Run the gateway in the event loop until it is told to end. Raises SetupError."""
    sys.setswitchinterval(SWITCH)
    gc.set_threshold(*GC)
    link = ControllerLink(config.root)
    await link.look()
    if not link.claim.token:
        await link.close()
        raise SetupError(
            f"no platform runs on {config.root.root}: start it with "
            f"`{command('up', config.root)}`, and further gateways then"
        )
    store = await open_store(config)
    services = further_services(config, link, store)
    try:
        await services.reports.send()  # its share, before the first request
    except CrayError as error:
        say(str(error))
    mode = config.api_keys if is_loopback(config.host) else "required"
    app = create_further_app(services, Keys(config.root), mode)
    await services.follow()
    server = make_server(app, config)
    # both end the gateway, also by an error
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    say(f"further gateway: {address(listener)}/v1")
    ending = asyncio.create_task(_wait_for_end(services, starter))
    try:
        done, _ = await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises the error of the task
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)  # its requests end
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await services.close()
        await store.close()


def further_services(config: Config, link: ControllerLink, store: Store) -> FurtherServices:
    """Make the parts of a further gateway."""
    name = f"{socket.gethostname()}:{os.getpid()}"
    registry = Registry(config.root)
    reports = ControllerReports(name, link)
    pool = FollowedPool(
        config.root.serving,
        answer_timeout=config.engine_timeout,
        on_failure=reports.note_failure,
        tls=replica_tls(config),
        affinity=config.replica_affinity,
    )
    admission = Admission(
        lambda: share_of(pool.serving * admitted_each(pool.limits), reports),
        lambda: share_of(config.max_queue, reports),
        serves=lambda model: pool.serves(registry.resolve(model).id),
        swapping=lambda: pool.swapping,
        outage=lambda: outage_seconds(pool.limits, scales=replicas_scale(link)),
    )
    return FurtherServices(
        config.root,
        store,
        registry,
        pool,
        link,
        reports,
        admission=admission,
        keep_alive=config.keep_alive,
        body_timeout=config.body_timeout,
        reward_limit=config.reward_limit,
        run_headers=tuple(config.run_headers),
        traces=live_traces(config),
        blocks=blocks_of(config),
        metrics=Metrics(gateway=name),
    )


def replicas_scale(link: ControllerLink) -> bool:
    """Tell whether the controller's replicas come and go with the load, by its claim."""
    replicas = link.claim.replicas
    return bool(replicas) and ReplicaCount.parse(replicas).least is not None


def replica_tls(config: Config) -> ssl.SSLContext | None:
    """Return the context that verifies replicas; None without TLS. Raises SetupError."""
    if config.replica_tls == "off":
        return None
    # late, as cryptography takes a moment to import
    from cray_agents.runtime.pool.replica_certificates import tls_folder

    folder = tls_folder(config.replica_tls, config.root.tls)
    assert folder is not None
    return client_context(folder / CA)


async def _wait_for_end(services: FurtherServices, starter: int | None) -> None:
    signalled = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, signalled.set)
    first = services.link.claim.term
    while not signalled.is_set():
        try:
            await asyncio.wait_for(signalled.wait(), _LOOK)
        except TimeoutError:
            if starter is not None and not alive(starter) and _is_unneeded(services, first):
                return


def _is_unneeded(services: FurtherServices, first: int) -> bool:
    """Tell whether a new platform of this host starts its own gateways, or none has come."""
    silent = time.monotonic() - services.reports.answered
    if silent > ORPHANED:
        say(f"this gateway ends: no controller has answered for {silent:.0f} s")
        return True
    claim = services.link.claim
    replaced = claim.term != first and claim.here and silent < _LOOK
    if replaced:
        say("this gateway ends: another platform has taken over, and starts its own")
    return replaced
