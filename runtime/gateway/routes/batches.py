"""OpenAI's batches: create, list, show and cancel them; runtime/batches answers their lines."""

import asyncio
from typing import Annotated, Any

from fastapi import Header, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.records import StrictRecord
from cray_agents.runtime.batches.batch_records import ENDPOINTS, Batch
from cray_agents.runtime.files.files import ExpiresAfter
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer_read, json_response, page
from cray_agents.runtime.gateway.http.fields import (
    ID,
    ID_PATTERN,
    After,
    BatchId,
    ListPage,
    RecordSchema,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Current
from cray_agents.runtime.views.batch_errors import batch_errors
from cray_agents.runtime.views.view_records import BatchErrors

MOST_EXAMPLES = 20  # of failed lines with one code

router = Router("Files")


class BatchInput(StrictRecord):
    """A request for a batch. batches/queue.py checks it, for the command line too."""

    input_file_id: str = Field(pattern=ID_PATTERN)
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    completion_window: str = Field("24h", pattern="^[1-9][0-9]{0,3}[hd]$")
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


@router.get("/v1/batches", Role.use, answer=ListPage[Batch])
async def list_batches(
    services: Current, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """List the batches, newest first."""
    listing = await asyncio.to_thread(services.batches.page, after, limit)
    rows = [batch.model_dump(mode="json") for batch in listing.rows]
    return json_response(page(rows, listing.has_more, damaged=listing.damaged))


@router.post(
    "/v1/batches",
    Role.use,
    answer=Batch,
    fails="404 not_found, 400 invalid_value, 400 unknown_parameter, 400 idempotency_key_reused",
)
async def create_batch(
    services: Current,
    request: Request,
    body: Annotated[dict[str, Any], RecordSchema(BatchInput)],
    key: Annotated[
        str | None,
        Header(alias="Idempotency-Key", description="Again under the same key: the same batch."),
    ] = None,
) -> Response:
    """Have a file of requests answered.

    The file has the purpose `batch` and any number of lines. The window may be 1h to 30d. An input
    with errors becomes a batch of status `failed`, with `errors`.
    """
    if isinstance(file_id := body.get("input_file_id"), str) and not ID.fullmatch(file_id):
        raise BadInput(f"{file_id[:200]!r} cannot name a file", param="input_file_id")
    caller = caller_of(request).key_id
    return json_response(await asyncio.to_thread(services.batches.create, body, key, caller))


@router.get("/v1/batches/{batch_id}", Role.use, answer=Batch)
async def retrieve_batch(services: Current, batch_id: BatchId) -> Response:
    """Return a batch: its status, counts and usage so far, at the end its files.

    The output file and the error file together hold every line once. A line that was not sent to a
    model has the error batch_cancelled or batch_expired.
    """
    return json_response(await asyncio.to_thread(services.batches.get, batch_id))


@router.get("/v1/batches/{batch_id}/errors", Role.use, answer=BatchErrors)
async def list_batch_errors(
    services: Current,
    request: Request,
    batch_id: BatchId,
    examples: Annotated[int, Query(ge=0, le=MOST_EXAMPLES)] = 3,
) -> Response:
    """Count a batch's failed lines by code, with the first examples of each.

    Of a batch that goes on, the chunks that are done count.
    """
    return await answer_read(
        request, lambda: batch_errors(services.batches, services.files, batch_id, examples)
    )


@router.post("/v1/batches/{batch_id}/cancel", Role.use, answer=Batch, fails="400 invalid_status")
async def cancel_batch(services: Current, request: Request, batch_id: BatchId) -> Response:
    """Stop a batch; its answers so far stay.

    Lines in flight get 5 s to end.
    """
    owner = await asyncio.to_thread(services.batches.owner, batch_id)
    check_owner(caller_of(request), owner, f"batch {batch_id!r}")
    return json_response(await asyncio.to_thread(services.batches.cancel, batch_id))
