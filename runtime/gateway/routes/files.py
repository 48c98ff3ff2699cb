"""OpenAI's files: received as multipart and streamed to the disk; sent whole or in ranges."""

import asyncio
import re
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cray_agents.errors import BadInput
from cray_agents.runtime.files.blobs import PIECE, BlobDraft
from cray_agents.runtime.files.files import (
    CLIENT_PURPOSES,
    INTERNAL,
    PAGE_LIMIT,
    PURPOSES,
    ExpiresAfter,
    FileObject,
    Files,
    Order,
)
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    json_response,
    number,
    page,
    parse,
    path_id,
)
from cray_agents.runtime.gateway.http.error_envelope import envelope
from cray_agents.runtime.gateway.http.multipart import Form, receive_form
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    BYTES,
    DELETED,
    TEXT,
    Described,
    EditedRecord,
    Schema,
    count_up_to,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Services

ORDERS = ("asc", "desc")
LONGEST = 512  # characters of a filename
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
FORM_FAILS = "400 invalid_multipart, 400 invalid_content_type, 413 body_too_large"


def _public(schema: Schema) -> Schema:
    """Return the schema of a file without its internal fields."""
    fields = {name: field for name, field in schema["properties"].items() if name not in INTERNAL}
    optional = {"expires_at", "status_details"}  # left out where they are null
    return {**schema, "properties": fields, "required": sorted(fields.keys() - optional)}


FILE = EditedRecord("File", FileObject, _public)

router = Router("Files")


class ContentResponse(FileResponse):
    """The bytes of a file, in larger pieces than Starlette's: a thread reads each piece."""

    chunk_size = PIECE


@router.get(
    "/v1/files",
    Role.use,
    query={
        "after": AFTER,
        "limit": count_up_to(PAGE_LIMIT),
        "order": {"enum": list(ORDERS)},
        "purpose": {"enum": list(PURPOSES)},
    },
    answer=page_of(FILE),
)
async def list_files(services: Services, request: Request) -> Response:
    """List the files, by time of creation."""
    params = query(request)
    limit = number(params, "limit", PAGE_LIMIT, PAGE_LIMIT)
    order = _one_of(params.get("order", "desc"), "order", ORDERS)
    purpose = params.get("purpose")
    if purpose is not None:
        _one_of(purpose, "purpose", PURPOSES)
    after = params.get("after")
    return await answer_read(request, partial(_page, services.files, after, limit, order, purpose))


@router.post(
    "/v1/files",
    Role.use,
    form=object_of(
        {"file": BYTES, "purpose": {"enum": list(CLIENT_PURPOSES)}},
        {
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
        },
    ),
    answer=FILE,
    fails=f"{FORM_FAILS}, 400 missing_file, 400 missing_field, 400 field_too_large",
)
async def create_file(services: Services, request: Request) -> Response:
    """Send a file.

    Streamed to the disk, at most 8 GiB. Larger files: POST /v1/uploads.
    """
    files = services.files
    draft_of = partial(files.blobs.draft, sent=True)
    async with receive_form(request, "file", draft_of, services.max_file) as form:
        draft, fields = _checked(form)
        owner = caller_of(request).key_id
        file = await asyncio.to_thread(_publish, files, draft, {**fields, "owner": owner})
    return json_response(file.to_openai())


@router.get("/v1/files/{file_id}", Role.use, answer=FILE, fails="404 not_found")
async def retrieve_file(services: Services, request: Request) -> Response:
    """Return a file's record."""
    file = await asyncio.to_thread(services.files.get, path_id(request, "file_id", "file"))
    return json_response(file.to_openai())


@router.delete(
    "/v1/files/{file_id}",
    Role.use,
    answer=object_of({"id": TEXT, "object": {"const": "file"}, "deleted": DELETED}),
    fails="404 not_found",
)
async def delete_file(services: Services, request: Request) -> Response:
    """Delete a file."""
    file_id = path_id(request, "file_id", "file")
    file = await asyncio.to_thread(services.files.get, file_id)
    check_owner(caller_of(request), file.owner, f"file {file_id!r}")
    await asyncio.to_thread(services.files.delete, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.get(
    "/v1/files/{file_id}/content",
    Role.use,
    headers={"Range": Described(TEXT, "One range, such as `bytes=0-99`: answered with 206.")},
    media={"application/octet-stream": {}},
    fails="404 not_found, 416 range_not_satisfiable",
)
async def download_file(services: Services, request: Request) -> Response:
    """Return a file's bytes, or one range of them."""
    file = await asyncio.to_thread(services.files.get, path_id(request, "file_id", "file"))
    refusal = _check_range(request.headers.get("range"), file)
    return refusal or ContentResponse(
        await asyncio.to_thread(services.files.blobs.verified_path, file.sha256),
        media_type="application/octet-stream",
        filename=file.filename,
    )


def check_filename(filename: str) -> str:
    """Return a filename that can be shown and sent in a header. Raises BadInput."""
    if not filename or len(filename) > LONGEST or CONTROL.search(filename):
        raise BadInput(
            f"a filename has 1 to {LONGEST} characters, and none that control; not "
            f"{filename[:100]!r}",
            param="filename",
        )
    return filename


def _checked(form: Form) -> tuple[BlobDraft, dict[str, Any]]:
    """Return the file of a form, and the fields to publish it with. Raises BadInput."""
    if form.file is None or form.filename is None:
        raise BadInput(
            "file must be given, as a part with a filename", param="file", code="missing_file"
        )
    if "purpose" not in form.fields:
        raise BadInput("purpose must be given", param="purpose", code="missing_field")
    expiry = {key: form.fields.get(f"expires_after[{key}]") for key in ("anchor", "seconds")}
    expires_at = None
    if any(value is not None for value in expiry.values()):
        expires_at = time.time() + parse(ExpiresAfter, expiry, "expires_after").seconds
    return form.file, {
        "purpose": _one_of(form.fields["purpose"], "purpose", CLIENT_PURPOSES),
        "filename": check_filename(form.filename),
        "expires_at": expires_at,
    }


def _publish(files: Files, draft: BlobDraft, fields: dict[str, Any]) -> FileObject:
    return files.publish(draft.publish(), **fields)


def _page(
    files: Files, after: str | None, limit: int, order: Order, purpose: str | None
) -> dict[str, Any]:
    listing = files.list(after, limit, order, purpose)
    rows = [file.to_openai() for file in listing.rows]
    return page(rows, listing.has_more, damaged=listing.damaged)


def _one_of(value: str, name: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise BadInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}", param=name)
    return value


def _check_range(header: str | None, file: FileObject) -> Response | None:
    """Return the refusal of a range outside of the file: Starlette's would be plain text."""
    if header is None:
        return None
    match = RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.group(1) == match.group(2) == "":
        raise BadInput(
            f"Range must be one range such as bytes=0-99, not {header[:100]!r}", param="Range"
        )
    first, last = match.groups()
    if first and last and int(first) > int(last):
        raise BadInput(f"Range {header[:100]!r} ends before it begins", param="Range")
    satisfiable = int(first) < file.bytes if first else int(last) > 0 and file.bytes > 0
    if satisfiable:
        return None
    message = f"Range {header[:100]!r} is outside of the file's {file.bytes} bytes"
    body = envelope(416, message, "range_not_satisfiable", "Range")
    headers = {"content-range": f"bytes */{file.bytes}"}
    return Response(body, 416, headers, "application/json")
