"""Multipart forms, streamed: one file goes straight into a blob's draft, fields stay small.

The body is never whole in memory: a thread parses, hashes and writes one piece while the next
arrives. Called by routes/files.py. Every refusal is BadInput.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from cray_agents.errors import BadInput
from cray_agents.runtime.files.blobs import PIECE, BlobDraft
from cray_agents.runtime.gateway.http.error_envelope import BodyTooLarge

if TYPE_CHECKING:  # it exists for type checkers alone
    from python_multipart.multipart import MultipartCallbacks

FIELD_BYTES = 64 * 1024  # at most, in all fields that are no file
MAX_PARTS = 32  # at most, in one form
FRAME_BYTES = 256 * 1024  # what boundaries, headers and fields may add to a file
AS_IT_IS = {"", "binary", "8bit", "7bit"}  # transfer encodings that change nothing
BAD = "invalid_multipart"
QUIET = logging.Logger("multipart", logging.ERROR)  # the client gets the parser's warnings


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
