"""Models: OpenAI's list, the versions of a name, and their staging, promotion and canaries.

version_switch.py switches: a version is served only after the pool has proven it. Changes to a name
are ModelEvents, numbered per name: promoted, rolled_back, rejected, canary_started, canary_ended.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.records import ModelVersion, ProbeReport
from cray_agents.runtime.disk import checksums, journal
from cray_agents.runtime.gateway.http import bodies
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of, may_name
from cray_agents.runtime.gateway.http.bodies import (
    damage_told,
    field,
    has_body,
    json_response,
    number,
    page,
    parse,
    path_id,
    read_json,
)
from cray_agents.runtime.gateway.http.error_envelope import is_anthropic
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    ANY,
    BOOL,
    DAMAGED,
    REAL,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    EditedRecord,
    NamedShape,
    Schema,
    all_of,
    data_of,
    list_of,
    object_of,
)
from cray_agents.runtime.gateway.replica_lease import lease_seconds
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.registry.canary import CanaryTest
from cray_agents.runtime.registry.lineage import Ancestry, lineage_of, lineage_of_all
from cray_agents.runtime.registry.registry import ModelEvent

Contexts: TypeAlias = dict[str, int | None]  # lengths in tokens, by version or name

ANTHROPIC_PAGE, ANTHROPIC_PAGE_MOST = 20, 1000  # models in a page of Anthropic's list
MODEL = NamedShape(
    "Model",
    object_of(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": WHOLE,
            "owned_by": TEXT,
            "root": TEXT,
            "max_model_len": WHOLE_OR_NONE,
        }
    ),
)
MODEL_LIST = NamedShape(
    "ModelList", object_of({"object": {"const": "list"}, "data": list_of(MODEL)}, DAMAGED)
)
VERSION = NamedShape("ShownVersion", all_of(ModelVersion, object_of({"id": TEXT})))
WHO_AND_WHY: Schema = {"who": TEXT, "reason": TEXT}
LEASED = object_of(optional={"force": BOOL, "holder": TEXT, "seconds": REAL})


def _with_version(schema: Schema) -> Schema:
    """Return the schema of a canary's test with the fields that name its version."""
    fields = {"version": WHOLE, **WHO_AND_WHY, **schema["properties"]}
    return {**schema, "properties": fields, "required": ["version"]}


CANARY = EditedRecord("CanaryRequest", CanaryTest, _with_version)

models_router = Router("Models")
router = Router("Versions")


@models_router.get("/v1/models", Role.use, answer=MODEL_LIST, in_runs=True)
async def list_models(services: Services, request: Request) -> Response:
    """List the models that can be called.

    Each promoted `name`, and each `name@N`. `root`: the version that answers. `max_model_len`: the
    tokens of its context; null where no replica holds a version of that name.
    """
    if "run_id" in request.path_params:
        path_id(request, "run_id", "run")
    listing = await asyncio.to_thread(_models, services, await _contexts(services))
    models, damage = [m for rows in listing.rows for m in rows], damage_told(listing.damaged)
    if is_anthropic(request.scope):
        answer = _anthropic_page(request, [_anthropic(m) for m in models])
        return json_response({**answer, **damage})
    return json_response({"object": "list", "data": models, **damage})


@models_router.get("/v1/models/lineage", Role.use, answer=data_of(Ancestry))
async def list_lineage(services: Services, request: Request) -> Response:
    """List all versions of all names with their parents, jobs and datasets, parents first."""
    return json_response({"data": await asyncio.to_thread(lineage_of_all, services.registry)})


@models_router.get("/v1/models/{model}", Role.use, answer=MODEL, fails="404 model_not_found")
async def retrieve_model(services: Services, request: Request) -> Response:
    """Return a model."""
    name = path_id(request, "model", "model")
    model = _model(name, services.registry.resolve(name), await _contexts(services))
    return json_response(_anthropic(model) if is_anthropic(request.scope) else model)


@router.get(
    "/v1/models/{name}/versions",
    Role.use,
    answer=data_of(all_of(VERSION, object_of({"promoted": BOOL}))),
    fails="404 model_not_found",
)
async def list_versions(services: Services, request: Request) -> Response:
    """List a name's versions, oldest first."""
    name, registry = path_id(request, "name", "model"), services.registry
    promoted = registry.promoted(name)
    data = [{**_version(v), "promoted": v == promoted} for v in registry.versions(name)]
    return json_response({"data": data})


