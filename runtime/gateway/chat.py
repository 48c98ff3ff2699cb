"""POST /v1/chat/completions: resolve the model, ask the pool, record the call, answer.

Every call is durably in the store before its answer ends, with the tokens the engine sampled and
the `name@N` that sampled them. Read next: capture.py, what is recorded; relay.py, streams.
"""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.records import new_id
from cray_agents.runtime.gateway.bodies import ID, answer, read_json
from cray_agents.runtime.gateway.capture import Capture, outgoing
from cray_agents.runtime.gateway.relay import EventStream, Relay
from cray_agents.runtime.gateway.services import Services, Wanted


def routes(services: Services) -> list[Route]:
    """The route, and the same under a run's own base URL."""

    async def chat(request: Request) -> Response:
        run_id = _run_id(request)
        body = await read_json(request, services.max_body)
        _check(body)
        version, wanted = _wanted(services, body["model"])
        capture = Capture(new_id("chatcmpl").replace("_", "-"), run_id, version, body)
        headers = {"x-run-id": run_id}
        if body.get("stream"):
            chunks = services.pool.stream(wanted, outgoing(body))
            return await _stream(services, capture, chunks, headers)
        completion = await services.pool.chat(wanted, outgoing(body))
        shown = capture.completion(completion)
        await services.store.append(capture.events())
        return answer(shown, headers)

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/runs/{run_id}/v1/chat/completions", chat, methods=["POST"]),
    ]


async def _stream(
    services: Services,
    capture: Capture,
    chunks: AsyncIterator[dict[str, Any]],
    headers: dict[str, str],
) -> Response:
    relay = Relay(chunks, capture, services.store)
    head = await relay.head(services.keep_alive)
    return EventStream(relay, head, services.keep_alive, headers)


def _wanted(services: Services, model: str) -> tuple[str, Wanted]:
    """The version that a model means now, and how to ask again. Raises NotFound."""
    version = services.registry.resolve(model).id
    if model == version:
        return version, version
    return version, lambda: services.registry.resolve(model).id


def _run_id(request: Request) -> str:
    run_id = request.path_params.get("run_id") or request.headers.get("x-run-id")
    if run_id is None:
        return new_id("run")
    if not ID.fullmatch(run_id):
        raise BadInput(
            f"{run_id[:200]!r} cannot name a run: letters, digits and '._:@-', at most 200",
            param="X-Run-Id",
        )
    return str(run_id)


def _check(body: dict[str, Any]) -> None:
    """Only what recording needs; the engine judges the rest."""
    if not isinstance(body.get("model"), str):
        raise BadInput("model must be given as a string", param="model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list with at least one message", param="messages")
    for name, values in (("messages", messages), ("tools", body.get("tools") or [])):
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise BadInput(f"{name} must be a list of objects", param=name)
    if not isinstance(body.get("stream"), bool | None):
        raise BadInput("stream must be true or false", param="stream")
    if not isinstance(body.get("stream_options"), dict | None):
        raise BadInput("stream_options must be an object", param="stream_options")
