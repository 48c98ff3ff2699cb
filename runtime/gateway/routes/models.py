"""Models: OpenAI's list, the versions of a name, and their staging, promotion and canaries.

version_switch.py switches: a version is served only after the pool has proven it. Changes to a name
are ModelEvents, numbered per name: promoted, rolled_back, rejected, canary_started, canary_ended.
"""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.platform.client import LEASE
from cray_agents.records import ModelVersion, ProbeReport, Prompt, Record
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of, may_name
from cray_agents.runtime.gateway.http.bodies import (
    check_known,
    check_run_id,
    damage_told,
    json_response,
    page,
    parse,
)
from cray_agents.runtime.gateway.http.error_envelope import is_anthropic
from cray_agents.runtime.gateway.http.fields import (
    Damaged,
    DataList,
    Fields,
    JobId,
    ModelName,
    named,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.replica_lease import LONGEST
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.registry.canary import CanaryTest
from cray_agents.runtime.registry.lineage import Ancestry, lineage_of, lineage_of_all
from cray_agents.runtime.registry.registry import ModelEvent
from cray_agents.runtime.views.job_hardware import job_events

Contexts: TypeAlias = dict[str, int | None]  # lengths in tokens, by version or name

ANTHROPIC_PAGE, ANTHROPIC_PAGE_MOST = 20, 1000  # models in a page of Anthropic's list

models_router = Router("Models")
router = Router("Versions")


class Model(Record):
    """A model that can be called. `root`: the version that answers.

    `max_model_len`: the tokens of its context; null where no replica holds a version of that name.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Record):
    """The models that can be called."""

    object: Literal["list"]
    data: list[Model]
    damaged: list[Damaged] = Field(default_factory=list)


class ShownVersion(Record):
    """A version with its id, `name@N`. In a list: whether the bare name means it."""

    id: str
    name: str
    number: int
    checkpoint: str
    weights_sha256: str
    job: str | None
    prompts: dict[str, Prompt] = Field(default_factory=dict)
    created: float
    promoted: bool = False


class RunningCanary(ModelEvent):
    """The start of a canary, and the numbers seen so far."""

    seen: dict[str, Any]


class Checkpoint(Fields):
    """A checkpoint: an id, or a directory on the gateway's machine.

    `prompts`: those that the version has beside these weights, by agent.
    """

    checkpoint: str
    prompts: dict[str, Prompt] = Field(default_factory=dict)


class Leased(Fields):
    """The holder of a replica, for how long in seconds, and whether by force."""

    force: bool = False
    holder: str = ""
    seconds: float = Field(LEASE, ge=0, le=LONGEST)


class WhoAndWhy(Fields):
    """The author of a change, the caller's key unless given, and the reason."""

    who: str = ""
    reason: str = ""


class Rejection(WhoAndWhy):
    """A version to reject."""

    version: int
    numbers: dict[str, Any] = Field(default_factory=dict)


class Promotion(Rejection):
    """A version to promote. `force`: even if another name's promoted one is then served no more."""

    force: bool = False


class Rollback(WhoAndWhy):
    """`to`: another version that was promoted once, or any with `force`."""

    to: int | None = None
    force: bool = False


LEASED = Leased()


class AnthropicPage(Record):
    """The parameters of a query for Anthropic's list."""

    limit: int = Field(ANTHROPIC_PAGE, ge=0, le=ANTHROPIC_PAGE_MOST)
    after_id: str | None = None
    before_id: str | None = None


class CanaryRequest(CanaryTest):
    """A canary of a version, with the settings of its test."""

    version: int = Field(strict=True)
    who: str = ""
    reason: str = ""


@models_router.get("/v1/models", Role.use, answer=ModelList, in_runs=True, bare=True)
async def list_models(services: Services, request: Request) -> Response:
    """List the models that can be called.

    Each promoted `name`, and each `name@N`. `root`: the version that answers. `max_model_len`: the
    tokens of its context; null where no replica holds a version of that name.
    """
    check_run_id(request)
    listing = await asyncio.to_thread(_models, services, await _contexts(services))
    models, damage = [m for rows in listing.rows for m in rows], damage_told(listing.damaged)
    if is_anthropic(request.scope):
        answer = _anthropic_page(request, [_anthropic(m) for m in models])
        return json_response({**answer, **damage})
    return json_response({"object": "list", "data": models, **damage})


@models_router.get("/v1/models/lineage", Role.use, answer=DataList[Ancestry])
async def list_lineage(services: Current) -> Response:
    """List all versions of all names with their parents, jobs and datasets, parents first."""
    return json_response({"data": await asyncio.to_thread(lineage_of_all, services.registry)})


@models_router.get("/v1/models/{model}", Role.use, answer=Model, fails="404 model_not_found")
async def retrieve_model(
    services: Current, request: Request, model: Annotated[str, named("model", "model")]
) -> Response:
    """Return a model."""
    row = _model(model, services.registry.resolve(model), await _contexts(services))
    return json_response(_anthropic(row) if is_anthropic(request.scope) else row)


@router.get(
    "/v1/models/{name}/versions",
    Role.use,
    answer=DataList[ShownVersion],
    fails="404 model_not_found",
)
async def list_versions(services: Current, name: ModelName) -> Response:
    """List a name's versions, oldest first."""
    registry = services.registry
    promoted = registry.promoted(name)
    data = [{**_version(v), "promoted": v == promoted} for v in registry.versions(name)]
    return json_response({"data": data})


@router.post("/v1/models/{name}/versions", Role.train, answer=ShownVersion, fails="422 corrupt")
async def register_version(
    services: Current, request: Request, name: ModelName, body: Checkpoint
) -> Response:
    """Make a version of a checkpoint; the same weights and prompts are the same version.

    `checkpoint`: an id, or a directory or a GGUF file on the gateway's machine.
    """
    registry, roots = services.registry, may_name(request, services.model_roots)
    imported = await asyncio.to_thread(registry.import_checkpoint, body.checkpoint, roots)
    version = await asyncio.to_thread(registry.register, name, *imported, body.prompts)
    if services.traces is not None and version.job is not None:
        events: list[Any] = []
        with suppress(Corrupt):
            events = await asyncio.to_thread(job_events, services.home, version.job)
        midway = {event.get("checkpoint") for event in events if event.get("event") == "version"}
        older = (one.checkpoint for one in registry.versions(name) if one.number < version.number)
        if version.checkpoint not in midway.union(older):  # else its span comes, or came before
            services.traces.end_job(version.job, events, version.id)
    return json_response(_version(version))


@router.post(
    "/v1/models/{name}/versions/{number}/stage",
    Role.train,
    answer=ProbeReport,
    fails="404 model_not_found, 409 swap_failed, 409 would_displace, 409 pool_busy",
)
async def stage_version(
    services: Current, request: Request, name: ModelName, number: str, body: Leased = LEASED
) -> Response:
    """Load a version into one replica, and prove it by its probe.

    The other replicas serve on. Only `force` (role admin) takes a promoted version off its last
    replica, for a `holder`. It comes back when the version is rejected, or `seconds` after the
    holder last renewed the lease at /v1/pool/lease.
    """
    version = services.registry.resolve(f"{name}@{number}")
    return json_response(await services.versions.stage(version, **_leased(request, body)))


@router.post(
    "/v1/jobs/{job_id}/receive",
    Role.train,
    answer=dict[str, bool],
    fails="409 swap_failed, 409 pool_busy",
)
async def receive_weights(
    services: Current, request: Request, job_id: JobId, body: Leased = LEASED
) -> Response:
    """Let a replica receive the weights that a job offers while it writes its files.

    The replica answers nobody until it has proven a version that is staged or promoted. It goes
    back to its former version if the job ends otherwise, or if a request needs that one. `force`
    and `holder` are as for staging. `received` is false, and nothing changes, if the job offers no
    weights or has published them.
    """
    leased = _leased(request, body)
    if not services.home.job(job_id).is_dir():
        raise NotFound(f"no job {job_id!r}", param="job_id")
    received = await services.versions.receive(job_id, **leased)
    return json_response({"received": received})


def _leased(request: Request, body: Leased) -> dict[str, Any]:
    """Return who asks for a replica, for how long, and whether by force.

    Raises AccessDenied for force without the role admin.
    """
    caller = caller_of(request)
    if body.force:
        act = "to stage with force, which may take what is promoted off its last replica,"
        caller.check_role(Role.admin, act)
    holder = body.holder[:200] or (caller.name if body.force else "")
    return {"force": body.force, "holder": holder, "seconds": body.seconds}


@router.post(
    "/v1/models/{name}/promote",
    Role.admin,
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 409 would_displace",
)
async def promote(
    services: Current, request: Request, name: ModelName, body: Promotion
) -> Response:
    """Serve a version under its name, answered when the pool holds it."""
    version = services.registry.resolve(f"{name}@{body.version}")
    event = await services.versions.promote(
        version, **_who_and_why(request, body), numbers=body.numbers, force=body.force
    )
    return json_response(event)


@router.post(
    "/v1/models/{name}/rollback",
    Role.admin,
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 400 invalid_value",
)
async def roll_back(
    services: Current, request: Request, name: ModelName, body: Rollback
) -> Response:
    """Serve the version that was promoted before."""
    reasons = _who_and_why(request, body)
    event = await services.versions.roll_back(name, body.to, **reasons, force=body.force)
    return json_response(event)


@router.post(
    "/v1/models/{name}/reject",
    Role.admin,
    answer=ModelEvent,
    fails="404 model_not_found, 400 invalid_value, 400 canary_running",
)
async def reject(services: Current, request: Request, name: ModelName, body: Rejection) -> Response:
    """Note that a version is not good enough."""
    version = services.registry.resolve(f"{name}@{body.version}")
    reasons = _who_and_why(request, body)
    return json_response(await services.versions.reject(version, **reasons, numbers=body.numbers))


@router.get(
    "/v1/models/{name}/history", Role.use, answer=DataList[ModelEvent], fails="404 model_not_found"
)
async def list_history(services: Current, name: ModelName) -> Response:
    """List the events of a name, oldest first."""
    events = services.registry.history(name)
    return json_response({"data": [event.model_dump(mode="json") for event in events]})


@router.get(
    "/v1/models/{name}/lineage", Role.use, answer=DataList[Ancestry], fails="404 model_not_found"
)
async def lineage(services: Current, name: ModelName) -> Response:
    """List the ancestors of versions with their jobs and datasets, parents first.

    `name`: all its versions and their ancestors. `name@N`: its ancestors and descendants.
    """
    return json_response({"data": await asyncio.to_thread(lineage_of, services.registry, name)})


@router.get("/v1/models/{name}/canary", Role.use, answer=RunningCanary)
async def retrieve_canary(services: Current, name: ModelName) -> Response:
    """Return the running canary of a name, and the numbers seen so far."""
    canary = services.versions.live.canary(name)
    if canary is None:
        raise NotFound(f"no canary of {name!r} is running", param="name")
    return json_response({**canary.start.model_dump(mode="json"), "seen": canary.numbers()})


@router.post(
    "/v1/models/{name}/canary",
    Role.admin,
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 400 canary_running",
)
async def start_canary(
    services: Current, request: Request, name: ModelName, body: CanaryRequest
) -> Response:
    """Answer a share of the live sessions by a version.

    A session is named by `X-Session-Id`, else by `user`, else by its run; it stays with its
    version. The canary is rolled back by itself when more requests fail or rewards are lower.
    """
    version = services.registry.resolve(f"{name}@{body.version}")
    own = [key] if (key := caller_of(request).key_name) else []
    test = CanaryTest(**body.model_dump(include=set(CanaryTest.model_fields)))
    test = test.model_copy(update={"givers": sorted({*own, *(test.givers or ())})})
    reasons = _who_and_why(request, body)
    return json_response(await services.versions.start_canary(version, test, **reasons))


@router.delete("/v1/models/{name}/canary", Role.admin, answer=ModelEvent, fails="409 swap_failed")
async def stop_canary(
    services: Current, request: Request, name: ModelName, query: Annotated[WhoAndWhy, Query()]
) -> Response:
    """Answer all sessions by the promoted version again."""
    reasons = _who_and_why(request, query)
    return json_response(await services.versions.stop_canary(name, **reasons))


def _who_and_why(request: Request, body: WhoAndWhy | CanaryRequest) -> dict[str, str]:
    """Return the author of a change and the reason; the default author is the caller's key."""
    return {"who": body.who or caller_of(request).name, "reason": body.reason}


async def _contexts(services: Services) -> Contexts:
    """Return the context lengths of the versions that replicas hold, and of their names."""
    engines = {s.version: s.engine for s in services.pool.engines() if s.engine is not None}
    lengths = await asyncio.gather(*(engine.context() for engine in engines.values()))
    contexts = dict(zip(engines, lengths, strict=True))
    return {version.partition("@")[0]: length for version, length in contexts.items()} | contexts


def _models(services: Services, contexts: Contexts) -> checksums.Listing[list[dict[str, Any]]]:
    """Return the models of each name: the bare name once it is promoted, and its versions."""
    registry = services.registry

    def read(name: str) -> list[dict[str, Any]]:
        try:
            promoted, versions = registry.promoted(name), registry.versions(name)
        except NotFound:  # a folder without a version
            return []
        bare = [] if promoted is None else [_model(name, promoted, contexts)]
        return [*bare, *(_model(version.id, version, contexts) for version in versions)]

    return checksums.list_whole(registry.names(), read)


def _model(model_id: str, version: ModelVersion, contexts: Contexts) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": int(version.created),
        "owned_by": "cray-agents",
        "root": version.id,
        "max_model_len": contexts.get(version.id, contexts.get(version.name)),
    }


def _anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's shape."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = model["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _anthropic_page(request: Request, models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a page in Anthropic's shape. Raises BadInput."""
    check_known(request.query_params, (*AnthropicPage.model_fields, "beta"))
    query = parse(AnthropicPage, dict(request.query_params))
    ids = [model["id"] for model in models]
    first, last = query.after_id, query.before_id
    for name, cursor in (("after_id", first), ("before_id", last)):
        if cursor is not None and cursor not in ids:
            raise BadInput(f"{name} is no model of this list: {cursor[:200]!r}", param=name)
    rest = models[ids.index(first) + 1 if first else 0 : ids.index(last) if last else None]
    limit = max(1, query.limit)
    rows = rest[-limit:] if last and not first else rest[:limit]
    fields = page(rows, len(rest) > limit)
    return {name: value for name, value in fields.items() if name != "object"}


def _version(version: ModelVersion) -> dict[str, Any]:
    return {**version.model_dump(mode="json"), "id": version.id}
