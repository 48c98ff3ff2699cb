"""OpenAI's files and uploads: streamed to the disk, sent whole or in ranges.

A file comes as multipart in one request, or as an upload: parts of at most 64 MiB, in any order and
in parallel, then one file. Beyond OpenAI's API, an upload lists its parts.

A form's body is never whole in memory: a thread parses, hashes and writes one piece while the next
arrives. Its file goes straight into a blob's draft, its fields stay small.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Header, Query
from pydantic import Field
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from cray_agents.errors import BadInput
from cray_agents.records import Record
from cray_agents.runtime.files.blobs import PIECE, BlobDraft
from cray_agents.runtime.files.files import (
    CLIENT_PURPOSES,
    PAGE_LIMIT,
    ClientPurpose,
    ExpiresAfter,
    File,
    FileObject,
    Order,
    Purpose,
)
from cray_agents.runtime.files.uploads import PART_BYTES, UploadPart, UploadRequest, Uploads
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import json_response, page, parse
from cray_agents.runtime.gateway.http.client_work import aside
from cray_agents.runtime.gateway.http.error_envelope import BodyTooLarge, envelope
from cray_agents.runtime.gateway.http.fields import (
    After,
    Deleted,
    Fields,
    FileId,
    ListPage,
    UploadId,
)
from cray_agents.runtime.gateway.http.routing import BINARY, Router
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.services import Current, Services

if TYPE_CHECKING:  # it exists for type checkers alone
    from python_multipart.multipart import MultipartCallbacks

LONGEST = 512  # characters of a filename
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
FORM_FAILS = "400 invalid_multipart, 400 invalid_content_type, 413 body_too_large"
SHA256 = "^[0-9a-f]{64}$"
FIELD_BYTES = 64 * 1024  # at most, in all fields that are no file
MAX_PARTS = 32  # at most, in one form
FRAME_BYTES = 256 * 1024  # what boundaries, headers and fields may add to a file
AS_IT_IS = {"", "binary", "8bit", "7bit"}  # transfer encodings that change nothing
BAD = "invalid_multipart"
QUIET = logging.Logger("multipart", logging.ERROR)  # the client gets the parser's warnings

router = Router("Files")


# ---- multipart forms; every refusal is BadInput
@dataclass
class Form:
    """A form as received. `file` is a draft, removed at the end unless the caller publishes it."""

    fields: dict[str, str] = field(default_factory=dict)
    file: BlobDraft | None = None
    filename: str | None = None


@asynccontextmanager
async def receive_form(
    request: Request, name: str, open_draft: Callable[[], BlobDraft], limit: int
) -> AsyncIterator[Form]:
    """Receive the form in a request's body; its file is the field `name`, of at most `limit` bytes.

    Raises BadInput, BodyTooLarge, StoreError; ClientDisconnect if the body does not end.
    """
    reader = FormReader(request.headers.get("content-type", ""), name, open_draft, limit)
    try:
        await _feed(request, reader, name, limit)
        yield reader.form()
    finally:
        await asyncio.to_thread(reader.discard)


class FormReader:
    """Parser of a body in pieces, for one thread at a time."""

    def __init__(
        self, content_type: str, name: str, open_draft: Callable[[], BlobDraft], limit: int
    ) -> None:
        self._name = name
        self._open_draft = open_draft
        self._limit = limit
        self._form = Form()
        self._part_count = 0
        self._field_bytes = 0
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._sink: Callable[[memoryview], None] = self._ignore
        self._values: dict[str, bytearray] = {}
        self._ended = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": lambda data, start, end: self._sink(memoryview(data)[start:end]),
            "on_end": self._on_end,
        }
        try:
            self._parser = MultipartParser(_boundary(content_type), callbacks)
            self._parser.logger = QUIET
        except FormParserError as error:
            raise self._bad(str(error)) from error

    def write(self, piece: bytes) -> None:
        """Take the next piece. Raises BadInput, BodyTooLarge, StoreError."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise self._bad(str(error)) from error

    def form(self) -> Form:
        """Return the form. Raises BadInput if it is not whole."""
        if not self._ended:
            raise self._bad("it ends before its closing boundary")
        for name, value in self._values.items():
            self._form.fields[name] = self._text(value, name)
        return self._form

    def discard(self) -> None:
        """Remove the file's draft, if it was not published."""
        if self._form.file is not None:
            self._form.file.discard()

    def _on_part_begin(self) -> None:
        self._part_count += 1
        if self._part_count > MAX_PARTS:
            raise self._bad(f"it has more than {MAX_PARTS} parts")
        self._headers = {}

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise self._bad("a part has no Content-Disposition: form-data with a name")
        name = self._text(options[b"name"], self._name)
        if name in self._values or (name == self._name and self._form.file is not None):
            raise BadInput(f"{name[:100]} was given twice", param=name[:100], code=BAD)
        encoding = self._headers.get(b"content-transfer-encoding", b"").decode("latin-1").lower()
        if encoding not in AS_IT_IS:
            raise self._bad(f"Content-Transfer-Encoding {encoding[:100]!r} is not taken")
        if name == self._name and b"filename" in options:
            filename = self._text(options[b"filename"], name)
            self._form.filename = filename.replace("%22", '"')  # so HTML's forms write a quote
            self._form.file = self._open_draft()
            self._sink = self._to_file
        else:
            self._sink = self._to_field(name)

    def _to_file(self, data: memoryview) -> None:
        assert self._form.file is not None
        if self._form.file.size + len(data) > self._limit:
            raise too_large(self._name, self._limit)
        self._form.file.write(data)

    def _to_field(self, name: str) -> Callable[[memoryview], None]:
        value = self._values[name] = bytearray()

        def sink(data: memoryview) -> None:
            self._field_bytes += len(data)
            if self._field_bytes > FIELD_BYTES:
                raise BadInput(
                    f"the fields hold more than {FIELD_BYTES} bytes; the file belongs into "
                    f"{self._name!r}, with a filename",
                    param=name[:100],
                    code="field_too_large",
                )
            value.extend(data)

        return sink

    def _on_end(self) -> None:
        self._ended = True

    def _ignore(self, data: memoryview) -> None:
        """Drop data before the first part."""

    def _text(self, value: bytes | bytearray, name: str) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{name[:100]} is not UTF-8: {error}", param=name[:100]) from error

    def _bad(self, why: str) -> BadInput:
        return BadInput(f"the body is not multipart/form-data: {why}", param=self._name, code=BAD)


