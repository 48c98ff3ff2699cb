"""The platform itself: health, keys, the replicas, and the numbers for Prometheus."""

import asyncio
import time
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import StoreError
from cray_agents.runtime.gateway.http.api_keys import Keys, Role, key_names
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    field,
    json_response,
    read_json,
    real,
)
from cray_agents.runtime.gateway.http.error_envelope import envelope
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.http.routing import query as query_of
from cray_agents.runtime.gateway.http.shapes import (
    ANY,
    REAL,
    TEXT,
    TEXT_OR_NONE,
    Described,
    list_of,
    object_of,
    or_none,
)
from cray_agents.runtime.gateway.replica_lease import lease_seconds
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.views.health_warnings import health_warnings
from cray_agents.runtime.views.view_records import KeyDemand, QueueClass, QueueState, WarningList

DAY = 86_400.0  # seconds
ALIVE = object_of({"status": {"const": "ok"}})
LEASE = object_of(
    {"holder": TEXT, "version": TEXT, "displaced": list_of(TEXT), "seconds_left": REAL}
)

router = Router("Platform")


@router.get("/health", "open", answer=ALIVE)
async def health(services: Services, request: Request) -> Response:
    """Tell that the gateway is up."""
    return json_response({"status": "ok"})


@router.get("/health/live", "open", answer=ALIVE)
async def live(services: Services, request: Request) -> Response:
    """Tell that the gateway is up."""
    return json_response({"status": "ok"})


@router.get(
    "/health/ready", "open", answer=object_of({"status": {"const": "ready"}}), fails="503 not_ready"
)
async def ready(services: Services, request: Request) -> Response:
    """Tell that a replica can answer, and that its answers can be recorded."""
    missing, why = services.versions.missing(), None
    if missing or not services.pool.ready:
        why = f"no replica can answer with {', '.join(missing)}" if missing else "no replica is up"
        lease = services.versions.leases.lease
        if lease is not None and services.pool.ready:
            why += f": {lease.holder!r} has {lease.version} in its place, for a while"
        why += "; GET /v1/pool tells more"
    try:
        await asyncio.to_thread(services.store.check_room)
    except StoreError as error:
        why = f"{error}: no call is answered that cannot be recorded"
    if why is None:
        return json_response({"status": "ready"})
    body = envelope(503, why, "not_ready")
    return Response(body, 503, {"retry-after": "1"}, "application/json")


@router.get("/v1/platform", Role.use, answer=ANY)
async def platform(services: Services, request: Request) -> Response:
    """Return the platform's engine, trainer, scheduler, home and version, and who controls it.

    `gateways`: the further gateways that report to it, if there are any.
    """
    controller = {} if services.lease is None else {"controller": services.lease.describe()}
    further = services.shares.gateways
    return json_response(
        services.platform | controller | ({"gateways": further} if further else {})
    )


@router.get(
    "/v1/whoami",
    Role.use,
    answer=object_of(
        {
            "key": {"type": ["string", "null"], "description": "Its id; null without one."},
            "name": TEXT,
            "role": {"enum": list(Role.__members__)},
            "home": {"type": ["string", "null"], "description": "The root, for admins."},
            "version": TEXT_OR_NONE,
            "features": list_of({"enum": ["keys", "score"]}),
        }
    ),
)
async def whoami(services: Services, request: Request) -> Response:
    """Return the caller's key and role, and the platform that answers.

    `features`: `keys`, requests need an API key; `score`, there are engines to score tokens with.
    """
    caller = caller_of(request)
    key = caller.key_id if caller.key_name else None
    needs_key = services.api_keys == "required" or (
        services.api_keys == "auto" and await asyncio.to_thread(lambda: Keys(services.home).ever)
    )
    return json_response(
        {
            "key": key,
            "name": caller.name,
            "role": caller.role.name,
            "home": str(services.home.root) if caller.role is Role.admin else None,
            "version": services.platform.get("version"),
            "features": ["keys"] * needs_key + ["score"] * bool(services.pool.status()),
        }
    )


