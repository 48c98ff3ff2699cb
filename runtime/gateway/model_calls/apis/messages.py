"""Anthropic's messages API (POST /v1/messages): messages are lists of content blocks."""

from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import (
    Body,
    SamplingApi,
    assistant,
    content_of,
    tool_call,
)


def _parse_request(request: Body) -> list[Message]:
    given = request.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise BadInput("messages must be a list of at least one object", param="messages")
    instructions = request.get("system")
    blocks = instructions if isinstance(instructions, list) else []
    if not isinstance(instructions, str | list | None) or not all(
        isinstance(block, dict) for block in blocks
    ):
        raise BadInput("system must be a text or a list of blocks", param="system")
    if "max_tokens" in request and type(request["max_tokens"]) is not int:  # no bool, either
        raise BadInput("max_tokens must be a whole number", param="max_tokens")
    system = _system(instructions)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in given:
        messages += _messages(message)
    return messages


def _messages(message: dict[str, Any]) -> list[Message]:
    """Convert one of Anthropic's messages; tool results become messages of their own."""
    content = message.get("content")
    if message.get("role") == "assistant":
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return [_assistant_message([block for block in blocks if isinstance(block, dict)])]
    if message.get("role") == "system":
        content = _system(content)
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results = [b for b in content if isinstance(b, dict) and b.get("type") == "tool_result"]
    rest = [b for b in content if b not in results]
    converted: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": r.get("tool_use_id"),
            "content": _content(r.get("content")),
        }
        for r in results
    ]
    if rest or not converted:  # an empty message stays a message
        converted.append({"role": message.get("role"), "content": _content(rest)})
    return converted


def _assistant_message(blocks: list[dict[str, Any]]) -> Message:
    texts = [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]
    thoughts = [str(b.get("thinking") or "") for b in blocks if b.get("type") == "thinking"]
    calls = [
        tool_call(str(b.get("id")), str(b.get("name")), _arguments(b.get("input")))
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    content = content_of(texts) if texts else None
    return assistant(content, calls, reasoning="".join(thoughts))


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else dump_json(given or {}).decode()


def _content(content: Any) -> Any:
    """Return a list of text blocks as `content_of`; return anything else unchanged."""
    if isinstance(content, list) and all(
        isinstance(block, dict) and block.get("type") == "text" for block in content
    ):
        return content_of([str(block.get("text") or "") for block in content])
    return content


def _system(content: Any) -> Any:
    """Return the text of instructions, whose blocks vLLM joins without a separator."""
    if not isinstance(content, list):
        return content
    return "".join(str(block.get("text") or "") for block in content if isinstance(block, dict))


def _parse_answer(answer: Body) -> list[Message]:
    return [_assistant_message(answer.get("content") or [])]


def _parse_stream(events: list[Body], samples: int) -> list[Message]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        position = event.get("index", 0)
        if event.get("type") == "content_block_start":
            blocks[position] = {**event["content_block"]}
            if blocks[position].get("type") == "tool_use":
                blocks[position]["input"] = ""  # sent in pieces of JSON
        elif event.get("type") == "content_block_delta" and position in blocks:
            delta = event["delta"]
            for name, field in _DELTA_FIELDS.items():
                if name in delta:
                    blocks[position][field] = (blocks[position].get(field) or "") + delta[name]
    return [_assistant_message([block for _, block in sorted(blocks.items())])]


_DELTA_FIELDS = {"text": "text", "thinking": "thinking", "partial_json": "input"}

MESSAGES = SamplingApi(
    path="/v1/messages",
    id_prefix="chatcmpl-",  # vLLM answers through its chat completions
    finish=b"event: message_delta\n",
    last_event=b"event: message_stop\n",
    parse_request=_parse_request,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"messages", "system", "tools"}),
)
