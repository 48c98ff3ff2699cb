"""Chat messages and tools in the shapes of OpenTelemetry's GenAI conventions.

gen_ai.input.messages is a list of {role, parts, name?}; gen_ai.output.messages adds finish_reason.
A part is text, reasoning, tool_call, tool_call_response, uri or blob; other parts keep their own
type. Called by otel.py.
"""

from contextlib import suppress
from typing import Any

import orjson

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat_messages import function_of
from cray_agents.runtime.exports.conversation import Conversation, check_calls
from cray_agents.runtime.exports.export_format import Json, json_text

_REASONS = {"tool_calls": "tool_call", "function_call": "tool_call", "cancelled": "error"}
_CARRIED = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
)  # fmt: skip


class MessageCache:
    """Cached JSON of a conversation's messages and tools, since most of its calls repeat them."""

    def __init__(self, run: Run, conversation: Conversation) -> None:
        self._run, self._conversation = run, conversation
        self._messages = [self._text(message_of(message)) for message in conversation.messages]
        self._tools = self._text(tools_of(conversation.tools))

    def messages(self, messages: list[Message]) -> str | None:
        """Return the JSON of messages, None for none; the conversation's beginning is cached."""
        if not messages:
            return None
        if messages == self._conversation.messages[: len(messages)]:
            return f"[{','.join(self._messages[: len(messages)])}]"
        check_calls(self._run, messages)
        return self._text([message_of(message) for message in messages])

    def tools(self, tools: list[Json]) -> str | None:
        """Return the JSON of tool definitions, None for none."""
        if not tools:
            return None
        if tools == self._conversation.tools:
            return self._tools
        return self._text(tools_of(tools))

    def _text(self, value: Any) -> str:
        return json_text(self._run, "messages", value)


def message_of(message: Message) -> Json:
    """Return a message in the conventions' shape; unknown fields stay as they are."""
    record: Json = {"role": str(message.get("role") or "user"), "parts": _content_parts(message)}
    if isinstance(message.get("name"), str):
        record["name"] = message["name"]
    record |= {name: value for name, value in message.items() if name not in _CARRIED and value}
    return record


def answer_of(message: Message, finish_reason: str | None) -> Json:
    """Return a model's answer with its finish reason."""
    reason = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    return message_of(message) | {"finish_reason": _REASONS.get(reason, reason)}


def tools_of(tools: list[Json]) -> list[Json]:
    """Return tool definitions; a tool that is no function keeps its own fields."""
    listed = []
    for tool in tools:
        function = function_of(tool)
        if function is not None:
            listed.append({"type": "function", **function})
        else:
            kind = str(tool.get("type") or "unknown")
            listed.append({**tool, "type": kind, "name": str(tool.get("name") or kind)})
    return listed


def _content_parts(message: Message) -> list[Json]:
    content = message.get("content")
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        return [{"type": "tool_call_response", "id": call_id, "response": content}]
    converted: list[Json] = []
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        converted.append({"type": "reasoning", "content": str(thought)})
    if isinstance(content, str):
        if content:
            converted.append({"type": "text", "content": content})
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        converted += [_part(part) for part in content]
    elif content is not None:  # a prompt of token ids, or several
        converted.append({"type": "prompt", "content": content})
    converted += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return converted


def _part(part: Json) -> Json:
    """Return one of OpenAI's content parts in the conventions' shape; unknown fields stay."""
    replaced, fields = _convert_part(part)
    return {**{name: value for name, value in part.items() if name not in replaced}, **fields}


def _convert_part(part: Json) -> tuple[set[str], Json]:
    """Return the names of the part's fields to replace, and the fields that replace them."""
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
        with suppress(orjson.JSONDecodeError):  # else the text stays as the model wrote it
            arguments = orjson.loads(arguments)
    name = str(function.get("name") or "")
    return {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}