@router.get("/v1/queue", Role.use, answer=QueueState)
async def queue(services: Services, request: Request) -> Response:
    """Return the requests at the engines and those that wait, by class and by key.

    Callers below `admin` see their own key only.
    """
    caller, admission = caller_of(request), services.admission
    waiting = admission.waiting_by_key()
    if caller.role is not Role.admin:
        waiting = {key: count for key, count in waiting.items() if key == caller.key_id}
    names = await asyncio.to_thread(key_names, services.home) if waiting else {}
    room = admission.room()

    def of_class(batch: bool) -> QueueClass:
        return QueueClass(inside=admission.inside(batch), waiting=admission.waiting(batch))

    state = QueueState(
        capacity=admission.capacity,
        reserve=admission.reserve,
        limit=room.limit,
        remaining=room.remaining,
        mean_seconds=admission.mean_seconds,
        interactive=of_class(False),
        batch=of_class(True),
        parked=admission.parked,
        keys=[
            KeyDemand(key=key, name=names.get(key, key), waiting=count)
            for key, count in sorted(waiting.items(), key=lambda item: -item[1])
        ],
    )
    return json_response(state.model_dump(mode="json"))


@router.get(
    "/v1/health/warnings",
    Role.train,
    query={"since": Described(REAL, "Unix seconds; 24 hours ago unless given.")},
    answer=WarningList,
)
async def list_warnings(services: Services, request: Request) -> Response:
    """List failures that raise no error: runs without rewards, equal rewards, parser misses.

    They are looked for in the runs that began since then.
    """
    since = real(query_of(request), "since", time.time() - DAY)
    missing = services.versions.missing()

    def read() -> dict[str, Any]:
        return {"since": since, "data": health_warnings(services.store, since, missing)}

    return await answer_read(request, read, long=True)


@router.get(
    "/v1/pool",
    Role.admin,
    answer=object_of(
        {"data": list_of(ANY), "spares": list_of(ANY), "lease": or_none(LEASE)}, {"turns": ANY}
    ),
)
async def pool(services: Services, request: Request) -> Response:
    """List the replicas and the versions in them.

    `spares`: replicas that were started for versions that no other holds. `lease`: the holder for
    whom the only replica has another version than the promoted one. `turns`: how often jobs trained
    on the replicas' GPUs while these slept, and all the seconds of that by phase.
    """
    lease, turns = services.versions.leases.lease, services.pool.turns
    return json_response(
        {
            "data": services.pool.status(),
            "spares": services.pool.spares_status(),
            "lease": lease.status() if lease else None,
        }
        | ({} if turns is None else {"turns": turns})
    )


@router.post(
    "/v1/pool/lease",
    Role.admin,
    body=object_of({"holder": TEXT}, {"seconds": REAL}),
    answer=LEASE,
    fails="404 no_lease",
)
async def renew_lease(services: Services, request: Request) -> Response:
    """Keep a version that was staged by force for a while more (60 s by default).

    With 0 seconds the promoted version is loaded again. A stage with `force` begins a lease.
    """
    body = await read_json(request, services.max_settings)
    holder, seconds = field(body, "holder", str), lease_seconds(body)
    return json_response(services.versions.leases.renew(holder, seconds).status())


@router.get("/metrics", Role.use, media={"text/plain": {}, "application/openmetrics-text": {}})
async def metrics(services: Services, request: Request) -> Response:
    """Return the numbers for Prometheus, in its text format or OpenMetrics.

    They are of the process that answers. Where several share a port, `gateway` names it.
    """
    services.metrics.set_gauges(services.admission, services.pool.status())
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    # in a thread: a thousand series take some milliseconds
    text = await asyncio.to_thread(encode, services.metrics)
    return Response(text, headers={"content-type": kind})
