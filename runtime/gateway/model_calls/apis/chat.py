"""POST /v1/chat/completions."""

from typing import Any

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant


def _asked(request: Body) -> list[Message]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list with at least one message", param="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise BadInput("messages must be a list of objects", param="messages")
    return messages


def _said(answer: Body) -> list[Message]:
    return [_message(choice["message"]) for choice in answer["choices"]]


def _message(message: dict[str, Any]) -> Message:
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
    return assistant(message.get("content"), message.get("tool_calls") or [], **rest)


def _streamed(chunks: list[Body], samples: int) -> list[Message]:
    """Texts grow, tool calls grow by their index. A choice may have said nothing yet."""
    choices: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            place = choice.get("index", 0)
            message = choices.setdefault(place, {})
            for name, value in (choice.get("delta") or {}).items():
                if name == "tool_calls":
                    for part in value or ():
                        kept = calls.setdefault(place, {}).setdefault(part.get("index", 0), {})
                        _grow(kept, part)
                elif isinstance(value, str) and name != "role":
                    message[name] = message.get(name, "") + value
                elif value is not None:
                    message[name] = value
    return [
        _message(
            choices.get(place, {})
            | {"tool_calls": [c for _, c in sorted(calls.get(place, {}).items())]}
        )
        for place in range(samples)
    ]


def _grow(call: dict[str, Any], part: dict[str, Any]) -> None:
    function = call.setdefault("function", {"name": "", "arguments": ""})
    for name, value in (part.get("function") or {}).items():
        function[name] = function.get(name, "") + (value or "")
    call["id"] = part.get("id") or call.get("id", "")
    call["type"] = part.get("type") or call.get("type", "function")


CHAT = SamplingApi(
    path="/v1/chat/completions",
    prefix="chatcmpl-",
    last=b"data: [DONE]\n\n",
    asked=_asked,
    said=_said,
    streamed=_streamed,
    content=frozenset({"messages", "tools"}),
)
