"""OpenAI's batches: made, shown, listed, cancelled; runtime/batches does the work."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.runtime.batches.batch_records import Batch
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer,
    listed,
    number,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Services

MOST = 100  # batches in a page


def routes(services: Services) -> list[Route]:
    """Everything under /v1/batches."""
    queue = BatchQueue(services.home, Files(services.home))

    async def create(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        key = request.headers.get("idempotency-key")
        if isinstance(file_id := body.get("input_file_id"), str) and not ID.fullmatch(file_id):
            raise BadInput(f"{file_id[:200]!r} cannot name a file", param="input_file_id")
        caller = caller_of(request).key_id
        return _shown(await asyncio.to_thread(queue.create, body, key, caller))

    async def listing(request: Request) -> Response:
        given = query(request, "after", "limit")
        limit = number(given, "limit", 20, MOST)
        if limit == 0:
            raise BadInput("limit must be at least 1", param="limit")
        page, more = await asyncio.to_thread(queue.page, given.get("after"), limit)
        return answer(listed([batch.model_dump(mode="json") for batch in page], more))

    async def one(request: Request) -> Response:
        return _shown(await asyncio.to_thread(queue.get, _batch_id(request)))

    async def cancel(request: Request) -> Response:
        batch_id = _batch_id(request)
        owner = await asyncio.to_thread(queue.owner, batch_id)
        check_owner(caller_of(request), owner, f"batch {batch_id!r}")
        return _shown(await asyncio.to_thread(queue.cancel, batch_id))

    return [
        Route("/v1/batches", listing, methods=["GET"]),
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches/{batch_id}", one),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]


def _batch_id(request: Request) -> str:
    return path_id(request, "batch_id", "batch")


def _shown(batch: Batch) -> Response:
    return answer(batch.model_dump(mode="json"))
