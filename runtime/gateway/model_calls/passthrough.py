"""Pass-through: forward requests that sample nothing (embeddings, tokens), without a record."""

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.bodies import check_unmarked, path_id, read_json
from cray_agents.runtime.gateway.model_calls.answer import (
    await_or_disconnect,
    collect_answer,
    resolve_version,
    take_ticket,
)
from cray_agents.runtime.gateway.services import Services


async def pass_through(services: Services, request: Request, path: str) -> Response:
    """Answer a request by the engine's route at `path`. Called by routes/sampling.py."""
    if "run_id" in request.path_params:
        path_id(request, "run_id", "run")
    body = await read_json(request, services.max_body)
    model = body.get("model")
    if not isinstance(model, str):
        raise BadInput("model must be given as a string", param="model")
    check_unmarked(body)
    body.pop("stream", None)
    exchange = EngineCall(path, body, new_id("x")[2:], capture=False)
    wanted = resolve_version(services, exchange)
    ticket = take_ticket(services, request, model)
    try:
        answer = services.pool.answer(wanted, exchange)
        work = collect_answer(services, answer, ticket, wanted)
        content = await await_or_disconnect(request, ticket, work)
    except EngineError as error:
        if error.status in (404, 405, 501):  # vLLM has no route that its model cannot serve
            raise BadInput(
                f"{exchange.version} cannot do this ({path}): its engine serves a model of "
                "another kind",
                param="model",
                code="unsupported_model",
            ) from error
        raise
    return Response(content, media_type="application/json")
