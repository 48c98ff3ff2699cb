"""Chat messages and tools in the shapes that OpenTelemetry's GenAI conventions give them.

gen_ai.input.messages is a list of {role, parts, name?}, gen_ai.output.messages also has a
finish_reason; parts are text, reasoning, tool_call, tool_call_response, uri, blob, or of a kind of
their own. Called by otel.py.
"""

from contextlib import suppress
from typing import Any

import orjson

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat_messages import function_of
from cray_agents.runtime.exports.conversation import Conversation, check_calls
from cray_agents.runtime.exports.export_format import Json, json_text

_REASONS = {"tool_calls": "tool_call", "function_call": "tool_call", "cancelled": "error"}
_TOLD = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


class MessageCache:
    """A conversation's messages and tools as JSON, made once: most of its calls repeat them."""

    def __init__(self, run: Run, told: Conversation) -> None:
        self._run, self._told = run, told
        self._messages = [self._text(message_of(message)) for message in told.messages]
        self._tools = self._text(tools_of(told.tools))

    def messages(self, messages: list[Message]) -> str | None:
        """The JSON of messages, such as the beginning of the conversation; None for none."""
        if not messages:
            return None
        if messages == self._told.messages[: len(messages)]:
            return f"[{','.join(self._messages[: len(messages)])}]"
        check_calls(self._run, messages)
        return self._text([message_of(message) for message in messages])

    def tools(self, tools: list[Json]) -> str | None:
        """The JSON of tool definitions; None for none."""
        if not tools:
            return None
        return self._tools if tools == self._told.tools else self._text(tools_of(tools))

    def _text(self, value: Any) -> str:
        return json_text(self._run, "messages", value)


def message_of(message: Message) -> Json:
    """A message as the conventions have it; a field they do not know stays as it is."""
    told: Json = {"role": str(message.get("role") or "user"), "parts": _parts(message)}
    if isinstance(message.get("name"), str):
        told["name"] = message["name"]
    told |= {name: value for name, value in message.items() if name not in _TOLD and value}
    return told


def answer_of(message: Message, finish_reason: str | None) -> Json:
    """The message a model said, with why it stopped."""
    reason = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    return message_of(message) | {"finish_reason": _REASONS.get(reason, reason)}


def tools_of(tools: list[Json]) -> list[Json]:
    """Tool definitions; what is no function keeps its own fields."""
    listed = []
    for tool in tools:
        function = function_of(tool)
        if function is not None:
            listed.append({"type": "function", **function})
        else:
            kind = str(tool.get("type") or "unknown")
            listed.append({**tool, "type": kind, "name": str(tool.get("name") or kind)})
    return listed


def _parts(message: Message) -> list[Json]:
    content = message.get("content")
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        return [{"type": "tool_call_response", "id": call_id, "response": content}]
    parts: list[Json] = []
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": str(thought)})
    if isinstance(content, str):
        if content:
            parts.append({"type": "text", "content": content})
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts += [_part(part) for part in content]
    elif content is not None:  # a prompt of token ids, or several
        parts.append({"type": "prompt", "content": content})
    parts += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return parts


def _part(part: Json) -> Json:
    """One of OpenAI's content parts; fields that the conventions do not know stay."""
    known, told = _known(part)
    return {**{name: value for name, value in part.items() if name not in known}, **told}


def _known(part: Json) -> tuple[set[str], Json]:
    """The fields of a part that are told another way, and how."""
    if isinstance(part.get("text"), str):
        return {"text"}, {"type": "text", "content": part["text"]}
    image, audio = part.get("image_url"), part.get("input_audio")
    details = image if isinstance(image, dict) else {"url": image}
    if isinstance(url := details.get("url"), str):
        more = {name: value for name, value in details.items() if name != "url"}
        if url.startswith("data:") and ";base64," in url:
            kind, _, data = url.removeprefix("data:").partition(";base64,")
            blob = {"type": "blob", "modality": "image", "mime_type": kind, "content": data}
            return {"image_url"}, more | blob
        return {"image_url"}, more | {"type": "uri", "modality": "image", "uri": url}
    if isinstance(audio, dict) and isinstance(audio.get("data"), str):
        kind = f"audio/{audio.get('format')}"
        blob = {"type": "blob", "modality": "audio", "mime_type": kind, "content": audio["data"]}
        return {"input_audio"}, blob
    return set(), {"type": str(part.get("type") or "unknown")}


def _tool_call(call: Json) -> Json:
    function = call.get("function") or call.get("custom") or {}
    arguments: Any = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):  # then it stays as the model wrote it
            arguments = orjson.loads(arguments)
    name = str(function.get("name") or "")
    return {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}
