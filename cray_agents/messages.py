"""Messages: read the text, reasoning and tool calls of messages in OpenAI's shape.

Clients may send anything: what has another shape counts as absent. Used by the store, exports,
imports, datasets and views.
"""

from collections.abc import Iterable
from typing import Any

from cray_agents.exact_json import dump_json
from cray_agents.records import Message

FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
)
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def text_of(message: Message) -> str:
    """Return the text of a message; texts in several parts are lines, as vLLM joins them."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return text_or_json(content)


def text_or_json(value: Any) -> str:
    """Return a text as it is, another value as JSON, and "" for an empty one."""
    if isinstance(value, str):
        return value
    return dump_json(value).decode() if value else ""


def asked_text(given: str | Iterable[Message]) -> str:
    """Return all that tells an input from others, as one text.

    A list of one message of the user is its text. A system message does not count: it is for the
    agent, and many inputs share it.
    """
    if isinstance(given, str):
        return given
    said = [message for message in given if message.get("role") != "system"]
    if [message.get("role") for message in said] == ["user"]:
        return _whole(said[0])
    return "\n".join(f"{message.get('role')}: {_whole(message)}" for message in said)


def _whole(message: Message) -> str:
    """Return a message's text, and its other parts and tool calls as JSON."""
    others = [part for part in with_parts(message.get("content")) if part_text(part) is None]
    others += [call.get("function") for call in tool_calls_of(message)]
    return "\n".join(filter(None, [text_of(message), *map(text_or_json, others)]))


def first_question(messages: Iterable[Message]) -> str:
    """Return the text of the user's first message, or ""."""
    return next((text_of(message) for message in messages if message.get("role") == "user"), "")


def reasoning_of(message: Message) -> Any:
    """Return a model's reasoning before its answer; None without any."""
    return message.get("reasoning") or message.get("reasoning_content") or None


def tool_calls_of(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message that are objects."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def part_text(part: Any) -> str | None:
    """Return the text of a part of a content; None for an image and the like."""
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def with_parts(content: Any) -> list[Any]:
    """Return a content as a list of parts; a text is one of them."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def other_fields(message: Message, *more: str) -> dict[str, Any]:
    """Return the fields with a value that are neither FIELDS nor these."""
    known = FIELDS.union(more)
    return {k: v for k, v in message.items() if k not in known and v not in _EMPTY}


def function_of(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tool's {"name", "description", "parameters", ...}, or None if it is no function.

    Chat completions nest it under `function`, Responses list it flat, and Anthropic call its
    parameters `input_schema`.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        if tool.get("type") not in (None, "function") and "input_schema" not in tool:
            return None
        schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
        excluded = ("type", "function", "input_schema")
        function = {k: v for k, v in tool.items() if k not in excluded} | schema
    fields = {name: value for name, value in function.items() if value is not None}
    parameters = fields.get("parameters", {})
    if not isinstance(fields.get("name"), str) or not isinstance(parameters, dict):
        return None
    return fields
