"""The names of weights: OpenAI's list, and versions, staging and promotion.

A version is served only after the pool has proven it: promoting swaps first and writes the
promotion when that has succeeded, so the bare name never means weights that nobody serves.
"""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import NotFound, SwapError
from cray_agents.records import ModelVersion, ProbeReport
from cray_agents.runtime import checkpoints
from cray_agents.runtime.gateway.bodies import answer, field, path_id, read_json
from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """Everything under /v1/models."""
    registry = services.registry
    swapping = asyncio.Lock()  # two swaps at once would each undo the other

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
        async with swapping:
            report = await _swap(services, version)
        return answer(report.model_dump(mode="json"))

    async def promote(request: Request) -> Response:
        name = path_id(request, "name", "model")
        body = await read_json(request, services.max_body)
        version = registry.resolve(f"{name}@{field(body, 'version', int)}")
        who, reason = field(body, "who", str, ""), field(body, "reason", str, "")
        async with swapping:
            if any(replica.get("version") != version.id for replica in services.pool.status()):
                await _swap(services, version)
            promotion = await asyncio.to_thread(
                registry.promote, name, version.number, who=who, reason=reason
            )
            services.pool.wake()
        services.admission.look()
        return answer(promotion.model_dump(mode="json"))

    async def promotions(request: Request) -> Response:
        history = registry.promotions(path_id(request, "name", "model"))
        return answer({"data": [promotion.model_dump(mode="json") for promotion in history]})

    return [
        Route("/v1/models", listing),
        Route("/runs/{run_id}/v1/models", listing),
        Route("/v1/models/{model}", model),
        Route("/v1/models/{name}/versions", versions, methods=["GET"]),
        Route("/v1/models/{name}/versions", register, methods=["POST"]),
        Route("/v1/models/{name}/versions/{number}/stage", stage, methods=["POST"]),
        Route("/v1/models/{name}/promote", promote, methods=["POST"]),
        Route("/v1/models/{name}/promotions", promotions),
    ]


async def _swap(services: Services, version: ModelVersion) -> ProbeReport:
    directory = services.home.checkpoint(version.checkpoint)
    manifest = await asyncio.to_thread(checkpoints.read_manifest, directory)
    begun, good = time.perf_counter(), False
    try:
        report = await services.pool.swap(directory, version.id, manifest.probe)
        good = report.passed
    finally:
        services.metrics.swapped(time.perf_counter() - begun, good)
    if not report.passed:
        raise SwapError(
            f"{version.id} is not what was trained: logprobs on its probe differ by "
            f"{report.max_logprob_diff:g}, tolerance {report.tolerance:g}"
        )
    return report


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
