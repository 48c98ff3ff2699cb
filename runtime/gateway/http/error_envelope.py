"""Error envelope: failures as OpenAI's {"error": {"message", "type", "param", "code"}}.

A request to Anthropic's API (by path, or by the header that its clients always send) gets
Anthropic's: {"type": "error", "error": {"type", "message", "param", "code"}}; the last two fields
are ours. A stream of OpenAI's responses ends with an event of its own shape. It also has `error`,
by which that API's clients notice it.

Clients decide by status and `code`, so both are the same wherever an error comes from. The OpenAI
client repeats 409 and 500 on its own. This would run a failed swap or job again, so
`x-should-retry` forbids it.
"""

import errno
import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from cray_agents.errors import (
    FULL,
    AccessDenied,
    BadInput,
    Corrupt,
    CrayError,
    DiskFull,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    JobError,
    NoController,
    NotFound,
    SchedulerError,
    SetupError,
    StoreError,
    SwapError,
    TooManyRequests,
)

AWAY = {errno.EROFS, errno.EIO, errno.ESTALE}  # a file system that may come back
PASSED_ON = {400, 413, 422, 429}  # statuses of an engine that blame the request
ERROR_CODE = "cray_agents.error_code"  # in the scope of a failed request, for middleware.py
SENT = "cray_agents.sent"  # in the scope: the JSON body
LONGEST = 2000  # characters of a message, which may quote a long request
FINAL = {"engine_died", "model_not_loaded"}  # codes after which a repeat is useless or harmful
ANTHROPIC = re.compile(r"(/runs/[^/]+)?/v1/messages(/.*)?")
RESPONSES = re.compile(r"(/runs/[^/]+)?/v1/responses")
ANTHROPIC_HEADER = b"anthropic-version"
ANTHROPIC_TYPES = {  # by status; other statuses by their hundred
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
REASONS = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}

log = logging.getLogger(__name__)


class BodyTimeout(BadInput):
    """A request's body stopped."""

    code = "request_timeout"


class BadEncoding(BadInput):
    """A request's body is compressed."""

    code = "unsupported_content_encoding"


class BodyTooLarge(BadInput):
    """A request's body is larger than the gateway takes."""

    code = "body_too_large"


#: The status of each kind of error; the first kind that fits counts.
STATUSES: tuple[tuple[type[CrayError], int], ...] = (
    (EngineTimeout, 504),
    (EngineUnavailable, 503),
    (EngineError, 502),
    (NoController, 503),
    (SetupError, 503),
    (SchedulerError, 503),
    (TooManyRequests, 429),
    (BodyTooLarge, 413),
    (BodyTimeout, 408),
    (BadEncoding, 415),
    (DiskFull, 507),
    (Corrupt, 422),
    (StoreError, 503),
    (BadInput, 400),
    (NotFound, 404),
    (SwapError, 409),
)


def status_of(error: CrayError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, AccessDenied):
        return error.status
    if type(error) is EngineError and error.status in PASSED_ON:
        return error.status
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def is_anthropic(scope: Scope) -> bool:
    """Tell whether a request is to Anthropic's API."""
    return ANTHROPIC.fullmatch(scope["path"]) is not None or any(
        name == ANTHROPIC_HEADER for name, _ in scope["headers"]
    )


def envelope(
    status: int, message: str, code: str, param: str | None = None, scope: Scope | None = None
) -> bytes:
    """Return the JSON of an error, in the shape of the request's API.

    Paths in the message are shortened, unless the client sent them itself.
    """
    message = without_paths(message[: 4 * LONGEST], b"" if scope is None else _sent(scope))
    anthropic = scope is not None and is_anthropic(scope)
    if anthropic:
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    elif status == 409:
        kind = "conflict_error"
    elif status == 429:
        kind = "requests"  # OpenAI's word for which limit it was
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    if len(message) > LONGEST:
        message = message[:LONGEST] + "..."
    error = {"message": message, "type": kind, "param": param and param[:LONGEST], "code": code}
    return orjson.dumps({"type": "error", "error": error} if anthropic else {"error": error})


