"""Batch records: OpenAI's Batch object, and the folder and files behind it.

Each state file is made once, by an exclusive link, and never changes. So any process can take the
next step, and repeating a step has no effect. Times are whole unix seconds.
"""

import re
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from cray_agents.errors import BadInput
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.files import ExpiresAfter

PREFIX = "batch_"
BATCH_FORMAT = 1  # of a batch's folder
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_WINDOW = 30 * 86400  # seconds
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Stopped = Literal["cancelled", "expired"]  # why lines were not sent
Tokens = tuple[int, int, int, int, int]  # input, cached input, output, reasoning output, total
NO_TOKENS: Tokens = (0, 0, 0, 0, 0)


class BatchRequest(Record):
    """The request for a batch; `batch.json`."""

    format: int = BATCH_FORMAT
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    owner: str = ""  # id of the API key that made it; also owns its runs and output files
    input_sha256: str = ""  # of the input; empty in batches older than this field

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"{endpoint!r} is none of {', '.join(ENDPOINTS)}")
        return endpoint

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        pairs = (metadata or {}).items()
        if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs):
            raise ValueError("at most 16 pairs, of 64 characters a key and 512 a value")
        return metadata


def window_seconds(window: str) -> int:
    """Return the seconds of `24h`, `90h` or `7d`. Raises BadInput."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * (3600 if match[2] == "h" else 86400) if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        raise BadInput(
            f"completion_window {window[:40]!r}: give hours or days, up to 30d, such as '24h'",
            param="completion_window",
        )
    return seconds


class LineError(Record):
    """An error in the input. `line` counts from 1 and includes empty lines."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Record):
    """OpenAI's list of line errors."""

    object: Literal["list"] = "list"
    data: list[LineError]


class LineCounts(Record):
    """Lines in total, completed and failed. The remaining lines are still to be done."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Record):
    """Details of the input tokens."""

    cached_tokens: int


class OutputDetails(Record):
    """Details of the output tokens."""

    reasoning_tokens: int


class BatchUsage(Record):
    """Tokens of all answered lines."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, tokens: Tokens) -> "BatchUsage":
        """Build OpenAI's usage object from a sum of tokens."""
        return cls(
            input_tokens=tokens[0],
            input_tokens_details=InputDetails(cached_tokens=tokens[1]),
            output_tokens=tokens[2],
            output_tokens_details=OutputDetails(reasoning_tokens=tokens[3]),
            total_tokens=tokens[4],
        )


class Batch(Record):
    """OpenAI's Batch object."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = Field(default_factory=LineCounts)
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class Accepted(Record):
    """A valid input; `in_progress.json`. `model` is set if all lines name the same one."""

    at: int
    lines: int
    chunks: int
    model: str | None = None
    index_sha256: str = ""  # of the chunk index; empty in batches older than this field


class Cancelling(Record):
    """A request to send no more lines; `cancelling.json`."""

    at: int


class Finalizing(Record):
    """The outcome of a batch whose lines all have results; `finalizing.json`."""

    at: int
    outcome: Literal["completed", "cancelled", "expired"]


class BatchEnd(Record):
    """The end of a batch; `end.json`."""

    at: int
    status: Literal["completed", "failed", "cancelled", "expired"]
    counts: LineCounts = Field(default_factory=LineCounts)
    usage: BatchUsage | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineError] = Field(default_factory=list)


class BatchFolder:
    """The folder `batches/<id>` under the home."""

    def __init__(self, root: Path) -> None:
        self.root, self.id = root, root.name
        self.request_file = root / "batch.json"
        self.input, self.index = root / "input.jsonl", root / "chunks.jsonl"
        self.claims, self.results, self.done = root / "claims", root / "results", root / "done"
        self.accepted_file = root / "in_progress.json"
        self.cancelling_file = root / "cancelling.json"
        self.finalizing_file = root / "finalizing.json"
        self.end_file = root / "end.json"

    def request(self) -> BatchRequest:
        """Read the request for the batch. Raises FileNotFoundError, Corrupt, NewerFormat."""
        return checksums.read_record(BatchRequest, self.request_file, BATCH_FORMAT)

    def accepted(self) -> Accepted | None:
        """Read in_progress.json, which exists once the input is valid."""
        return checksums.find_record(Accepted, self.accepted_file)

    def finalizing(self) -> Finalizing | None:
        """Read finalizing.json, which exists once every line has its result."""
        return checksums.find_record(Finalizing, self.finalizing_file)

    def end(self) -> BatchEnd | None:
        """Read end.json, which exists once the batch has ended."""
        return checksums.find_record(BatchEnd, self.end_file)

    def cancelled_at(self) -> int | None:
        """Return the time of the request to cancel the batch."""
        cancelling = checksums.find_record(Cancelling, self.cancelling_file)
        return cancelling.at if cancelling else None

    def stopped(self, request: BatchRequest) -> Stopped | None:
        """Return the reason to send no more lines, or None."""
        if self.cancelling_file.exists():
            return "cancelled"
        return "expired" if time.time() >= request.expires_at else None

    def accept(self, accepted: Accepted) -> None:
        """Record that the input is valid. The index must be written before."""
        durable.create_file(self.accepted_file, _json(accepted))

    def cancel(self) -> None:
        """Record a request to send no more lines."""
        durable.create_file(self.cancelling_file, _json(Cancelling(at=int(time.time()))))

    def finalize(self, finalizing: Finalizing) -> Finalizing:
        """Record the outcome of the batch. Return the outcome recorded first."""
        durable.create_file(self.finalizing_file, _json(finalizing))
        return checksums.read_record(Finalizing, self.finalizing_file)

    def finish(self, end: BatchEnd) -> None:
        """Record the end of the batch. An end recorded earlier stays."""
        durable.create_file(self.end_file, _json(end))

    def clean(self) -> None:
        """Remove the working files of an ended batch. Its output files hold all lines."""
        for directory in (self.claims, self.results, self.done):
            shutil.rmtree(directory, ignore_errors=True)
        for file in (self.input, self.index):
            file.unlink(missing_ok=True)


def tokens_of(body: Any) -> Tokens:
    """Return the token usage of a response, in either of OpenAI's spellings. Zeros if missing."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    sent = _count(usage, "prompt_tokens", "input_tokens")
    generated = _count(usage, "completion_tokens", "output_tokens")
    cached = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    reasoning = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return (
        sent,
        _count(cached, "cached_tokens"),
        generated,
        _count(reasoning, "reasoning_tokens"),
        _count(usage, "total_tokens") or sent + generated,
    )


def add_tokens(one: Tokens, other: Tokens) -> Tokens:
    """Return the sum of two token counts."""
    a, b, c, d, e = (x + y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e


def _count(counts: Any, *names: str) -> int:
    if isinstance(counts, dict):
        for name in names:
            value = counts.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0


def _json(record: Record) -> bytes:
    return checksums.with_crc(record.model_dump_json(exclude_none=True).encode())
