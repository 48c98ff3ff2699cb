"""Open Responses: the members that its specification requires and vLLM leaves out of an answer.

The specification (openresponses.org) writes down OpenAI's responses API: a response has all of its
members, and an optional one is absent rather than null. Called by ../answer.py for /v1/responses.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cray_agents.exact_json import dump_json, load_json
from cray_agents.runtime.disk.turns import off_loop
from cray_agents.runtime.gateway.model_calls.apis import Body
from cray_agents.runtime.pool.vllm_http import well_formed

# the events that carry a response, an item or a content part; the others are whole as they come
_CHANGED = tuple(
    f"event: response.{name}\n".encode()
    for name in (
        "created", "in_progress", "completed", "incomplete", "failed",
        "output_item.added", "output_item.done", "content_part.added", "content_part.done",
    )
)  # fmt: skip


async def complete_answer(
    pieces: AsyncGenerator[bytes, None], request: Body
) -> AsyncGenerator[bytes, None]:
    """Yield an engine's answer to a request with the missing members.

    `pieces`: whole events of a stream, else parts of one JSON object.
    """
    async with aclosing(pieces):
        if not request.get("stream"):
            content = b"".join([piece async for piece in pieces])
            yield await off_loop(len(content), _complete_whole, content, request)
            return
        async for piece in pieces:
            yield await off_loop(len(piece), _complete_events, piece, request)


def _complete_whole(content: bytes, request: Body) -> bytes:
    with well_formed("the replica"):
        return dump_json(_complete_response(load_json(content), request))


def _complete_events(piece: bytes, request: Body) -> bytes:
    events = piece.split(b"\n\n")
    for number, event in enumerate(events):
        if not event.startswith(_CHANGED):
            continue
        head, _, content = event.partition(b"\ndata: ")
        with well_formed("the replica"):
            data = load_json(content)
            if "response" in data:
                _complete_response(data["response"], request)
            _complete_item(data.get("item") or {})
            _complete_part(data.get("part") or {})
        events[number] = head + b"\ndata: " + dump_json(data)
    return b"\n\n".join(events)


def _complete_response(response: Body, request: Body) -> Body:
    finished = response.get("status") == "completed"
    response["completed_at"] = int(time.time()) if finished else None
    response.setdefault("error", None)
    response["store"] = False  # none can be retrieved later
    response["text"] = response.get("text") or {"format": {"type": "text"}}
    response["top_logprobs"] = response.get("top_logprobs") or 0
    for name in ("safety_identifier", "prompt_cache_key"):
        response[name] = request.get(name)
    for item in response.get("output") or []:
        _complete_item(item)
    return response


def _complete_item(item: dict[str, Any]) -> None:
    if item.get("phase", "") is None:
        del item["phase"]
    if item.get("type") == "function_call":
        item["status"] = item.get("status") or "completed"
    for part in item.get("content") or []:
        _complete_part(part)


def _complete_part(part: dict[str, Any]) -> None:
    if part.get("type") == "output_text" and part.get("logprobs") is None:
        part["logprobs"] = []
