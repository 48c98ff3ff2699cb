"""Every failure as OpenAI's envelope: {"error": {"message", "type", "param", "code"}}.

Clients decide by status and `code`, so both are the same wherever an error comes from. The OpenAI
client repeats 409 and 500 on its own, which would run a failed swap or job again: `x-should-retry`
forbids it.
"""

import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import (
    AccessDenied,
    BadInput,
    Corrupt,
    CrayError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    JobError,
    NotFound,
    SchedulerError,
    SetupError,
    SwapError,
    TooManyRequests,
)

PASSED_ON = {400, 413, 422, 429}  # the engine's own verdicts on a request; the rest is our failure
ERROR_CODE = "cray_agents.error_code"  # in the scope of a request that failed, for edge.py
LONGEST = 2000  # characters of a message: what it quotes may be as long as the request
REASONS = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}


class BodyTimeout(BadInput):
    """A request's body stopped coming."""

    code = "request_timeout"


class BodyTooLarge(BadInput):
    """A request's body is larger than the gateway takes."""

    code = "body_too_large"


def status_of(error: CrayError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, EngineTimeout):
        return 504
    if isinstance(error, EngineUnavailable | SetupError | SchedulerError):
        return 503
    if isinstance(error, EngineError):
        return error.status if error.status in PASSED_ON else 502
    if isinstance(error, AccessDenied):
        return error.status
    if isinstance(error, TooManyRequests):
        return 429
    if isinstance(error, BodyTooLarge):
        return 413
    if isinstance(error, BodyTimeout):
        return 408
    for kind, status in ((BadInput, 400), (NotFound, 404), (SwapError, 409), (Corrupt, 422)):
        if isinstance(error, kind):
            return status
    return 500


def envelope(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """The JSON of an error."""
    if status == 409:
        kind = "conflict_error"
    elif status == 429:
        kind = "requests"  # OpenAI's word for which limit it was
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    if len(message) > LONGEST:
        message = message[:LONGEST] + "..."
    error = {"message": message, "type": kind, "param": param and param[:LONGEST], "code": code}
    return orjson.dumps({"error": error})


def error_json(error: CrayError) -> bytes:
    """The JSON of one of our errors; also what a stream that already began ends with."""
    param = getattr(error, "param", None)
    return envelope(status_of(error), str(error), str(error.code), param)


def error_response(error: CrayError) -> Response:
    """The answer to a request that failed with one of our errors."""
    status = status_of(error)
    headers = {}
    if isinstance(error, SwapError | JobError) and status != 503:
        headers["x-should-retry"] = "false"
    if status == 503:
        headers["retry-after"] = "1"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1000))
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return Response(error_json(error), status, headers, "application/json")


async def on_cray_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for our errors."""
    assert isinstance(error, CrayError)
    request.scope[ERROR_CODE] = str(error.code)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = REASONS.get(error.status_code, "invalid_request")
    request.scope[ERROR_CODE] = code
    body = envelope(error.status_code, message, code)
    return Response(body, error.status_code, error.headers, "application/json")


HANDLERS: dict[Any, Any] = {CrayError: on_cray_error, HTTPException: on_http_error}
