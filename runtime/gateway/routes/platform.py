"""The platform itself: health, the replicas, numbers for Prometheus, and the stream of changes.

Also what further gateways alone report to the controller's and ask of it: they come by
runtime/gateway/further_gateway.py, with the platform's own key, and for a proof without it.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Annotated, Any, Literal

from fastapi import Query
from prometheus_client.exposition import choose_encoder
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cray_agents.errors import BadInput, NotFound, StoreError
from cray_agents.platform.client import LEASE
from cray_agents.records import Record
from cray_agents.runtime.gateway.http.api_keys import Keys, Role, key_names
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer_read, json_response, last_lines
from cray_agents.runtime.gateway.http.error_envelope import envelope, without_paths
from cray_agents.runtime.gateway.http.fields import Count, Fields, MaybeReal, ReplicaNumber
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.replica_lease import LONGEST
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.telemetry.call_metrics import EngineCollector, scrape
from cray_agents.runtime.views.health_warnings import health_warnings
from cray_agents.runtime.views.view_records import (
    KeyDemand,
    QueueClass,
    QueueState,
    ReplicaLease,
    ReplicaList,
    WarningList,
    WhoAmI,
)
from cray_agents.runtime.vllm_plugins import proof

DAY = 86_400.0  # seconds
KEEP_ALIVE_INTERVAL = 15.0  # seconds of silence after which a comment line is sent, at most
METRICS: dict[str, Any] = {"text/plain": {}, "application/openmetrics-text": {}}

router = Router("Platform")


class ReplicaRenewal(Fields):
    """A lease that goes on for `seconds`."""

    holder: str
    seconds: float = Field(LEASE, ge=0, le=LONGEST)


class VersionWanted(Fields):
    """A version that a further gateway needs."""

    version: str


class SessionOutcome(Record):
    """An answer to a live session of a model that has a canary."""

    model: str
    session: str
    version: str
    failed: bool


class EngineFailure(Record):
    """A replica, by its place, whose engine was found dead when it had lost `losses` processes."""

    replica: int
    losses: int
    why: str


class GatewayReport(Record):
    """A gateway's name, its requests inside and waiting, and what happened since its last report.

    `rewarded`: runs that got a reward.
    """

    gateway: str = Field(max_length=200)
    demand: int = Field(ge=0, le=10**9)
    outcomes: list[SessionOutcome] = Field(default_factory=list)
    rewarded: list[str] = Field(default_factory=list)
    failures: list[EngineFailure] = Field(default_factory=list)


# ---- health
@router.get("/health", "open", answer=dict[str, Literal["ok"]], local=True)
async def health() -> Response:
    """Tell that the gateway is up."""
    return json_response({"status": "ok"})


@router.get("/health/live", "open", answer=dict[str, Literal["ok"]], local=True)
async def live() -> Response:
    """Tell that the gateway is up."""
    return json_response({"status": "ok"})


@router.get(
    "/health/ready", "open", answer=dict[str, Literal["ready"]], fails="503 not_ready", local=True
)
async def ready(services: Current) -> Response:
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


@router.get("/v1/health/warnings", Role.train, answer=WarningList)
async def list_warnings(
    services: Current,
    request: Request,
    since: Annotated[MaybeReal, Query(description="24 hours ago unless given.")] = None,
) -> Response:
    """List what went wrong: failed jobs, runs without rewards, equal rewards, parser misses.

    They are looked for in the jobs that ended and the runs that began `since` then, in unix
    seconds.
    """
    begin = time.time() - DAY if since is None else since
    missing = services.versions.missing()

    def read() -> dict[str, Any]:
        failed = _failed_jobs(services, begin)
        return {"since": begin, "data": health_warnings(services.store, begin, missing, failed)}

    return await answer_read(request, read, long=True)


def _failed_jobs(services: Services, since: float) -> dict[str, str]:
    """Return the errors of the jobs that failed since then."""
    failed = {}
    for path in services.home.jobs.glob("job-*/status.json"):
        with suppress(FileNotFoundError):  # it is tried again
            if path.stat().st_mtime >= since:
                job = services.trainer.status(path.parent.name)
                if job.state == "failed":
                    failed[job.id] = without_paths(job.error or "")
    return failed


# ---- what there is
@router.get("/v1/platform", Role.use, answer=dict[str, Any])
async def platform(services: Current) -> Response:
    """Return the platform's engine, trainer, scheduler, home and version, and who controls it.

    `gateways`: the further gateways that report to it, if there are any.
    """
    controller = {} if services.lease is None else {"controller": services.lease.describe()}
    further = services.shares.gateways
    return json_response(
        services.platform | controller | ({"gateways": further} if further else {})
    )


@router.get("/v1/whoami", Role.use, answer=WhoAmI)
async def whoami(services: Current, request: Request) -> Response:
    """Return the caller's key and role, and the platform that answers.

    `features`: `keys`, requests need an API key; `score`, there are engines to score tokens with.
    """
    caller = caller_of(request)
    needs_key = services.api_keys == "required" or (
        services.api_keys == "auto" and await asyncio.to_thread(lambda: Keys(services.home).ever)
    )
    return json_response(
        {
            "key": caller.key_id if caller.key_name else None,
            "name": caller.name,
            "role": caller.role.name,
            "home": str(services.home.root) if caller.role is Role.admin else None,
            "version": services.platform.get("version"),
            "features": ["keys"] * needs_key + ["score"] * bool(services.pool.status()),
        }
    )


@router.get("/v1/queue", Role.use, answer=QueueState)
async def queue(services: Current, request: Request) -> Response:
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

    return json_response(
        QueueState(
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
    )


@router.get("/v1/pool", Role.admin, answer=ReplicaList)
async def pool(services: Current) -> Response:
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


@router.get(
    "/v1/pool/{replica}/log",
    Role.admin,
    media={"text/plain": {"type": "string"}},
    fails="404 not_found",
)
def read_replica_log(
    services: Current,
    replica: ReplicaNumber,
    tail: Annotated[Count, Query(description="How many lines.")] = 200,
) -> bytes:
    """Return the last lines of a replica's log, also of an earlier start. They count from 0."""
    if replica >= len(services.pool.status()) + len(services.pool.spares_status()):
        raise NotFound(f"no replica {replica}: GET /v1/pool lists them", param="replica")
    texts = (services.home.replicas / str(replica)).glob("[0-9]*/job.txt")
    jobs = sorted(texts, key=lambda text: int(text.parent.name))
    log = services.home.logs / f"replica-{replica}.log"
    return last_lines(jobs[-1] if jobs and not log.exists() else log, tail)


