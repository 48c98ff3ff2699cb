"""Messages in OpenAI's shape: an agent's input, and the text, reasoning and tool calls of any.

What an agent is asked is checked, message by message. Clients of the gateway may send anything:
what has another shape counts as absent. Used by records.py, the store, exports, imports, datasets
and views.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cray_agents.exact_json import dump_json

Message = dict[str, Any]  # one chat message in OpenAI's shape
#: What an agent is asked: a text, or messages that end with one of the user or of a tool.
Input = str | Sequence[Mapping[str, Any]]
ROLES = ("system", "user", "assistant", "tool")

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


# ---- the input of an agent, and its examples


def read_input(given: Any) -> str | list[Message]:
    """Return an input as it is sent and recorded; see read_messages. Raises ValueError."""
    if isinstance(given, str):
        return given
    messages = read_messages(given)
    if (last := messages[-1]["role"]) not in ("user", "tool"):
        raise ValueError(f"it ends with a message of role {last!r}: end with user or tool")
    return messages


def read_messages(given: Any) -> list[Message]:
    """Return messages as they are sent. Raises ValueError, naming the message and the rule.

    Nulls are left out: tables have them for other rows. Tool calls get what servers want and
    data sets lack: ids, and arguments that are texts.
    """
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(f"it is of type {type(given).__name__}: give a text or a list of messages")
    if not given:
        raise ValueError("it is an empty list: give at least one message")
    try:
        plain = json.loads(json.dumps(given, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it has what JSON cannot hold: {error}") from None
    unanswered: list[str] = []  # ids of the tool calls that have no result so far
    messages = []
    for place, one in enumerate(plain):
        try:
            messages.append(_read_message(one, place, unanswered))
        except ValueError as error:
            raise ValueError(f"message {place} {error}") from None
    return messages


def _read_message(given: Any, place: int, unanswered: list[str]) -> Message:
    if not isinstance(given, dict):
        raise ValueError(f"is {given!r:.80}: it must be an object with role and content")
    message = {name: value for name, value in given.items() if value not in (None, [])}
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if role not in ROLES:
        raise ValueError(f"has the role {role!r}: it must be one of {', '.join(ROLES)}")
    if role == "system" and place:
        raise ValueError("is of the system: only the first may be")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError("has tool_calls: they must be a list, in a message of the assistant")
        message["tool_calls"] = [_read_call(c, f"call_{place}_{n}") for n, c in enumerate(calls)]
        unanswered[:] = [call["id"] for call in message["tool_calls"]]
        content = message.setdefault("content", "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(map(_is_part, parts)):
        raise ValueError(f"has the content {content!r:.80}: it must be a text, or a list of parts"
                         ' with their type, as in {"type": "text", "text": "Hello"}')  # fmt: skip
    if role == "system" and any(part["type"] != "text" for part in parts):
        raise ValueError("is of the system: its content must be text")
    if role == "tool":
        call_id = message.setdefault("tool_call_id", unanswered[0] if unanswered else None)
        if call_id not in unanswered:
            raise ValueError(f"is the result of a tool call {call_id!r} that is not before it")
        unanswered.remove(call_id)
    return message


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and (kind != "text" or isinstance(part.get("text"), str))


def _read_call(given: Any, default_id: str) -> dict[str, Any]:
    call = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"has the tool call {given!r:.80}: it must have a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, dict):
        set_ones = {name: value for name, value in arguments.items() if value is not None}
        arguments = json.dumps(set_ones, ensure_ascii=False)
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError):
        is_object = False
    if not is_object:
        raise ValueError(f"has the arguments {arguments!r:.80}: they must be a JSON object")
    shape = {"id": default_id, "type": "function"}
    return {**shape, **call, "function": {**function, "arguments": arguments}}


def text_of_input(given: str | Sequence[Message]) -> str:
    """Return the text that stands for an input: itself, or that of its user's last message."""
    if isinstance(given, str):
        return given
    content = ([one for one in given if one["role"] == "user"] or given)[-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
