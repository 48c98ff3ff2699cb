"""Input of an agent: a text, or messages in OpenAI's shape, as data sets have them.

It imports no other module, since records.py imports it. Also called by agent/description.py, for an
agent's examples. Read next: messages.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]  # one chat message in OpenAI's shape
#: What an agent is asked: a text, or messages that end with one of the user or of a tool.
Input = str | Sequence[Mapping[str, Any]]
ROLES = ("system", "user", "assistant", "tool")


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
