"""POST /v1/messages: Anthropic's API, whose messages are lists of content blocks."""

from typing import Any

import orjson

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant, tool_call


def _asked(request: Body) -> list[Message]:
    given = request.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise BadInput("messages must be a list of at least one object", param="messages")
    system = _text(request.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in given:
        messages += _messages(message)
    return messages


def _messages(message: dict[str, Any]) -> list[Message]:
    """One of Anthropic's messages as ours; results of tools stand in a user's message there."""
    content = message.get("content")
    if message.get("role") == "assistant":
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return [_turn([block for block in blocks if isinstance(block, dict)])]
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results = [b for b in content if isinstance(b, dict) and b.get("type") == "tool_result"]
    rest = [b for b in content if b not in results]
    told: list[Message] = [
        {"role": "tool", "tool_call_id": r.get("tool_use_id"), "content": _text(r.get("content"))}
        for r in results
    ]
    if rest or not told:  # also who says nothing has said it
        told.append({"role": message.get("role"), "content": _text(rest)})
    return told


def _turn(blocks: list[dict[str, Any]]) -> Message:
    texts = [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]
    thoughts = [str(b.get("thinking") or "") for b in blocks if b.get("type") == "thinking"]
    calls = [
        tool_call(str(b.get("id")), str(b.get("name")), _arguments(b.get("input")))
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    return assistant("".join(texts) if texts else None, calls, reasoning="".join(thoughts))


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else orjson.dumps(given or {}).decode()


def _text(content: Any) -> Any:
    """The text of a list of text blocks; anything else stays as it is."""
    if isinstance(content, list) and all(
        isinstance(block, dict) and block.get("type") == "text" for block in content
    ):
        return "".join(str(block.get("text") or "") for block in content)
    return content


def _said(answer: Body) -> list[Message]:
    return [_turn(answer.get("content") or [])]


def _streamed(events: list[Body], samples: int) -> list[Message]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        place = event.get("index", 0)
        if event.get("type") == "content_block_start":
            blocks[place] = {**event["content_block"]}
            if blocks[place].get("type") == "tool_use":
                blocks[place]["input"] = ""  # comes as pieces of JSON
        elif event.get("type") == "content_block_delta" and place in blocks:
            delta = event["delta"]
            for name, field in _GROWS.items():
                if name in delta:
                    blocks[place][field] = (blocks[place].get(field) or "") + delta[name]
    return [_turn([block for _, block in sorted(blocks.items())])]


_GROWS = {"text": "text", "thinking": "thinking", "partial_json": "input"}

MESSAGES = SamplingApi(
    path="/v1/messages",
    prefix="chatcmpl-",  # vLLM answers through its chat completions
    last=b"event: message_stop\n",
    asked=_asked,
    said=_said,
    streamed=_streamed,
    content=frozenset({"messages", "system", "tools"}),
)
