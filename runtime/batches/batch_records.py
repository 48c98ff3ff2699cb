"""OpenAI's Batch object and what a batch is made from. Pure data; times are whole unix seconds."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from cray_agents.errors import BadInput
from cray_agents.records import Record
from cray_agents.runtime.files.files import ExpiresAfter

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
Stopped = Literal["cancelled", "expired"]  # why lines were not asked
Tokens = tuple[int, int, int, int, int]  # input, of these cached, output, of these reasoning, all
NO_TOKENS: Tokens = (0, 0, 0, 0, 0)


class BatchRequest(Record):
    """What was asked of a batch; `batch.json`."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    owner: str = ""  # the id of the key that made it; of its runs and output files, too
    input_sha256: str = ""  # of the input; batches from before that was kept have none

    @field_validator("endpoint")
    @classmethod
    def _known(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"{endpoint!r} is none of {', '.join(ENDPOINTS)}")
        return endpoint

    @field_validator("metadata")
    @classmethod
    def _small(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        pairs = (metadata or {}).items()
        if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs):
            raise ValueError("at most 16 pairs, of 64 characters a key and 512 a value")
        return metadata


def window_seconds(window: str) -> int:
    """`24h`, `90h`, `7d` as seconds. Raises BadInput."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * (3600 if match[2] == "h" else 86400) if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        raise BadInput(
            f"completion_window {window[:40]!r}: give hours or days, up to 30d, such as '24h'",
            param="completion_window",
        )
    return seconds


class LineError(Record):
    """What is wrong with the input; `line` counts from 1, empty lines included."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Record):
    """OpenAI's list of them."""

    object: Literal["list"] = "list"
    data: list[LineError]


class LineCounts(Record):
    """Lines: all, answered, and ended by an error. While a batch runs, the rest is to be done."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Record):
    """Of the input tokens."""

    cached_tokens: int


class OutputDetails(Record):
    """Of the output tokens."""

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
        """The wire's shape of a sum of tokens."""
        return cls(
            input_tokens=tokens[0],
            input_tokens_details=InputDetails(cached_tokens=tokens[1]),
            output_tokens=tokens[2],
            output_tokens_details=OutputDetails(reasoning_tokens=tokens[3]),
            total_tokens=tokens[4],
        )


class Batch(Record):
    """OpenAI's Batch."""

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
    """The input is valid; `in_progress.json`. `model` if all lines name the same one."""

    at: int
    lines: int
    chunks: int
    model: str | None = None
    index_sha256: str = ""  # of the chunk index; likewise


class Cancelling(Record):
    """No more lines are to be asked; `cancelling.json`."""

    at: int


class Finalizing(Record):
    """Every line has its result, and the batch will end like this; `finalizing.json`."""

    at: int
    outcome: Literal["completed", "cancelled", "expired"]


class BatchEnd(Record):
    """How a batch ended; `end.json`."""

    at: int
    status: Literal["completed", "failed", "cancelled", "expired"]
    counts: LineCounts = Field(default_factory=LineCounts)
    usage: BatchUsage | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineError] = Field(default_factory=list)


def tokens_of(body: Any) -> Tokens:
    """What an answer says it used, in either of OpenAI's spellings; zeros where it does not."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    given = _count(usage, "prompt_tokens", "input_tokens")
    made = _count(usage, "completion_tokens", "output_tokens")
    cached = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    thought = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return (
        given,
        _count(cached, "cached_tokens"),
        made,
        _count(thought, "reasoning_tokens"),
        _count(usage, "total_tokens") or given + made,
    )


def add(one: Tokens, other: Tokens) -> Tokens:
    """The sum."""
    a, b, c, d, e = (x + y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e


def _count(where: Any, *names: str) -> int:
    if isinstance(where, dict):
        for name in names:
            value = where.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0
