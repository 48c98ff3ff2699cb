"""The names of weights: OpenAI's list, versions, and what is done with them.

promoting.py does it: a version is served only after the pool has proven it.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import AccessDenied, BadInput, NotFound
from cray_agents.records import ModelVersion
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of, may_name
from cray_agents.runtime.gateway.http.bodies import (
    answer,
    field,
    has_body,
    listed,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.http.error_envelope import is_anthropic
from cray_agents.runtime.gateway.replica_lease import lease_seconds
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.registry.canary import CanaryTest
from cray_agents.runtime.registry.lineage import lineage_of

ANTHROPIC_PAGE, ANTHROPIC_PAGE_MOST = 20, 1000  # models in a page of Anthropic's list


def routes(services: Services) -> list[Route]:
    """Everything under /v1/models."""
    registry = services.registry
    promoting = services.promoting

    async def listing(request: Request) -> Response:
        if "run_id" in request.path_params:
            path_id(request, "run_id", "run")
        models = await asyncio.to_thread(_models, services)
        if is_anthropic(request.scope):
            return answer(_anthropic_page(request, [_anthropic(m) for m in models.values()]))
        return answer({"object": "list", "data": list(models.values())})

    async def model(request: Request) -> Response:
        name = path_id(request, "model", "model")
        shown = _model(name, registry.resolve(name))
        return answer(_anthropic(shown) if is_anthropic(request.scope) else shown)

    async def register(request: Request) -> Response:
        name = path_id(request, "name", "model")
        body = await read_json(request, services.max_body)
        checkpoint = field(body, "checkpoint", str)
        within = may_name(request, services.model_roots)
        taken = await asyncio.to_thread(registry.import_checkpoint, checkpoint, within)
        version = await asyncio.to_thread(registry.register, name, *taken)
        return answer(_version(version))

    async def versions(request: Request) -> Response:
        name = path_id(request, "name", "model")
        promoted = registry.promoted(name)
        data = [{**_version(v), "promoted": v == promoted} for v in registry.versions(name)]
        return answer({"data": data})

    async def stage(request: Request) -> Response:
        name = path_id(request, "name", "model")
        version = registry.resolve(f"{name}@{request.path_params['number']}")
        body = await read_json(request, services.max_body) if has_body(request) else {}
        force, caller = field(body, "force", bool, False), caller_of(request)
        if force and caller.role < Role.admin:
            raise AccessDenied(
                f"the key {caller.name!r} has the role {caller.role.name!r}; to stage with force, "
                "which may take what is promoted off its last replica, needs 'admin'",
                status=403,
                code="insufficient_permissions",
            )
        holder = field(body, "holder", str, "")[:200] or (caller.name if force else "")
        report = await promoting.stage(
            version, force=force, holder=holder, seconds=lease_seconds(body)
        )
        return answer(report.model_dump(mode="json"))

    async def promote(request: Request) -> Response:
        version, body = await _asked(services, request)
        event = await promoting.promote(
            version,
            **_said(request, body),
            numbers=field(body, "numbers", dict, {}),
            force=field(body, "force", bool, False),
        )
        return answer(event.model_dump(mode="json"))

    async def roll_back(request: Request) -> Response:
        name = path_id(request, "name", "model")
        body = await read_json(request, services.max_body)
        to, force = body.get("to"), field(body, "force", bool, False)
        if to is not None:
            to = field(body, "to", int)
        event = await promoting.roll_back(name, to, **_said(request, body), force=force)
        return answer(event.model_dump(mode="json"))

    async def reject(request: Request) -> Response:
        version, body = await _asked(services, request)
        event = await promoting.reject(
            version, **_said(request, body), numbers=field(body, "numbers", dict, {})
        )
        return answer(event.model_dump(mode="json"))

    async def history(request: Request) -> Response:
        events = registry.history(path_id(request, "name", "model"))
        return answer({"data": [event.model_dump(mode="json") for event in events]})

    async def lineage(request: Request) -> Response:
        name = path_id(request, "name", "model")
        return answer({"data": await asyncio.to_thread(lineage_of, registry, name)})

    async def start_canary(request: Request) -> Response:
        version, body = await _asked(services, request)
        said = _said(request, body)
        given = {key: value for key, value in body.items() if key not in ("version", *said)}
        test = parse(CanaryTest, given)
        own = [name] if (name := caller_of(request).key_name) else []
        test = test.model_copy(update={"givers": sorted({*own, *(test.givers or ())})})
        event = await promoting.start_canary(version, test, **said)
        return answer(event.model_dump(mode="json"))

    async def show_canary(request: Request) -> Response:
        name = path_id(request, "name", "model")
        canary = promoting.live.canary(name)
        if canary is None:
            raise NotFound(f"no canary of {name!r} is running", param="name")
        return answer({**canary.start.model_dump(mode="json"), "seen": canary.numbers()})

    async def stop_canary(request: Request) -> Response:
        name = path_id(request, "name", "model")
        given = query(request, "who", "reason")
        event = await promoting.stop_canary(name, **_said(request, given))
        return answer(event.model_dump(mode="json"))

    return [
        Route("/v1/models", listing),
        Route("/runs/{run_id}/v1/models", listing),
        Route("/v1/models/{model}", model),
        Route("/v1/models/{name}/versions", versions, methods=["GET"]),
        Route("/v1/models/{name}/versions", register, methods=["POST"]),
        Route("/v1/models/{name}/versions/{number}/stage", stage, methods=["POST"]),
        Route("/v1/models/{name}/promote", promote, methods=["POST"]),
        Route("/v1/models/{name}/rollback", roll_back, methods=["POST"]),
        Route("/v1/models/{name}/reject", reject, methods=["POST"]),
        Route("/v1/models/{name}/history", history),
        Route("/v1/models/{name}/lineage", lineage),
        Route("/v1/models/{name}/canary", show_canary, methods=["GET"]),
        Route("/v1/models/{name}/canary", start_canary, methods=["POST"]),
        Route("/v1/models/{name}/canary", stop_canary, methods=["DELETE"]),
    ]


async def _asked(services: Services, request: Request) -> tuple[ModelVersion, dict[str, Any]]:
    """The version that a request's body names, and the body. Raises NotFound, BadInput."""
    name = path_id(request, "name", "model")
    body = await read_json(request, services.max_body)
    return services.registry.resolve(f"{name}@{field(body, 'version', int)}"), body