@router.post(
    "/v1/models/{name}/versions",
    Role.train,
    body=object_of({"checkpoint": TEXT}),
    answer=VERSION,
    fails="404 not_found, 422 corrupt",
)
async def register_version(services: Services, request: Request) -> Response:
    """Make a version of a checkpoint; the same weights are the same version.

    `checkpoint`: an id, or a directory on the gateway's machine.
    """
    name, registry = path_id(request, "name", "model"), services.registry
    body = await read_json(request, services.max_settings)
    checkpoint = field(body, "checkpoint", str)
    roots = may_name(request, services.model_roots)
    imported = await asyncio.to_thread(registry.import_checkpoint, checkpoint, roots)
    version = await asyncio.to_thread(registry.register, name, *imported)
    if services.traces is not None and version.job is not None:
        events = await asyncio.to_thread(_job_events, services, version.job)
        services.traces.end_job(version.job, events, version.id)
    return json_response(_version(version))


def _job_events(services: Services, job_id: str) -> list[Any]:
    """Return a job's events; none where they are damaged or gone."""
    try:
        return list(journal.read(services.home.job(job_id) / "events.jsonl"))
    except Corrupt:
        return []


@router.post(
    "/v1/models/{name}/versions/{number}/stage",
    Role.train,
    body=LEASED,
    body_optional=True,
    answer=ProbeReport,
    fails="404 model_not_found, 409 swap_failed, 409 would_displace, 409 pool_busy",
)
async def stage_version(services: Services, request: Request) -> Response:
    """Load a version into one replica, and prove it by its probe.

    The other replicas serve on. Only `force` (role admin) takes a promoted version off its last
    replica, for a `holder`. It comes back when the version is rejected, or `seconds` after the
    holder last renewed the lease at /v1/pool/lease.
    """
    name = path_id(request, "name", "model")
    version = services.registry.resolve(f"{name}@{request.path_params['number']}")
    report = await services.versions.stage(version, **await _leased(services, request))
    return json_response(report.model_dump(mode="json"))


@router.post(
    "/v1/jobs/{job_id}/receive",
    Role.train,
    body=LEASED,
    body_optional=True,
    answer=object_of({"received": BOOL}),
    fails="404 not_found, 409 swap_failed, 409 pool_busy",
)
async def receive_weights(services: Services, request: Request) -> Response:
    """Let a replica receive the weights that a job offers while it writes its files.

    The replica answers nobody until it has proven a version that is staged or promoted. It goes
    back to its former version if the job ends otherwise, or if a request needs that one. `force`
    and `holder` are as for staging. `received` is false, and nothing changes, if the job offers no
    weights or has published them.
    """
    job, leased = path_id(request, "job_id", "job"), await _leased(services, request)
    if not services.home.job(job).is_dir():
        raise NotFound(f"no job {job!r}", param="job_id")
    received = await services.versions.receive(job, **leased)
    return json_response({"received": received})


async def _leased(services: Services, request: Request) -> dict[str, Any]:
    """Return who asks for a replica, for how long, and whether by force. Raises Forbidden."""
    body = await read_json(request, services.max_settings) if has_body(request) else {}
    force, caller = field(body, "force", bool, False), caller_of(request)
    if force:
        act = "to stage with force, which may take what is promoted off its last replica,"
        caller.check_role(Role.admin, act)
    holder = field(body, "holder", str, "")[:200] or (caller.name if force else "")
    return {"force": force, "holder": holder, "seconds": lease_seconds(body)}


@router.post(
    "/v1/models/{name}/promote",
    Role.admin,
    body=object_of({"version": WHOLE}, {**WHO_AND_WHY, "numbers": ANY, "force": BOOL}),
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 409 would_displace",
)
async def promote(services: Services, request: Request) -> Response:
    """Serve a version under its name, answered when the pool holds it.

    `force`: even if another name's promoted version is then served no more.
    """
    version, body = await _named_version(services, request)
    event = await services.versions.promote(
        version,
        **_who_and_why(request, body),
        numbers=field(body, "numbers", dict, {}),
        force=field(body, "force", bool, False),
    )
    return _event(event)


@router.post(
    "/v1/models/{name}/rollback",
    Role.admin,
    body=object_of(optional={"to": WHOLE_OR_NONE, "force": BOOL, **WHO_AND_WHY}),
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 400 invalid_value",
)
async def roll_back(services: Services, request: Request) -> Response:
    """Serve the version that was promoted before.

    `to`: another version that was promoted once, or any with `force`.
    """
    name = path_id(request, "name", "model")
    body = await read_json(request, services.max_settings)
    to, force = body.get("to"), field(body, "force", bool, False)
    if to is not None:
        to = field(body, "to", int)
    reasons = _who_and_why(request, body)
    return _event(await services.versions.roll_back(name, to, **reasons, force=force))


