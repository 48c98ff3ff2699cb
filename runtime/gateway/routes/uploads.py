"""OpenAI's uploads: parts of at most 64 MiB, in any order and in parallel, then one file.

Beyond OpenAI: an upload may announce its `sha256`, can then be gone on with, and is shown with its
parts; a part whose content is here already is named by its `sha256` and not sent.
"""

import asyncio

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.runtime.files.blobs import Blob
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.garbage import Sweeper
from cray_agents.runtime.files.uploads import PART_BYTES, UploadPart, UploadRequest, Uploads
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer, field, parse, path_id, read_json
from cray_agents.runtime.gateway.http.multipart import Form, receive_form, too_large
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.routes.files import check_filename
from cray_agents.runtime.gateway.services import Services

JOINS = 2  # uploads that are put together at once: each takes a core and the disk


def routes(services: Services) -> list[Route]:
    """Everything under /v1/uploads."""
    files = Files(services.home)
    uploads = Uploads(files)
    sweeper = Sweeper(files, uploads)
    joining = asyncio.Semaphore(JOINS)

    async def create(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        announced = parse(UploadRequest, body)
        check_filename(announced.filename)
        if announced.bytes > services.max_upload:
            raise too_large("bytes", services.max_upload)
        owner = caller_of(request).key_id
        return answer(await asyncio.to_thread(uploads.create, announced, owner))

    async def one(request: Request) -> Response:
        return answer(await asyncio.to_thread(uploads.show, _id(request)))

    async def own(request: Request) -> str:
        """The id of an upload that the caller may go on with. Raises AccessDenied, NotFound."""
        upload_id = _id(request)
        owner = await asyncio.to_thread(uploads.owner, upload_id)
        check_owner(caller_of(request), owner, f"upload {upload_id!r}")
        return upload_id

    async def part(request: Request) -> Response:
        upload_id = await own(request)
        await asyncio.to_thread(uploads.check_pending, upload_id)
        async with receive_form(request, "data", files.blobs.draft, PART_BYTES) as form:
            added = await asyncio.to_thread(_add, uploads, upload_id, form)
        return answer(added.shown())

    async def complete(request: Request) -> Response:
        upload_id = await own(request)
        body = await read_json(request, services.max_body)
        part_ids = field(body, "part_ids", list)
        if not all(isinstance(part_id, str) for part_id in part_ids):
            raise BadInput("part_ids must be a list of strings", param="part_ids")
        md5 = body.get("md5")
        if not isinstance(md5, str | None):
            raise BadInput("md5 must be a string", param="md5")
        async with joining:
            shown = await asyncio.to_thread(uploads.complete, upload_id, part_ids, md5)
        response = answer(shown)
        response.background = BackgroundTask(sweeper.now_and_then)
        return response

    async def cancel(request: Request) -> Response:
        return answer(await asyncio.to_thread(uploads.cancel, await own(request)))

    return [
        Route("/v1/uploads", create, methods=["POST"]),
        Route("/v1/uploads/{upload_id}", one, methods=["GET"]),
        Route("/v1/uploads/{upload_id}/parts", part, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/complete", complete, methods=["POST"]),
        Route("/v1/uploads/{upload_id}/cancel", cancel, methods=["POST"]),
    ]


def _id(request: Request) -> str:
    return path_id(request, "upload_id", "upload")


def _add(uploads: Uploads, upload_id: str, form: Form) -> UploadPart:
    """A part that was sent, or named. Raises BadInput, NotFound."""
    named = form.fields.get("sha256")
    if form.file is None and named is None:
        raise BadInput(
            "data must be given, as a part with a filename; or sha256, of content that is here",
            param="data",
            code="missing_file",
        )
    if form.file is None:
        assert named is not None
        return uploads.add_part(upload_id, uploads.known(named))
    content: Blob = form.file.publish()
    if named not in (None, content.sha256):
        raise BadInput(
            f"data has sha256 {content.sha256}, not {named}", param="sha256", code="sha256_mismatch"
        )
    return uploads.add_part(upload_id, content)
