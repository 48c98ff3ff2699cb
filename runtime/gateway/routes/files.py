"""OpenAI's files: in as multipart, streamed to the disk; out as they are, also in ranges."""

import asyncio
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.runtime.files.blobs import PIECE, BlobDraft
from cray_agents.runtime.files.files import (
    CLIENT_PURPOSES,
    MOST,
    PURPOSES,
    ExpiresAfter,
    FileObject,
    Files,
    Order,
)
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer, listed, number, parse, path_id, query
from cray_agents.runtime.gateway.http.error_envelope import envelope
from cray_agents.runtime.gateway.http.multipart import Form, receive_form
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Services

ORDERS = ("asc", "desc")
LONGEST = 512  # characters of a filename
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Content(FileResponse):
    """A file's bytes; larger pieces than Starlette's, each is read in a thread."""

    chunk_size = PIECE


def routes(services: Services) -> list[Route]:
    """Everything under /v1/files."""
    files = Files(services.home)

    async def create(request: Request) -> Response:
        async with receive_form(request, "file", files.blobs.draft, services.max_file) as form:
            draft, how = _checked(form)
            owner = caller_of(request).key_id
            file = await asyncio.to_thread(_publish, files, draft, {**how, "owner": owner})
        return answer(file.shown())

    async def listing(request: Request) -> Response:
        given = query(request, "after", "limit", "order", "purpose")
        limit = number(given, "limit", MOST, MOST)
        order = _one_of(given.get("order", "desc"), "order", ORDERS)
        purpose = given.get("purpose")
        if purpose is not None:
            _one_of(purpose, "purpose", PURPOSES)
        after = given.get("after")
        return await asyncio.to_thread(_listed, files, after, limit, order, purpose)

    async def one(request: Request) -> Response:
        file = await asyncio.to_thread(files.get, path_id(request, "file_id", "file"))
        return answer(file.shown())

    async def delete(request: Request) -> Response:
        file_id = path_id(request, "file_id", "file")
        file = await asyncio.to_thread(files.get, file_id)
        check_owner(caller_of(request), file.owner, f"file {file_id!r}")
        await asyncio.to_thread(files.delete, file_id)
        return answer({"id": file_id, "object": "file", "deleted": True})

    async def content(request: Request) -> Response:
        file = await asyncio.to_thread(files.get, path_id(request, "file_id", "file"))
        refused = _check_range(request.headers.get("range"), file)
        return refused or Content(
            await asyncio.to_thread(files.blobs.proven, file.sha256),
            media_type="application/octet-stream",
            filename=file.filename,
        )

    return [
        Route("/v1/files", listing, methods=["GET"]),
        Route("/v1/files", create, methods=["POST"]),
        Route("/v1/files/{file_id}", one, methods=["GET"]),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content),
    ]


def check_filename(filename: str) -> str:
    """A filename that can be shown and sent in a header. Raises BadInput."""
    if not filename or len(filename) > LONGEST or CONTROL.search(filename):
        raise BadInput(
            f"a filename has 1 to {LONGEST} characters, and none that control; not "
            f"{filename[:100]!r}",
            param="filename",
        )
    return filename


def _checked(form: Form) -> tuple[BlobDraft, dict[str, Any]]:
    """The file, and how to publish it. Raises BadInput."""
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


def _publish(files: Files, draft: BlobDraft, how: dict[str, Any]) -> FileObject:
    return files.publish(draft.publish(), **how)


def _listed(
    files: Files, after: str | None, limit: int, order: Order, purpose: str | None
) -> Response:
    """A page as an answer; in a thread, for ten thousand files are not shown in a moment."""
    page = files.list(after, limit, order, purpose)
    return answer(listed([file.shown() for file in page.files], page.has_more))


def _one_of(value: str, name: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise BadInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}", param=name)
    return value


def _check_range(header: str | None, file: FileObject) -> Response | None:
    """The envelope for a range that cannot be served; Starlette would answer in plain text."""
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