def error_json(error: CrayError, scope: Scope) -> bytes:
    """Return the JSON of one of our errors. One about a damaged record names it by its id."""
    message = str(error)
    if isinstance(error, Corrupt):  # paths are shortened, often to `batch.json`
        shortened, ids = without_paths(message), map(str, scope.get("path_params", {}).values())
        message = "".join(f"{each}: " for each in ids if each not in shortened) + message
    return envelope(status_of(error), message, str(error.code), error.param, scope)


def error_event(error: CrayError, scope: Scope, number: int) -> bytes:
    """Return the last event of a stream that fails after `number` events."""
    content, name = error_json(error, scope), b"event: error\n"
    if RESPONSES.fullmatch(scope["path"]):
        fault = orjson.loads(content)["error"]
        event = {**fault, "type": "error", "sequence_number": number, "error": fault}
        content = orjson.dumps(event)
    elif not is_anthropic(scope):
        name = b""
    return name + b"data: " + content + b"\n\n"


def error_response(error: CrayError, scope: Scope) -> Response:
    """Return the answer to a request that failed with one of our errors."""
    status = status_of(error)
    headers = {}
    if (isinstance(error, SwapError | JobError) and status != 503) or error.code in FINAL:
        headers["x-should-retry"] = "false"
    if status == 503 and error.code not in FINAL:
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1000))
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return Response(error_json(error, scope), status, headers, "application/json")


async def on_cray_error(request: Request, error: Exception) -> Response:
    """Answer one of our errors, for Starlette."""
    assert isinstance(error, CrayError)
    request.scope[ERROR_CODE] = str(error.code)
    return error_response(error, request.scope)


async def on_os_error(request: Request, error: Exception) -> Response:
    """Answer a full disk or a root that is away, for Starlette.

    Any other error of the system is raised, as a bug.
    """
    assert isinstance(error, OSError)
    if error.errno not in FULL | AWAY:
        raise error
    log.error("%s %s: %s", request.method, request.scope["path"], error)
    text, ours = os.strerror(error.errno or errno.EIO), StoreError
    if error.errno in AWAY:
        text += ": the platform's root cannot be used now; ask again in a moment"
    else:
        text += ": nothing was stored; free some of the platform's disk, send it again"
        ours = DiskFull
    return await on_cray_error(request, ours(text))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    code = REASONS.get(error.status_code, "invalid_request")
    request.scope[ERROR_CODE] = code
    body = envelope(error.status_code, message, code, scope=request.scope)
    return Response(body, error.status_code, error.headers, "application/json")


def bad_input(errors: Sequence[Any], under: Sequence[str] = ()) -> BadInput:
    """Return the refusal of a value that does not fit: it names the first field, with its path."""
    first = errors[0]
    path = [*under, *map(str, first["loc"])]
    param = ".".join(path) if path else None
    own = first.get("ctx", {}).get("error")
    why = str(own) if isinstance(own, BadInput) else f"{param or 'the body'}: {first['msg']}"
    return BadInput(why, param=param)


async def on_bad_parameter(request: Request, error: Exception) -> Response:
    """Answer a path or query that does not fit, for Starlette."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return await on_cray_error(request, bad_input([{**first, "loc": first["loc"][1:2]}]))


def _sent(scope: Scope) -> bytes:
    """Return the client's own text: path, query, and the JSON body once it was read."""
    body: bytes | bytearray = scope.get(SENT, b"")
    return b"\n".join((scope["path"].encode(), scope.get("query_string", b""), body))


HANDLERS: dict[Any, Any] = {
    CrayError: on_cray_error,
    HTTPException: on_http_error,
    OSError: on_os_error,
    RequestValidationError: on_bad_parameter,
}


#: At least two names, at the start of a word: neither `and/or` nor a URL.
_NAME = r"[^\s/'\"`()\[\]{}<>,;:]"
PATH = re.compile(rf"(?<![\w./\\~%#?&@+*-])/{_NAME}+(?:/{_NAME}*)+")
OURS = re.compile(r"/(v1|runs|health|metrics|tokenize|detokenize|api)/")


def without_paths(message: str, sent: bytes = b"") -> str:
    """Return the message with `.../name` for absolute paths that are no route and were not sent."""

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if OURS.match(path) or path.rstrip(".").encode(errors="replace") in sent:
            return path
        return ".../" + path.rstrip("/").rpartition("/")[2]

    return PATH.sub(shorten, message) if "/" in message else message
