"""The names of weights: OpenAI's list, versions, and what is done with them.

promoting.py does it: a version is served only after the pool has proven it.
"""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import NotFound
from cray_agents.records import ModelVersion
from cray_agents.runtime.canary import CanaryTest
from cray_agents.runtime.gateway.auth import caller_of
from cray_agents.runtime.gateway.bodies import answer, field, parse, path_id, query, read_json
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.lineage import lineage_of


def routes(services: Services) -> list[Route]:
    """Everything under /v1/models."""
    registry = services.registry
    promoting = services.promoting

    async def listing(request: Request) -> Response:
        if "run_id" in request.path_params:
            path_id(request, "run_id", "run")
        models = await asyncio.to_thread(_models, services)
        return answer({"object": "list", "data": list(models.values())})

    async def model(request: Request) -> Response:
        name = path_id(request, "model", "model")
        return answer(_model(name, registry.resolve(name)))

    async def register(request: Request) -> Response:
        name = path_id(request, "name", "model")
        body = await read_json(request, services.max_body)
        checkpoint = field(body, "checkpoint", str)
        taken = await asyncio.to_thread(registry.import_checkpoint, checkpoint)
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
        report = await promoting.stage(version)
        return answer(report.model_dump(mode="json"))

    async def promote(request: Request) -> Response:
        version, body = await _asked(services, request)
        event = await promoting.promote(
            version, **_said(request, body), numbers=field(body, "numbers", dict, {})
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
        event = await asyncio.to_thread(
            registry.reject,
            version.name,
            version.number,
            **_said(request, body),
            numbers=field(body, "numbers", dict, {}),
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
        event = await promoting.start_canary(version, parse(CanaryTest, given), **said)
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


def _version(version: ModelVersion) -> dict[str, Any]:
    return {**version.model_dump(mode="json"), "id": version.id}
