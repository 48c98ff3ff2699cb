"""GET /openapi.json: every route of the gateway as an OpenAPI 3.1 document, for people and tools.

The operations stand in the modules beside this one, by what they are for; what their JSON looks
like is in schemas.py, drawn from our records where there are any. Nothing here checks a request:
the routes do, and tests/runtime/test_openapi.py holds the two together.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.runtime.gateway.openapi import (
    export_operations,
    file_operations,
    platform_operations,
    sampling_operations,
    training_operations,
)
from cray_agents.runtime.gateway.openapi.operation import Operation, rendered
from cray_agents.runtime.gateway.openapi.schemas import components
from cray_agents.runtime.gateway.services import Services

TAGS = {
    "Models": "Ask a model. Every answer is recorded with the tokens that were sampled.",
    "Files": "Files, uploads in parts, and batches of requests.",
    "Training": "Runs and rewards, datasets, training jobs, loops.",
    "Versions": "What a model's name means: versions, staging, promotion.",
    "Platform": "Health, the replicas, metrics, this document.",
}
ABOUT = (
    "OpenAI's endpoint over a platform that trains its own models. A model is `name`, its promoted "
    "version, or `name@N`. Every answer carries `x-request-id`; every failure is an `Error`."
)


def routes(services: Services) -> list[Route]:
    """The one route."""

    async def openapi(request: Request) -> Response:
        return Response(_encoded(), media_type="application/json")

    return [Route("/openapi.json", openapi)]


def document() -> dict[str, Any]:
    """The document."""
    operations: Iterable[Operation] = (
        *sampling_operations.OPERATIONS,
        *file_operations.OPERATIONS,
        *training_operations.OPERATIONS,
        *export_operations.OPERATIONS,
        *platform_operations.OPERATIONS,
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        for path, content in rendered(operation):
            paths.setdefault(path, {})[operation.method] = content
    return {
        "openapi": "3.1.0",
        "info": {"title": "cray-agents", "version": "1", "description": ABOUT},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": components(),
    }


@cache
def _encoded() -> bytes:
    return orjson.dumps(document())
