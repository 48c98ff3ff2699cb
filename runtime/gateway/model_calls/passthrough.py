"""Pass-through: forward requests that sample nothing (embeddings, tokens), without a record."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError
from cray_agents.exact_json import load_json
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.bodies import (
    check_unmarked,
    path_id,
    read_as,
    response_of,
    size_of,
)
from cray_agents.runtime.gateway.http.bounds import check_texts
from cray_agents.runtime.gateway.http.client_work import await_or_disconnect
from cray_agents.runtime.gateway.model_calls.answer import (
    collect_answer,
    resolve_version,
    take_ticket,
)
from cray_agents.runtime.gateway.model_calls.apis import Body
from cray_agents.runtime.gateway.services import Services


def check_embedded(body: Body) -> None:
    """Raise BadInput for an `input` that is no text, no tokens, and no list of these."""
    given = body.get("input")
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not all(
        isinstance(one, str)
        or _is_token(one)
        or (isinstance(one, list) and all(map(_is_token, one)))
        for one in given
    ):
        raise BadInput("input must be a text, token ids, or a list of these", param="input")
    check_texts("input", given)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def pass_through(
    services: Services,
    request: Request,
    path: str,
    check: Callable[[Body], object] | None = None,
) -> Response:
    """Answer a request by the engine's route at `path`. Called by routes/sampling.py.

    `check` raises BadInput for a body that is not as the document says.
    """
    if "run_id" in request.path_params:
        path_id(request, "run_id", "run")

    def checked(body: Body) -> Body:
        if not isinstance(body.get("model"), str):
            raise BadInput("model must be given as a string", param="model")
        check_unmarked(body)
        if check is not None:
            check(body)
        return body

    body = await read_as(checked, request, services.max_body)
    model = body["model"]
    body.pop("stream", None)
    exchange = EngineCall(path, body, new_id("x")[2:], capture=False, size=size_of(request))
    wanted = resolve_version(services, exchange)
    if path == "/v1/embeddings" and not services.pool.serves(exchange.version):
        folder = services.home.checkpoint(services.registry.resolve(exchange.version).checkpoint)
        if await asyncio.to_thread(only_generates, folder):  # before a replica is started for it
            raise _unsupported(exchange.version, path)
    ticket = take_ticket(services, request, model)
    try:
        answer = services.pool.answer(wanted, exchange)
        work = collect_answer(services, answer, ticket, wanted)
        content = await await_or_disconnect(request, ticket, work)
    except EngineError as error:
        if error.status in (404, 405, 501):  # vLLM has no route that its model cannot serve
            raise _unsupported(exchange.version, path) from error
        raise
    return response_of(content)


def only_generates(checkpoint: Path) -> bool:
    """Tell by its files whether vLLM serves a model for text alone, unless told otherwise."""
    try:
        config = load_json((checkpoint / "config.json").read_bytes())
        names = [str(name) for name in config["architectures"]]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return generates and not (checkpoint / "modules.json").exists()


def _unsupported(version: str, path: str) -> BadInput:
    return BadInput(
        f"{version} cannot do this ({path}): its engine serves a model of another kind",
        param="model",
        code="unsupported_model",
    )