def too_large(name: str, limit: int) -> BodyTooLarge:
    """Return the refusal of a file."""
    return BodyTooLarge(f"{name} is larger than {limit} bytes, the most taken here", param=name)


async def _feed(request: Request, reader: FormReader, name: str, limit: int) -> None:
    """Feed the body to the reader: a thread parses one piece while the next arrives."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit + FRAME_BYTES:
        raise too_large(name, limit)
    received = 0
    working: asyncio.Task[None] | None = None
    try:
        async with contextlib.aclosing(_pieces(request)) as pieces:
            async for piece in pieces:
                received += len(piece)
                if received > limit + FRAME_BYTES:
                    raise too_large(name, limit)
                if working is not None:
                    await asyncio.shield(working)
                working = asyncio.create_task(asyncio.to_thread(reader.write, piece))
    finally:
        if working is not None:  # a thread cannot be stopped: it writes to the draft until then
            await asyncio.wait({working})
    if working is not None:
        await working


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces that are worth a thread each."""
    gathered: list[bytes] = []
    size = 0
    async with contextlib.aclosing(request.stream()) as stream:
        async for chunk in stream:
            gathered.append(chunk)
            size += len(chunk)
            if size >= PIECE:
                yield b"".join(gathered)
                gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadInput(
            f"send multipart/form-data with a boundary, not {content_type[:200]!r}",
            param="content-type",
            code="invalid_content_type",
        )
    return options[b"boundary"]


# ---- files
class FileForm(Record):
    """The fields of a form with a file."""

    file: bytes = Field(json_schema_extra=BINARY)
    purpose: ClientPurpose
    anchor: Literal["created_at"] = Field("created_at", alias="expires_after[anchor]")
    seconds: int = Field(3600, alias="expires_after[seconds]", ge=3600, le=2_592_000)


class PartForm(Record):
    """The fields of a form with a part, and its `sha256` to have it checked."""

    data: bytes = Field(json_schema_extra=BINARY)
    sha256: str = Field("", pattern=SHA256)


class ShownUpload(Record):
    """An upload and its parts, at the end its file."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: File | None
    parts: list[UploadPart]


class UploadCompletion(Fields):
    """The parts of an upload in their order."""

    part_ids: list[str]
    md5: str | None = None


class ContentResponse(FileResponse):
    """The bytes of a file, in larger pieces than Starlette's: a thread reads each piece."""

    chunk_size = PIECE


@router.get("/v1/files", Role.use, answer=ListPage[File])
def list_files(
    services: Current,
    after: After = None,
    limit: Annotated[int, Query(ge=0, le=PAGE_LIMIT)] = PAGE_LIMIT,
    order: Order = "desc",
    purpose: Purpose | None = None,
) -> dict[str, Any]:
    """List the files, by time of creation."""
    listing = services.files.list(after, limit, order, purpose)
    rows = [file.to_openai() for file in listing.rows]
    return page(rows, listing.has_more, damaged=listing.damaged)


@router.post(
    "/v1/files",
    Role.use,
    form=FileForm,
    answer=File,
    fails=f"{FORM_FAILS}, 400 missing_file, 400 missing_field, 400 field_too_large",
)
async def create_file(services: Current, request: Request) -> Response:
    """Send a file.

    Streamed to the disk, at most 8 GiB. Larger files: POST /v1/uploads.
    """
    files = services.files
    draft_of = partial(files.blobs.draft, sent=True)
    async with receive_form(request, "file", draft_of, services.max_file) as form:
        draft, fields = _checked(form)
        fields["owner"] = caller_of(request).key_id
        file = await asyncio.to_thread(lambda: files.publish(draft.publish(), **fields))
    return json_response(file.to_openai())


