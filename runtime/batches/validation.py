"""Input validation: check every line of a batch's input, and index its chunks in one pass.

A line costs some microseconds and eight bytes of memory, the hash of its custom_id. If two hashes
are equal, a second pass compares their custom_ids. Called by worker.py in a thread; chunks.py reads
the chunk index.
"""

import hashlib
import time
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from cray_agents.errors import Corrupt
from cray_agents.exact_json import refuse_costly
from cray_agents.runtime.batches.batch_records import (
    Accepted,
    BatchEnd,
    BatchFolder,
    BatchRequest,
    LineError,
)
from cray_agents.runtime.disk import checksums, durable

CHUNK_LINES = 500
CHUNK_BYTES = 4 * 2**20  # a chunk ends with the line that reaches this
MAX_LINE = 16 * 2**20  # bytes
MAX_ERRORS = 100  # reported for one input
CANCEL_CHECK_LINES = 10_000  # lines between checks for a cancelled batch
MAX_ID = 512  # characters of a custom_id

#: A row of the index: byte offset, bytes, first line number, requests, CRC-32 of the bytes. The CRC
#: is None in an index older than this column.
Row = tuple[int, int, int, int, int | None]


class Validation:
    """The validation of one input. `errors` is empty if the input is valid."""

    def __init__(self, request: BatchRequest) -> None:
        self.request = request
        self.errors: list[LineError] = []
        self.rows: list[Row] = []
        self.lines = 0
        self.models: set[str] = set()
        self._hashes = array("q")

    def run(self, folder: BatchFolder) -> None:
        """Read the input until its end, MAX_ERRORS errors, or a cancelled batch."""
        with folder.input.open("rb") as file:
            self._first_pass(file, folder)
            if repeated := self._equal_hashes():
                file.seek(0)
                self._find_duplicates(file, repeated)
        if not self.lines and not self.errors:
            self.errors.append(LineError(code="empty_file", message="The input file is empty."))
        self.errors.sort(key=lambda error: error.line or 0)
        del self.errors[MAX_ERRORS:]

    def _first_pass(self, file: BinaryIO, folder: BatchFolder) -> None:
        start, first, requests, offset, number, crc = 0, 1, 0, 0, 0, 0
        for number, raw in _lines(file):
            if requests and (requests == CHUNK_LINES or offset - start >= CHUNK_BYTES):
                self.rows.append((start, offset - start, first, requests, crc))
                start, first, requests, crc = offset, number, 0, 0
            offset += len(raw)
            crc = zlib.crc32(raw, crc)
            if number % CANCEL_CHECK_LINES == 0 and folder.cancelling_file.exists():
                return
            if raw.isspace():
                continue
            requests += 1
            self._check(number, raw)
            if len(self.errors) >= MAX_ERRORS:
                return
        if requests:
            self.rows.append((start, offset - start, first, requests, crc))

    def _check(self, number: int, raw: bytes) -> None:
        self.lines += 1
        try:
            custom_id, model = check_line(raw, self.request.endpoint)
        except Refused as refused:
            self.errors.append(refused.error(number))
            return
        # salted by process, so that clients cannot construct collisions
        self._hashes.append(hash(custom_id))
        if len(self.models) < 2:
            self.models.add(model)

    def _equal_hashes(self) -> set[int]:
        if not self._hashes:
            return set()
        import numpy

        hashes = numpy.frombuffer(self._hashes, dtype=numpy.int64)
        hashes.sort()
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())

    def _find_duplicates(self, file: BinaryIO, hashes: set[int]) -> None:
        seen: dict[str, int] = {}
        for number, raw in _lines(file):
            if raw.isspace():
                continue
            try:
                custom_id, _ = check_line(raw, self.request.endpoint)
            except Refused:
                continue
            if hash(custom_id) not in hashes:
                continue
            if custom_id in seen:
                message = (
                    f"The custom_id {custom_id[:64]!r} is line {seen[custom_id]}'s already: "
                    "it must be unique in the batch."
                )
                self.errors.append(
                    LineError(
                        code="duplicate_custom_id",
                        message=message,
                        line=number,
                        param="custom_id",
                    )
                )
                if len(self.errors) >= MAX_ERRORS:
                    return
            seen.setdefault(custom_id, number)


