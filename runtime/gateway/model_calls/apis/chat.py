"""OpenAI's chat completions, and its older completions of texts (POST /v1/completions)."""

from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import sendable
from cray_agents.records import Message
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi, assistant


def _parse_request(request: Body) -> list[Message]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list with at least one message", param="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise BadInput("messages must be a list of objects", param="messages")
    sent = request["messages"] = [sendable(message) for message in messages]
    return sent


def _parse_answer(answer: Body) -> list[Message]:
    choices = answer["choices"]
    return [_message(choice.get("message") or {"content": choice["text"]}) for choice in choices]


def _message(message: dict[str, Any]) -> Message:
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
    return assistant(message.get("content"), message.get("tool_calls") or [], **rest)


def _parse_stream(chunks: list[Body], samples: int) -> list[Message]:
    """Join the deltas of each choice, or its texts; tool calls are joined by their index.

    A choice without any gets an empty message.
    """
    choices: dict[int, dict[str, Any]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            position = choice.get("index", 0)
            message = choices.setdefault(position, {})
            delta = {"content": choice["text"]} if "text" in choice else choice.get("delta") or {}
            for name, value in delta.items():
                if name == "tool_calls":
                    for piece in value or ():
                        call = calls.setdefault(position, {}).setdefault(piece.get("index", 0), {})
                        _extend_call(call, piece)
                elif isinstance(value, str) and name != "role":
                    message[name] = message.get(name, "") + value
                elif value is not None:
                    message[name] = value
    return [
        _message(
            choices.get(position, {})
            | {"tool_calls": [c for _, c in sorted(calls.get(position, {}).items())]}
        )
        for position in range(samples)
    ]


def _extend_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    function = call.setdefault("function", {"name": "", "arguments": ""})
    for name, value in (piece.get("function") or {}).items():
        function[name] = function.get(name, "") + (value or "")
    call["id"] = piece.get("id") or call.get("id", "")
    call["type"] = piece.get("type") or call.get("type", "function")


CHAT = SamplingApi(
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    finish=b'"finish_reason":"',
    last_event=b"data: [DONE]\n\n",
    parse_request=_parse_request,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"messages", "tools"}),
)


def _parse_prompt(request: Body) -> list[Message]:
    """Return the prompts as they came: texts, or lists of token ids."""
    prompt = request.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise BadInput("prompt must be a text, token ids, or a list of these", param="prompt")
    return [{"role": "user", "content": prompt}]


COMPLETIONS = SamplingApi(
    path="/v1/completions",
    id_prefix="cmpl-",
    finish=b'"finish_reason":"',
    last_event=b"data: [DONE]\n\n",
    parse_request=_parse_prompt,
    parse_answer=_parse_answer,
    parse_stream=_parse_stream,
    conversation_fields=frozenset({"prompt"}),
)
