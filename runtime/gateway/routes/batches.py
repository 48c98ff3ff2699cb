"""OpenAI's batches: create, list, show and cancel them; runtime/batches answers their lines."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Header, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.exact_json import load_json
from cray_agents.records import StrictRecord
from cray_agents.runtime.batches.batch_records import ENDPOINTS, Batch, BatchFolder
from cray_agents.runtime.batches.chunks import seal_path, sealed_chunks, verify_seal
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.files.files import ExpiresAfter, Files
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import json_response, page
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
def list_batch_errors(
    services: Current,
    batch_id: BatchId,
    examples: Annotated[int, Query(ge=0, le=MOST_EXAMPLES)] = 3,
) -> dict[str, Any]:
    """Count a batch's failed lines by code, with the first examples of each.

    Of a batch that goes on, the chunks that are done count.
    """
    return batch_errors(services.batches, services.files, batch_id, examples)


@router.post("/v1/batches/{batch_id}/cancel", Role.use, answer=Batch, fails="400 invalid_status")
async def cancel_batch(services: Current, request: Request, batch_id: BatchId) -> Response:
    """Stop a batch; its answers so far stay.

    Lines in flight get 5 s to end.
    """
    owner = await asyncio.to_thread(services.batches.owner, batch_id)
    check_owner(caller_of(request), owner, f"batch {batch_id!r}")
    return json_response(await asyncio.to_thread(services.batches.cancel, batch_id))


# ---- Batch errors: the failed lines of a batch by code, with the first examples of each
LONGEST = 500  # characters of a message


def batch_errors(batches: BatchQueue, files: Files, batch_id: str, examples: int) -> dict[str, Any]:
    """Return BatchErrors as JSON: from the error file, or from the chunks that are done.

    Raises NotFound, also where the error file was deleted; Corrupt.
    """
    batch = batches.get(batch_id)
    counts: Counter[str] = Counter()
    statuses: dict[str, int | None] = {}
    first_lines: dict[str, list[dict[str, Any]]] = {}
    if batch.error_file_id is not None:
        lines = _lines_of_file(files, batch.error_file_id)
    else:
        lines = _lines_of_chunks(batches.folder(batch_id))
    for line in lines:
        result = load_json(line)
        response = result.get("response") or {}
        body = response.get("body")
        error = result.get("error") or (body.get("error") if isinstance(body, dict) else None)
        error = error if isinstance(error, dict) else {}
        status = response.get("status_code")
        code = str(error.get("code") or error.get("type") or status or "unknown")
        counts[code] += 1
        statuses.setdefault(code, status)
        known = first_lines.setdefault(code, [])
        if len(known) < examples:
            message = str(error.get("message") or "")[:LONGEST]
            known.append({"custom_id": result.get("custom_id"), "message": message})
    done = batch.request_counts
    return {
        "id": batch_id,
        "lines": done.completed + done.failed,
        "failed": done.failed,
        "data": [
            {"code": code, "status": statuses[code], "lines": count, "examples": first_lines[code]}
            for code, count in counts.most_common()
        ],
    }


def _lines_of_file(files: Files, file_id: str) -> Iterator[bytes]:
    with files.path(file_id).open("rb") as file:
        yield from file


def _lines_of_chunks(folder: BatchFolder) -> Iterator[bytes]:
    """Yield the failed lines of the chunks that are done, without those of a batch that ended."""
    with suppress(FileNotFoundError):
        for chunk in sorted(sealed_chunks(folder)):
            path = seal_path(folder, chunk)
            seal = verify_seal(path)
            with path.open("rb") as file:
                file.seek(seal.start + seal.output)
                yield from file.read(seal.errors).splitlines()