class Refused(Exception):
    """An invalid line of the input."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def error(self, line: int) -> LineError:
        """Return the error as listed in the batch object."""
        return LineError(code=self.code, message=str(self), line=line, param=self.param)


def validate(folder: BatchFolder, request: BatchRequest) -> None:
    """Accept the input of a batch, or fail the batch. Safe to repeat and to run concurrently.

    Raises Corrupt if the input differs from the file that the client named.
    """
    if request.input_sha256:
        checksums.prove(folder.input, request.input_sha256)
    validation = Validation(request)
    validation.run(folder)
    now = int(time.time())
    if folder.cancelling_file.exists():
        return  # a worker ends it at its next refresh
    if validation.errors:
        folder.finish(BatchEnd(at=now, status="failed", errors=validation.errors))
        return
    index = b"".join(orjson.dumps(row) + b"\n" for row in validation.rows)
    durable.create_file(folder.index, index)
    model = validation.models.pop() if len(validation.models) == 1 else None
    sha256 = hashlib.sha256(index).hexdigest()
    folder.accept(
        Accepted(
            at=now,
            lines=validation.lines,
            chunks=len(validation.rows),
            model=model,
            index_sha256=sha256,
        )
    )


def read_index(path: Path, sha256: str = "") -> list[Row]:
    """Read the chunks of an input, in order. Raises Corrupt."""
    text = path.read_bytes()
    if sha256 and hashlib.sha256(text).hexdigest() != sha256:
        raise Corrupt(f"{path} is damaged: it is not what its checksum says")
    rows = (orjson.loads(line) for line in text.splitlines())
    return [(*row[:4], row[4] if len(row) > 4 else None) for row in rows]


def check_line(raw: bytes, endpoint: str) -> tuple[str, str]:
    """Return the custom_id and the model of a line. Raises Refused."""
    if len(raw) > MAX_LINE:
        raise Refused("line_too_long", f"This line is longer than {MAX_LINE} bytes.")
    try:
        line = orjson.loads(refuse_costly(raw.removeprefix(BOM_UTF8)))
    except orjson.JSONDecodeError:
        message = "This line is not parseable as valid JSON."
        raise Refused("invalid_json_line", message) from None
    except ValueError as error:
        raise Refused("line_too_long", f"This line is too large: {error}.") from None
    if not isinstance(line, dict):
        raise Refused("invalid_json_line", "This line is not a JSON object.")
    custom_id = line.get("custom_id")
    if custom_id is None:
        raise Refused("missing_required_parameter", "custom_id is missing.", "custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        message = f"custom_id must be a string of 1 to {MAX_ID} characters."
        raise Refused("invalid_value", message, "custom_id")
    if line.get("method") != "POST":
        raise Refused("invalid_method", "method must be 'POST'.", "method")
    if line.get("url") != endpoint:
        message = f"url must be the batch's endpoint, {endpoint!r}."
        raise Refused("mismatched_endpoint", message, "url")
    return custom_id, _model(line.get("body"))


def _model(body: Any) -> str:
    if not isinstance(body, dict):
        raise Refused("missing_required_parameter", "body must be a JSON object.", "body")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refused("missing_required_parameter", "body.model must be a string.", "body.model")
    if body.get("stream"):
        raise Refused("invalid_value", "body.stream: a batch does not stream.", "body.stream")
    return model


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines. Cuts a line that is too long to just over MAX_LINE bytes."""
    number = 0
    while raw := file.readline(MAX_LINE + 2):
        number += 1
        yield number, raw
        while len(raw) > MAX_LINE and not raw.endswith(b"\n"):  # skip the rest of the line
            raw = file.readline(MAX_LINE + 2)
            if not raw:
                break