def _said(request: Request, body: dict[str, Any]) -> dict[str, str]:
    """Who asks and why; who does not say it is known by his key."""
    who = field(body, "who", str, "") or caller_of(request).name
    return {"who": who, "reason": field(body, "reason", str, "")}


def _models(services: Services) -> dict[str, dict[str, Any]]:
    registry = services.registry
    found = {}
    for name in registry.names():
        try:
            promoted, versions = registry.promoted(name), registry.versions(name)
        except NotFound:  # a folder without a version
            continue
        if promoted is not None:
            found[name] = _model(name, promoted)
        found.update({version.id: _model(version.id, version) for version in versions})
    return found


def _model(model_id: str, version: ModelVersion) -> dict[str, Any]:
    created = int(version.created)
    return {"id": model_id, "object": "model", "created": created, "owned_by": "cray-agents"}


def _anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's clients know it."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = model["id"]
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _anthropic_page(request: Request, models: list[dict[str, Any]]) -> dict[str, Any]:
    """A page in Anthropic's shape. Raises BadInput."""
    given = query(request, "limit", "after_id", "before_id", "beta")
    ids = [model["id"] for model in models]
    first, last = given.get("after_id"), given.get("before_id")
    for name, cursor in (("after_id", first), ("before_id", last)):
        if cursor is not None and cursor not in ids:
            raise BadInput(f"{name} is no model of this list: {cursor[:200]!r}", param=name)
    rest = models[ids.index(first) + 1 if first else 0 : ids.index(last) if last else None]
    limit = max(1, number(given, "limit", ANTHROPIC_PAGE, ANTHROPIC_PAGE_MOST))
    page = rest[-limit:] if last and not first else rest[:limit]
    return {
        name: value for name, value in listed(page, len(rest) > limit).items() if name != "object"
    }


def _version(version: ModelVersion) -> dict[str, Any]:
    return {**version.model_dump(mode="json"), "id": version.id}
