"""Bodies: the JSON of requests, bounded and checked; JSON answers."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cray_agents.errors import BadInput, NotFound
from cray_agents.exact_json import dump_json, load_json
from cray_agents.runtime.disk.turns import INLINE
from cray_agents.runtime.gateway.http.bounds import check_json
from cray_agents.runtime.gateway.http.client_work import aside, await_or_disconnect
from cray_agents.runtime.gateway.http.error_envelope import (
    SENT,
    BodyTooLarge,
    bad_input,
    without_paths,
)
from cray_agents.runtime.gateway.http.fields import ID

MARKS = "cray_agents"  # prefix of the fields that only the platform may send to engines
DEEPEST = 100  # lists and objects within each other; orjson cannot write more than 250

log = logging.getLogger(__name__)

JSON = "application/json"
SIZE = "cray_agents.size"  # in the scope: the bytes of the body
QUOTED = 2**14  # bytes of a body in which a message looks for a path that the client sent

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit: int) -> bytearray:
    """Return the body. Raises BodyTooLarge beyond `limit` bytes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return body


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Return the body as a JSON object. Raises BadInput; BodyTooLarge beyond `limit` bytes."""
    return await read_as(lambda body: body, request, limit)


async def read_record(model: type[Model], request: Request, limit: int) -> Model:
    """Return the body as a record. Raises as `read_json`, and BadInput as `parse`."""
    return await read_as(partial(parse, model), request, limit)


async def read_as(read: Callable[[dict[str, Any]], T], request: Request, limit: int) -> T:
    """Return what `read` makes of the body, in a thread if it is large. Raises as `read_json`."""
    body = await read_body(request, limit)
    request.scope[SENT] = body[:QUOTED]
    size = request.scope[SIZE] = len(body)
    if size <= INLINE:
        return read(_load(request, body))
    work = aside(request, lambda: read(_load(request, body)))
    return await await_or_disconnect(request, None, work)


def size_of(request: Request) -> int:
    """Return the bytes of a body that was read."""
    return int(request.scope[SIZE])


def _load(request: Request, body: bytearray) -> dict[str, Any]:
    check_json(body)

    def tell() -> None:
        path = request.url.path
        log.warning('%s %s: half a character in the body became "?"', request.method, path)

    try:
        value = load_json(body, tell)
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
    """Tell whether a request has a body."""
    return request.headers.get("content-length", "0") != "0" or (
        "transfer-encoding" in request.headers
    )


def parse(model: type[Model], value: Any, under: str = "") -> Model:
    """Return a record from JSON. Raises BadInput naming the first field that does not fit."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise bad_input(error.errors(), [under] if under else []) from error


def check_unmarked(body: Mapping[str, Any]) -> None:
    """Raise BadInput where a request to a model carries a mark that only the platform sets.

    Marks go to vLLM in `vllm_xargs`. A marked request could be answered by unproven weights, or
    not be recorded whole (runtime/vllm_plugins/scheduler.py).
    """
    args = body.get("vllm_xargs")
    marks = [name for name in args if name.startswith(MARKS)] if isinstance(args, dict) else []
    if marks:
        raise BadInput(
            f"vllm_xargs: {marks[0][:64]!r} is the platform's own; leave out what begins with "
            f"{MARKS!r}",
            param="vllm_xargs",
        )


def last_lines(path: Path, count: int) -> bytes:
    """Return the last lines of a log, nothing where there is none yet."""
    if not path.is_file():
        return b""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=count)).encode()


def json_response(value: Any) -> Response:
    """Return a JSON answer: of a record, or of plain JSON."""
    return Response(_json_of(value), media_type=JSON)


def _json_of(value: Any) -> bytes:
    return dump_json(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)


async def answer_read(
    request: Request, read: Callable[[], Any], *, long: bool = False, media_type: str = JSON
) -> Response:
    """Answer with the bytes that `read` returns, or as JSON with what it returns; in a thread.

    `long`: it reads many records. Raises ClientDisconnect.
    """

    def write() -> bytes:
        value = read()
        return value if isinstance(value, bytes) else _json_of(value)

    content = await await_or_disconnect(request, None, aside(request, write, long=long))
    return response_of(content, media_type=media_type)


def response_of(content: bytes, *, media_type: str = JSON, **options: Any) -> Response:
    """Return an answer of these bytes."""
    kind = LargeResponse if len(content) > INLINE else Response
    return kind(content, media_type=media_type, **options)


class LargeResponse(Response):
    """An answer that is sent in pieces: the event loop copies what the client does not take yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        for at in range(0, len(self.body), INLINE):
            piece, more = self.body[at : at + INLINE], at + INLINE < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


def damage_told(damaged: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Return the field `damaged` of a list that leaves damaged records out; nothing without any."""
    rows = [{**each, "reason": without_paths(each["reason"])} for each in damaged]
    return {"damaged": rows} if rows else {}


def page(
    rows: Sequence[Mapping[str, Any]],
    has_more: bool,
    name: str = "id",
    damaged: Iterable[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return a page of a list in OpenAI's shape; `after` refers to the field `name`."""
    return {
        **damage_told(damaged),
        "object": "list",
        "data": rows,
        "has_more": has_more,
        "first_id": rows[0][name] if rows else None,
        "last_id": rows[-1][name] if rows else None,
    }


def field(body: dict[str, Any], name: str, kind: type[Any], default: Any = None) -> Any:
    """Return a field of a body, of this kind. Raises BadInput, also if it has no default."""
    value = body.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadInput(f"{name} must be given as a {kind.__name__}", param=name)
    return value


def check_known(params: Iterable[str], known: Collection[str]) -> None:
    """Raise BadInput for a query parameter that is not among the known ones."""
    for name in params:
        if name not in known:
            raise BadInput(
                f"unknown query parameter {name!r}; there are {', '.join(known)}",
                param=name,
                code="unknown_parameter",
            )


def check_run_id(request: Request) -> None:
    """Raise NotFound for a bare route under the base URL of a run that no run can have."""
    run_id = request.path_params.get("run_id")
    if run_id is not None and not ID.fullmatch(run_id):
        raise NotFound(f"no run {run_id[:200]!r}", param="run_id")


def _too_deep(body: dict[str, Any]) -> str | None:
    """Return the first field that is nested too deeply."""
    for name, value in body.items():
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(DEEPEST):
            inner = [v.values() if isinstance(v, dict) else v for v in level]
            level = [v for values in inner for v in values if isinstance(v, dict | list)]
            if not level:
                break
        else:
            return name
    return None


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes")
