"""OpenAI's uploads: parts of at most 64 MiB, in any order and in parallel, then one file.

Beyond OpenAI's API, an upload may announce its `sha256`, can then be continued, and lists its
parts.
"""

import asyncio
from functools import partial

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.runtime.files.uploads import PART_BYTES, UploadPart, UploadRequest, Uploads
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import field, json_response, parse, path_id, read_json
from cray_agents.runtime.gateway.http.client_work import aside
from cray_agents.runtime.gateway.http.multipart import Form, receive_form, too_large
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.http.shapes import (
    BYTES,
    SHA256_SHAPE,
    TEXT,
    TEXT_OR_NONE,
    WHOLE,
    NamedShape,
    list_of,
    object_of,
    or_none,
)
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.routes.files import FILE, FORM_FAILS, check_filename
from cray_agents.runtime.gateway.services import Services

PART = NamedShape(
    "UploadPart",
    object_of(
        {
            "id": TEXT,
            "object": {"const": "upload.part"},
            "created_at": WHOLE,
            "upload_id": TEXT,
            "bytes": WHOLE,
            "sha256": SHA256_SHAPE,
        }
    ),
)
UPLOAD = NamedShape(
    "Upload",
    object_of(
        {
            "id": TEXT,
            "object": {"const": "upload"},
            "bytes": WHOLE,
            "created_at": WHOLE,
            "expires_at": WHOLE,
            "filename": TEXT,
            "purpose": TEXT,
            "status": {"enum": ["pending", "completed", "cancelled", "expired"]},
            "file": or_none(FILE),
            "sha256": TEXT_OR_NONE,
            "parts": list_of(PART),
        }
    ),
)

router = Router("Files")


@router.post("/v1/uploads", Role.use, body=UploadRequest, answer=UPLOAD, fails="413 body_too_large")
async def create_upload(services: Services, request: Request) -> Response:
    """Begin to send a file in parts.

    With `sha256` an upload can be continued: the same request by the same caller, with the same
    filename and purpose, returns it with its parts. An upload expires a day after its last part.
    """
    body = await read_json(request, services.max_settings)
    announced = parse(UploadRequest, body)
    check_filename(announced.filename)
    if announced.bytes > services.max_upload:
        raise too_large("bytes", services.max_upload)
    owner = caller_of(request).key_id
    return json_response(await asyncio.to_thread(services.uploads.create, announced, owner))


@router.get("/v1/uploads/{upload_id}", Role.use, answer=UPLOAD, fails="404 not_found")
async def retrieve_upload(services: Services, request: Request) -> Response:
    """Return an upload and its parts."""
    return json_response(await asyncio.to_thread(services.uploads.show, _upload_id(request)))


@router.post(
    "/v1/uploads/{upload_id}/parts",
    Role.use,
    form={
        **object_of({"data": BYTES}, {"sha256": SHA256_SHAPE}),
    },
    answer=PART,
    fails=f"{FORM_FAILS}, 404 not_found, 400 part_too_large",
)
async def add_upload_part(services: Services, request: Request) -> Response:
    """Send a part of at most 64 MiB, and its `sha256` to have it checked.

    The same content again is the same part.
    """
    upload_id = await _own_upload(services, request)
    await asyncio.to_thread(services.uploads.check_pending, upload_id)
    draft = partial(services.files.blobs.draft, sent=True)
    async with receive_form(request, "data", draft, PART_BYTES) as form:
        part = await asyncio.to_thread(_add_part, services.uploads, upload_id, form)
    return json_response(part.to_openai())


@router.post(
    "/v1/uploads/{upload_id}/complete",
    Role.use,
    body=object_of({"part_ids": list_of(TEXT)}, {"md5": TEXT_OR_NONE}),
    answer=UPLOAD,
    fails=(
        "404 not_found, 400 part_not_found, 400 bytes_mismatch, 400 md5_mismatch, "
        "400 sha256_mismatch"
    ),
)
async def complete_upload(services: Services, request: Request) -> Response:
    """Put an upload's parts together to a file, in the order of `part_ids`.

    Completed again, it is the same file.
    """
    upload_id = await _own_upload(services, request)
    body = await read_json(request, services.max_settings)
    part_ids = field(body, "part_ids", list)
    if not all(isinstance(part_id, str) for part_id in part_ids):
        raise BadInput("part_ids must be a list of strings", param="part_ids")
    md5 = body.get("md5")
    if not isinstance(md5, str | None):
        raise BadInput("md5 must be a string", param="md5")
    join = partial(services.uploads.complete, upload_id, part_ids, md5)
    response = json_response(await aside(request, join, long=True, ends=False))
    response.background = BackgroundTask(services.sweeper.sweep_if_due)
    return response


@router.post(
    "/v1/uploads/{upload_id}/cancel",
    Role.use,
    answer=UPLOAD,
    fails="404 not_found, 400 upload_completed",
)
async def cancel_upload(services: Services, request: Request) -> Response:
    """Give an upload up."""
    upload_id = await _own_upload(services, request)
    return json_response(await asyncio.to_thread(services.uploads.cancel, upload_id))


async def _own_upload(services: Services, request: Request) -> str:
    """Return the id of an upload that the caller may change. Raises AccessDenied, NotFound."""
    upload_id = _upload_id(request)
    owner = await asyncio.to_thread(services.uploads.owner, upload_id)
    check_owner(caller_of(request), owner, f"upload {upload_id!r}")
    return upload_id


def _upload_id(request: Request) -> str:
    return path_id(request, "upload_id", "upload")


def _add_part(uploads: Uploads, upload_id: str, form: Form) -> UploadPart:
    """Add a part that was sent. Raises BadInput, NotFound."""
    if form.file is None:
        raise BadInput(
            "data must be given, as a part with a filename", param="data", code="missing_file"
        )
    sha256, content = form.fields.get("sha256"), form.file.publish()
    if sha256 not in (None, content.sha256):
        raise BadInput(
            f"data has sha256 {content.sha256}, not {sha256}",
            param="sha256",
            code="sha256_mismatch",
        )
    return uploads.add_part(upload_id, content)