@router.get("/v1/files/{file_id}", Role.use, answer=File)
async def retrieve_file(services: Current, file_id: FileId) -> Response:
    """Return a file's record."""
    file = await asyncio.to_thread(services.files.get, file_id)
    return json_response(file.to_openai())


@router.delete("/v1/files/{file_id}", Role.use, answer=Deleted)
async def delete_file(services: Current, request: Request, file_id: FileId) -> Response:
    """Delete a file."""
    file = await asyncio.to_thread(services.files.get, file_id)
    check_owner(caller_of(request), file.owner, f"file {file_id!r}")
    await asyncio.to_thread(services.files.delete, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.get(
    "/v1/files/{file_id}/content",
    Role.use,
    media={"application/octet-stream": {}},
    fails="416 range_not_satisfiable",
)
async def download_file(
    services: Current,
    file_id: FileId,
    wanted: Annotated[
        str | None,
        Header(alias="Range", description="One range, as `bytes=0-99`: answered with 206."),
    ] = None,
) -> Response:
    """Return a file's bytes, or one range of them."""
    file = await asyncio.to_thread(services.files.get, file_id)
    return _check_range(wanted, file) or ContentResponse(
        await asyncio.to_thread(services.files.blobs.verified_path, file.sha256),
        media_type="application/octet-stream",
        filename=file.filename,
    )


# ---- uploads
@router.post("/v1/uploads", Role.use, answer=ShownUpload, fails="413 body_too_large")
async def create_upload(services: Current, request: Request, body: UploadRequest) -> Response:
    """Begin to send a file in parts.

    An upload expires a day after its last part. One that was cut off goes on: GET lists its parts.
    """
    check_filename(body.filename)
    if body.bytes > services.max_upload:
        raise too_large("bytes", services.max_upload)
    owner = caller_of(request).key_id
    return json_response(await asyncio.to_thread(services.uploads.create, body, owner))


@router.get("/v1/uploads/{upload_id}", Role.use, answer=ShownUpload)
async def retrieve_upload(services: Current, upload_id: UploadId) -> Response:
    """Return an upload and its parts."""
    return json_response(await asyncio.to_thread(services.uploads.show, upload_id))


@router.post(
    "/v1/uploads/{upload_id}/parts",
    Role.use,
    form=PartForm,
    answer=UploadPart,
    fails=f"{FORM_FAILS}, 404 not_found, 400 part_too_large",
)
async def add_upload_part(services: Current, request: Request, upload_id: UploadId) -> Response:
    """Send a part of at most 64 MiB, and its `sha256` to have it checked.

    The same content again is the same part.
    """
    await _check_upload(services, request, upload_id)
    await asyncio.to_thread(services.uploads.check_pending, upload_id)
    draft = partial(services.files.blobs.draft, sent=True)
    async with receive_form(request, "data", draft, PART_BYTES) as form:
        part = await asyncio.to_thread(_add_part, services.uploads, upload_id, form)
    return json_response(part)


@router.post(
    "/v1/uploads/{upload_id}/complete",
    Role.use,
    answer=ShownUpload,
    fails="400 part_not_found, 400 bytes_mismatch, 400 md5_mismatch",
)
async def complete_upload(
    services: Current, request: Request, upload_id: UploadId, body: UploadCompletion
) -> Response:
    """Put an upload's parts together to a file, in the order of `part_ids`.

    Completed again, it is the same file.
    """
    await _check_upload(services, request, upload_id)
    join = partial(services.uploads.complete, upload_id, body.part_ids, body.md5)
    response = json_response(await aside(request, join, long=True, ends=False))
    response.background = BackgroundTask(services.sweeper.sweep_if_due)
    return response


@router.post(
    "/v1/uploads/{upload_id}/cancel", Role.use, answer=ShownUpload, fails="400 upload_completed"
)
async def cancel_upload(services: Current, request: Request, upload_id: UploadId) -> Response:
    """Give an upload up."""
    await _check_upload(services, request, upload_id)
    return json_response(await asyncio.to_thread(services.uploads.cancel, upload_id))


async def _check_upload(services: Services, request: Request, upload_id: str) -> None:
    """Raise AccessDenied for an upload that the caller may not change, NotFound without one."""
    owner = await asyncio.to_thread(services.uploads.owner, upload_id)
    check_owner(caller_of(request), owner, f"upload {upload_id!r}")


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
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise BadInput("purpose must be given", param="purpose", code="missing_field")
    if purpose not in CLIENT_PURPOSES:
        one_of = ", ".join(CLIENT_PURPOSES)
        raise BadInput(f"purpose must be one of {one_of}, not {purpose!r}", param="purpose")
    expiry = {key: form.fields.get(f"expires_after[{key}]") for key in ("anchor", "seconds")}
    expires_at = None
    if any(value is not None for value in expiry.values()):
        expires_at = time.time() + parse(ExpiresAfter, expiry, "expires_after").seconds
    return form.file, {
        "purpose": purpose,
        "filename": check_filename(form.filename),
        "expires_at": expires_at,
    }


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
