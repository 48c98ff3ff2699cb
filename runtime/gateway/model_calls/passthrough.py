"""What asks a model and samples nothing: embeddings, tokens, counts. Passed on, not recorded."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput, EngineError
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.bodies import check_unmarked, path_id, read_json
from cray_agents.runtime.gateway.model_calls.answer import enter, resolved, unless_gone, whole
from cray_agents.runtime.gateway.services import Services

#: A gateway's route, and the engine's.
PASSED = {
    "/v1/embeddings": "/v1/embeddings",
    "/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}


def routes(services: Services) -> list[Route]:
    """A route for each, and the same under a run's own base URL."""
    found = []
    for path, engine_path in PASSED.items():
        handler = _handler(services, engine_path)
        found.append(Route(path, handler, methods=["POST"]))
        found.append(Route(f"/runs/{{run_id}}{path}", handler, methods=["POST"]))
    return found


def _handler(services: Services, path: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle(request: Request) -> Response:
        if "run_id" in request.path_params:
            path_id(request, "run_id", "run")
        body = await read_json(request, services.max_body)
        model = body.get("model")
        if not isinstance(model, str):
            raise BadInput("model must be given as a string", param="model")
        check_unmarked(body)
        body.pop("stream", None)
        exchange = EngineCall(path, body, new_id("x")[2:], capture=False)
        wanted = resolved(services, exchange)
        ticket = enter(services, request, model)
        try:
            answer = services.pool.answer(wanted, exchange)
            asked = whole(services, answer, ticket, wanted)
            content = await unless_gone(request, ticket, asked)
        except EngineError as error:
            if error.status in (404, 405, 501):  # vLLM has only the routes of what its model can
                raise BadInput(
                    f"{exchange.version} cannot do this ({path}): its engine serves a model of "
                    "another kind",
                    param="model",
                    code="unsupported_model",
                ) from error
            raise
        return Response(content, media_type="application/json")

    return handle