@router.post(
    "/v1/models/{name}/reject",
    Role.admin,
    body=object_of({"version": WHOLE}, {**WHO_AND_WHY, "numbers": ANY}),
    answer=ModelEvent,
    fails="404 model_not_found, 400 invalid_value, 400 canary_running",
)
async def reject(services: Services, request: Request) -> Response:
    """Note that a version is not good enough."""
    version, body = await _named_version(services, request)
    event = await services.versions.reject(
        version, **_who_and_why(request, body), numbers=field(body, "numbers", dict, {})
    )
    return _event(event)


@router.get(
    "/v1/models/{name}/history", Role.use, answer=data_of(ModelEvent), fails="404 model_not_found"
)
async def list_history(services: Services, request: Request) -> Response:
    """List the events of a name, oldest first."""
    events = services.registry.history(path_id(request, "name", "model"))
    return json_response({"data": [event.model_dump(mode="json") for event in events]})


@router.get(
    "/v1/models/{name}/lineage", Role.use, answer=data_of(Ancestry), fails="404 model_not_found"
)
async def lineage(services: Services, request: Request) -> Response:
    """List the ancestors of versions with their jobs and datasets, parents first.

    `name`: all its versions and their ancestors. `name@N`: its ancestors and descendants.
    """
    name = path_id(request, "name", "model")
    return json_response({"data": await asyncio.to_thread(lineage_of, services.registry, name)})


@router.get(
    "/v1/models/{name}/canary",
    Role.use,
    answer=all_of(ModelEvent, object_of({"seen": ANY})),
    fails="404 not_found",
)
async def retrieve_canary(services: Services, request: Request) -> Response:
    """Return the running canary of a name, and the numbers seen so far."""
    name = path_id(request, "name", "model")
    canary = services.versions.live.canary(name)
    if canary is None:
        raise NotFound(f"no canary of {name!r} is running", param="name")
    return json_response({**canary.start.model_dump(mode="json"), "seen": canary.numbers()})


@router.post(
    "/v1/models/{name}/canary",
    Role.admin,
    body=CANARY,
    answer=ModelEvent,
    fails="404 model_not_found, 409 swap_failed, 400 canary_running",
)
async def start_canary(services: Services, request: Request) -> Response:
    """Answer a share of the live sessions by a version.

    A session is named by `X-Session-Id`, else by `user`, else by its run; it stays with its
    version. The canary is rolled back by itself when more requests fail or rewards are lower.
    """
    version, body = await _named_version(services, request)
    reasons = _who_and_why(request, body)
    fields = {key: value for key, value in body.items() if key not in ("version", *reasons)}
    test = parse(CanaryTest, fields)
    own = [name] if (name := caller_of(request).key_name) else []
    test = test.model_copy(update={"givers": sorted({*own, *(test.givers or ())})})
    return _event(await services.versions.start_canary(version, test, **reasons))


@router.delete(
    "/v1/models/{name}/canary",
    Role.admin,
    query=WHO_AND_WHY,
    answer=ModelEvent,
    fails="404 not_found, 409 swap_failed",
)
async def stop_canary(services: Services, request: Request) -> Response:
    """Answer all sessions by the promoted version again."""
    name = path_id(request, "name", "model")
    reasons = _who_and_why(request, query(request))
    return _event(await services.versions.stop_canary(name, **reasons))


async def _named_version(
    services: Services, request: Request
) -> tuple[ModelVersion, dict[str, Any]]:
    """Return the version that a request's body names, and the body. Raises NotFound, BadInput."""
    name = path_id(request, "name", "model")
    body = await read_json(request, services.max_settings)
    return services.registry.resolve(f"{name}@{field(body, 'version', int)}"), body


def _who_and_why(request: Request, body: dict[str, Any]) -> dict[str, str]:
    """Return the author of a change and the reason; the default author is the caller's key."""
    who = field(body, "who", str, "") or caller_of(request).name
    return {"who": who, "reason": field(body, "reason", str, "")}


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
    params = bodies.query(request, ("limit", "after_id", "before_id", "beta"))
    ids = [model["id"] for model in models]
    first, last = params.get("after_id"), params.get("before_id")
    for name, cursor in (("after_id", first), ("before_id", last)):
        if cursor is not None and cursor not in ids:
            raise BadInput(f"{name} is no model of this list: {cursor[:200]!r}", param=name)
    rest = models[ids.index(first) + 1 if first else 0 : ids.index(last) if last else None]
    limit = max(1, number(params, "limit", ANTHROPIC_PAGE, ANTHROPIC_PAGE_MOST))
    rows = rest[-limit:] if last and not first else rest[:limit]
    fields = page(rows, len(rest) > limit)
    return {name: value for name, value in fields.items() if name != "object"}


def _version(version: ModelVersion) -> dict[str, Any]:
    return {**version.model_dump(mode="json"), "id": version.id}


def _event(event: ModelEvent) -> Response:
    return json_response(event.model_dump(mode="json"))
