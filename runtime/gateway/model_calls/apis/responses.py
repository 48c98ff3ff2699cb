"""OpenAI's responses API (POST /v1/responses): a conversation is a list of items."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json, load_json, read_arguments, sent_arguments
from cray_agents.records import Message
from cray_agents.runtime.disk.turns import off_loop
from cray_agents.runtime.gateway.model_calls.apis import (
    Body,
    SamplingApi,
    assistant,
    content_of,
    tool_call,
)
from cray_agents.runtime.pool.vllm_http import well_formed


def _parse_request(request: Body) -> list[Message]:
    if request.get("previous_response_id") is not None:
        raise BadInput(
            "no earlier response is kept here: send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if request.get("background"):
        raise BadInput("nothing is answered in the background: leave it out", param="background")
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(i, dict) for i in items):
        raise BadInput("input must be a text or a list of items", param="input")
    for number, item in enumerate(items):
        content = item["content"] if isinstance(item.get("content"), list) else []
        if any(isinstance(part, dict) and part.get("type") == "refusal" for part in content):
            message = "a refusal cannot be read: send its text as output_text, or leave it out"
            raise BadInput(f"input[{number}]: {message}", param="input")
    system = request.get("instructions")
    if not isinstance(system, str | None):
        raise BadInput("instructions must be a text", param="instructions")
    first = [{"role": "system", "content": system}] if isinstance(system, str) else []
    return first + _messages(items)


def _messages(items: list[Any]) -> list[Message]:
    """Convert items to messages; neighbouring items of the model become one, as in vLLM.

    Malformed arguments are replaced in the items, too: see `sendable`.
    """
    messages: list[Message] = []
    pending: list[Any] = []
    kinds: set[Any] = set()  # of the pending items: a message has one text and one thought
    for item in items:
        kind = "answer" if item.get("role") == "assistant" else item.get("type")
        own = kind in ("function_call", "reasoning", "answer")
        if pending and (not own or kind in kinds - {"function_call"}):
            messages.append(_assistant_message(pending))
            pending, kinds = [], set()
        if kind == "function_call" and read_arguments(item.get("arguments")) is None:
            item["arguments"] = json.dumps(sent_arguments(item.get("arguments")))
        if own:
            pending.append(item)
            kinds.add(kind)
        elif kind == "function_call_output":
            call_id, output = item.get("call_id"), _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            content = _content(item.get("content"))
            messages.append({"role": item.get("role", "user"), "content": content})
    return [*messages, _assistant_message(pending)] if pending else messages


def _assistant_message(items: list[Any]) -> Message:
    texts, calls, thoughts = [], [], []
    for item in items:
        if item.get("type") == "function_call":
            call_id = str(item.get("call_id") or item.get("id") or "")
            name, arguments = str(item.get("name") or ""), str(item.get("arguments") or "")
            calls.append(tool_call(call_id, name, arguments))
        elif item.get("type") == "reasoning":
            thoughts += _texts(item.get("content"))
        else:
            texts += _texts(item.get("content"))
    content = content_of(texts) if texts else None
    return assistant(content, calls, reasoning="".join(thoughts))


def _content(content: Any) -> Any:
    """Return a list of text parts as `content_of`; return anything else unchanged."""
    if isinstance(content, list) and all(isinstance(p, dict) and "text" in p for p in content):
        return content_of(_texts(content))
    return content


def _texts(content: Any) -> list[str]:
    """Return the texts of a content: of its parts, or the content itself."""
    if not isinstance(content, list):
        return [str(content or "")]
    return [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]


def _parse_answer(answer: Body) -> list[Message]:
    return [_assistant_message(answer.get("output") or [])]


def _parse_stream(events: list[Body], samples: int) -> list[Message]:
    """Read the last event, which holds the whole answer; if cut off, what came of its items."""
    for event in reversed(events):
        if "response" in event and event["response"].get("output"):
            return _parse_answer(event["response"])
    items, text = [], ""
    for event in events:
        if event.get("type") == "response.output_item.done":
            items.append(event["item"])
            text = ""
        elif event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return [_assistant_message([*items, {"content": text}] if text else items)]


RESPONSES = SamplingApi(
    path="/v1/responses",
    id_prefix="resp_",
    finish=b"event: response.completed\n",
    last_event=b"event: response.completed\n",
    parse_request=_parse_request,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"input", "instructions", "tools"}),
)


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