@router.post("/v1/pool/lease", Role.admin, answer=ReplicaLease, fails="404 no_lease", audited=False)
async def renew_lease(services: Current, body: ReplicaRenewal) -> Response:
    """Keep a version that was staged by force for a while more (60 s by default).

    With 0 seconds the promoted version is loaded again. A stage with `force` begins a lease.
    """
    return json_response(services.versions.leases.renew(body.holder, body.seconds).status())


# ---- numbers and changes
@router.get("/metrics", Role.use, media=METRICS, local=True)
async def metrics(services: Current, request: Request) -> Response:
    """Return the numbers for Prometheus, in its text format or OpenMetrics.

    They are of the process that answers. Where several share a port, `gateway` names it.
    """
    services.metrics.set_gauges(services.admission, services.pool.status())
    return await _exposed(request, services.metrics)


@router.get("/metrics/engines", Role.use, media=METRICS)
async def engine_metrics(services: Current, request: Request) -> Response:
    """Return the metrics of every replica's vLLM for Prometheus.

    Each sample has the labels replica, host and version. `cray_engine_up` is 0 for a replica that
    did not answer.
    """
    texts = await scrape(services.pool.engines())
    return await _exposed(request, EngineCollector(texts))


async def _exposed(request: Request, collected: Any) -> Response:
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    # in a thread: a thousand series take some milliseconds
    text = await asyncio.to_thread(encode, collected)
    return Response(text, headers={"content-type": kind})


@router.get("/v1/events", Role.train, media={"text/event-stream": {}}, fails="400 invalid_value")
async def stream_changes(
    services: Current,
    after: Annotated[str | None, Query(description="The `id` of the last event read.")] = None,
) -> Response:
    """Stream which runs, jobs, loops, datasets, models, batches, keys and replicas changed.

    Each event is `{"kind", "id", "change"}`; its `id` line is the cursor to go on after. Events
    come four times a second at most, and changes of one thing in between are one. `kind` is run,
    job, loop, dataset, model, batch, pool, key or reset; `change` is appended, forgotten or
    changed. An `id` of "" means any of its kind. `reset`: fetch everything anew, as the cursor is
    of before a restart (`restarted`) or too old (`lagged`). Comment lines keep the stream alive.
    """
    changes = services.changes.read(after, min(KEEP_ALIVE_INTERVAL, services.keep_alive * 5))
    first = await anext(changes)  # raises for what is no cursor

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(changes):
            yield first
            async for event in changes:
                yield event

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), headers=headers, media_type="text/event-stream")


# ---- further gateways
@router.post("/v1/gateways", Role.admin, answer=dict[str, float], audited=False)
async def report_gateway(services: Current, body: GatewayReport) -> Response:
    """Take a further gateway's report, and return its share of the engines.

    Gateways send it; see `cray-agents up --gateway-only`.
    """
    services.note_other_gateways()
    services.shares.note(body.gateway, body.demand)
    for failure in body.failures:
        services.pool.fail(failure.replica, failure.losses, failure.why)
    live, admission = services.versions.live, services.admission
    for one in body.outcomes:
        live.note_outcome(one.model, one.session, one.version, failed=one.failed)
    for run_id in body.rewarded:
        await live.note_reward(run_id)
    return json_response({"share": services.shares.of(body.gateway, admission.demand)})


@router.post(
    "/v1/gateways/load",
    Role.admin,
    answer=dict[str, Any],
    fails="404 model_not_found, 503 model_not_loaded",
    audited=False,
)
async def load_for_gateway(services: Current, body: VersionWanted) -> Response:
    """Load a version that a request at a further gateway needs, where that displaces nothing.

    Gateways ask for it; it returns when the version is loaded, or will be in any case.
    """
    loading = services.versions.load_on_demand(services.registry.resolve(body.version).id)
    if loading is not None:
        await asyncio.shield(loading)
    return json_response({})


@router.get(proof.PATH, "open", answer=dict[str, str], local=True)
async def prove_gateway(services: Current, request: Request, nonce: str = "") -> Response:
    """Prove that this gateway is of the platform whose claim on the root the caller has read.

    `nonce`: 64 random hexadecimal digits.
    """
    if (answer := proof.proof_of(services.token, nonce, *request.scope["server"])) is None:
        raise BadInput("nonce must be 64 hexadecimal digits, of a platform", param="nonce")
    return json_response({"proof": answer})
