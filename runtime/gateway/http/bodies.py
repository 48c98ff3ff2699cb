"""What comes in and goes out: JSON bodies, query parameters, ids; all refusals are BadInput."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.gateway.http.error_envelope import SENT, BodyTooLarge

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")  # also safe as a header and a folder
MARKS = "cray_agents"  # begins what the platform alone says to its engines
COUNT = re.compile(r"0|[1-9][0-9]{0,8}")
DEEPEST = 100  # lists and objects within each other: what writes JSON again gives up beyond 250
DIGITS = 18  # of a number in a query: more are no number that anything here counts to

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object. Raises BadInput; BodyTooLarge beyond `limit` bytes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    request.scope[SENT] = body
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise BadInput(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadInput("the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > DEEPEST and (name := _too_deep(value)) is not None:
        raise BadInput(
            f"{name[:100]} holds lists and objects that are more than {DEEPEST} deep in each other",
            param=name,
            code="invalid_json",
        )
    return value


def has_body(request: Request) -> bool:
    """Whether anything is sent with it."""
    return request.headers.get("content-length", "0") != "0" or (
        "transfer-encoding" in request.headers
    )


def parse(model: type[Model], value: Any, under: str = "") -> Model:
    """A record from JSON. Raises BadInput naming the first field that does not fit."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = [*([under] if under else []), *map(str, first["loc"])]
        param = ".".join(where) if where else None
        raise BadInput(f"{param or 'the body'}: {first['msg']}", param=param) from error


def check_unmarked(body: Mapping[str, Any]) -> None:
    """Raise BadInput where a request to a model carries a mark that only the platform sets.

    They go to vLLM in `vllm_xargs`: a marked request would be answered by weights that nothing has
    proven yet, or not be recorded whole (vllm_scheduler.py).
    """
    given = body.get("vllm_xargs")
    marks = [name for name in given if name.startswith(MARKS)] if isinstance(given, dict) else []
    if marks:
        raise BadInput(
            f"vllm_xargs: {marks[0][:64]!r} is the platform's own; leave out what begins with "
            f"{MARKS!r}",
            param="vllm_xargs",
        )


def answer(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(value), 200, headers, "application/json")


def listed(rows: Sequence[Mapping[str, Any]], has_more: bool, name: str = "id") -> dict[str, Any]:
    """A page of a list in OpenAI's shape; `name` is the field that `after` means."""
    return {
        "object": "list",
        "data": rows,
        "has_more": has_more,
        "first_id": rows[0][name] if rows else None,
        "last_id": rows[-1][name] if rows else None,
    }


def field(body: dict[str, Any], name: str, kind: type[Any], default: Any = None) -> Any:
    """A field of a body, of a kind. Without a default it must be there. Raises BadInput."""
    value = body.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadInput(f"{name} must be given as a {kind.__name__}", param=name)
    return value


def query(request: Request, *known: str) -> dict[str, str]:
    """The query parameters. An unknown one is an error, for it would have no effect."""
    for name in request.query_params:
        if name not in known:
            raise BadInput(
                f"unknown query parameter {name!r}; there are {', '.join(known)}",
                param=name,
                code="unknown_parameter",
            )
    return dict(request.query_params)


def number(given: Mapping[str, str], name: str, default: int, most: int | None = None) -> int:
    """A whole, non-negative query parameter. Raises BadInput."""
    text = given.get(name, str(default))
    most = 10**DIGITS - 1 if most is None else most
    if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS) or int(text) > most:
        raise BadInput(f"{name} must be a whole number up to {most}, not {text!r}", param=name)
    return int(text)


def path_number(request: Request, name: str, what: str) -> int:
    """A number from the path; what is none that anything here counts to is not found."""
    value = str(request.path_params[name])
    if not COUNT.fullmatch(value):
        raise NotFound(f"no {what} {value!r}", param=name)
    return int(value)


def path_id(request: Request, name: str, what: str) -> str:
    """An id from the path; what cannot be one is not found, and never reaches the disk."""
    value = str(request.path_params[name])
    if not ID.fullmatch(value):
        raise NotFound(f"no {what} {value!r}", param=name)
    return value


def _too_deep(body: dict[str, Any]) -> str | None:
    """The first field that is nested too deeply."""
    for name, value in body.items():
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(DEEPEST):
            inner = [v.values() if isinstance(v, dict) else v for v in level]
            level = [v for held in inner for v in held if isinstance(v, dict | list)]
            if not level:
                break
        else:
            return name
    return None


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes")
