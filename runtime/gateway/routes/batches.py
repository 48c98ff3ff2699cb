"""OpenAI's batches: create, list, show and cancel them; runtime/batches answers their lines."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.runtime.batches.batch_records import ENDPOINTS, Batch
from cray_agents.runtime.files.files import ExpiresAfter
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer_read,
    json_response,
    number,
    page,
    path_id,
    read_json,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    ID_SHAPE,
    TEXT,
    Described,
    NamedShape,
    count_up_to,
    object_of,
    or_none,
    page_of,
)
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.views.batch_errors import batch_errors
from cray_agents.runtime.views.view_records import BatchErrors

PAGE_LIMIT = 100  # batches in a page
MOST_EXAMPLES = 20  # of failed lines with one code
BATCH_INPUT = NamedShape(
    "BatchInput",
    {
        **object_of(
            {"input_file_id": ID_SHAPE, "endpoint": {"enum": list(ENDPOINTS)}},
            {
                "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,3}[hd]$"},
                "metadata": {
                    "type": ["object", "null"],
                    "maxProperties": 16,
                    "propertyNames": {"maxLength": 64},
                    "additionalProperties": {"type": "string", "maxLength": 512},
                },
                "output_expires_after": or_none(ExpiresAfter),
            },
        ),
        "additionalProperties": False,
    },
)

router = Router("Files")


@router.get(
    "/v1/batches",
    Role.use,
    query={"after": AFTER, "limit": {"type": "integer", "minimum": 1, "maximum": PAGE_LIMIT}},
    answer=page_of(Batch),
)
async def list_batches(services: Services, request: Request) -> Response:
    """List the batches, newest first."""
    params = query(request)
    limit = number(params, "limit", 20, PAGE_LIMIT)
    if limit == 0:
        raise BadInput("limit must be at least 1", param="limit")
    listing = await asyncio.to_thread(services.batches.page, params.get("after"), limit)
    rows = [batch.model_dump(mode="json") for batch in listing.rows]
    return json_response(page(rows, listing.has_more, damaged=listing.damaged))


@router.post(
    "/v1/batches",
    Role.use,
    body=BATCH_INPUT,
    answer=Batch,
    headers={"Idempotency-Key": Described(TEXT, "Again under the same key: the same batch.")},
    fails="404 not_found, 400 invalid_value, 400 unknown_parameter, 400 idempotency_key_reused",
)
async def create_batch(services: Services, request: Request) -> Response:
    """Have a file of requests answered.

    The file has the purpose `batch` and any number of lines. The window may be 1h to 30d. An input
    with errors becomes a batch of status `failed`, with `errors`.
    """
    body = await read_json(request, services.max_settings)
    key = request.headers.get("idempotency-key")
    if isinstance(file_id := body.get("input_file_id"), str) and not ID.fullmatch(file_id):
        raise BadInput(f"{file_id[:200]!r} cannot name a file", param="input_file_id")
    caller = caller_of(request).key_id
    return _batch(await asyncio.to_thread(services.batches.create, body, key, caller))


@router.get("/v1/batches/{batch_id}", Role.use, answer=Batch, fails="404 not_found")
async def retrieve_batch(services: Services, request: Request) -> Response:
    """Return a batch: its status, counts and usage so far, at the end its files.

    The output file and the error file together hold every line once. A line that was not sent to a
    model has the error batch_cancelled or batch_expired.
    """
    return _batch(await asyncio.to_thread(services.batches.get, _batch_id(request)))


@router.get(
    "/v1/batches/{batch_id}/errors",
    Role.use,
    query={"examples": count_up_to(MOST_EXAMPLES)},
    answer=BatchErrors,
    fails="404 not_found",
)
async def list_batch_errors(services: Services, request: Request) -> Response:
    """Count a batch's failed lines by code, with the first examples of each.

    Of a batch that goes on, the chunks that are done count.
    """
    examples = number(query(request), "examples", 3, MOST_EXAMPLES)
    batch_id = _batch_id(request)
    return await answer_read(
        request, lambda: batch_errors(services.batches, services.files, batch_id, examples)
    )


@router.post(
    "/v1/batches/{batch_id}/cancel",
    Role.use,
    answer=Batch,
    fails="404 not_found, 400 invalid_status",
)
async def cancel_batch(services: Services, request: Request) -> Response:
    """Stop a batch; its answers so far stay.

    Lines in flight get 5 s to end.
    """
    batch_id = _batch_id(request)
    owner = await asyncio.to_thread(services.batches.owner, batch_id)
    check_owner(caller_of(request), owner, f"batch {batch_id!r}")
    return _batch(await asyncio.to_thread(services.batches.cancel, batch_id))


def _batch_id(request: Request) -> str:
    return path_id(request, "batch_id", "batch")


def _batch(batch: Batch) -> Response:
    return json_response(batch.model_dump(mode="json"))
