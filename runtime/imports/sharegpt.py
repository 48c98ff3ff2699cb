"""ShareGPT and its relatives: read conversations of {from, value} or {role, content}.

Speakers have several names: human or user, gpt or assistant. Tool calls are turns of their own,
{"name", "arguments"} as JSON; they get ids here, for the format has none. A call right after the
assistant's text joins its message. `system` and `tools` may stand beside the conversation, the
tools as a JSON string. Other fields become the task's metadata. Which of the model's turns are
trained on is said by `weight`, `train` or `loss` (0 or 1), or by `mask` (1: not trained on). A
field of a turn that has no place here, and images, are errors. Listed in import_file.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import parse_json
from cray_agents.records import Event, Message
from cray_agents.runtime.fine_tuning.examples import parse_example
from cray_agents.runtime.imports.imported_run import Importing, conversation_events, require_object

TURNS = ("conversations", "conversation", "messages")
ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "call", "tool_call": "call",
    "observation": "tool", "tool": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
_BESIDE = ("system", "tools", *TURNS)
_FLAGS = ("weight", "train", "loss", "mask")
_KNOWN = {"from", "role", "value", "content", "name", "tool_calls", "tool_call_id", *_FLAGS}
_MEDIA = ("images", "image", "videos", "audios")


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a conversation. Raises BadInput."""
    record = require_object(value)
    key = next((name for name in TURNS if name in record), None)
    if key is None or not isinstance(record[key], list):
        raise BadInput(f"no list of turns: one of {', '.join(TURNS)}")
    if media := next((name for name in _MEDIA if record.get(name)), None):
        raise BadInput(f"{media} cannot be imported: only text can be trained on")
    messages = _messages(record[key], key)
    system = record.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(record.get("tools"))
    answered = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if answered < 0:
        raise BadInput(f"{key} has no turn of the assistant")
    parse_example(0, {"messages": messages[: answered + 1], "tools": tools})
    more = {name: item for name, item in record.items() if name not in _BESIDE}
    yield conversation_events("sharegpt", messages, importing, tools=tools, metadata=more)


def _messages(turns: list[Any], key: str) -> list[Message]:
    messages: list[Message] = []
    waiting: list[str] = []  # ids of calls without a result so far
    calls = 0
    for index, item in enumerate(turns):
        path = f"{key}[{index}]"
        turn = require_object(item, path)
        role = _role(turn, path)
        more = _more(turn, role, path)
        if role in ("call", "assistant") and (role == "call" or turn.get("tool_calls")):
            new_calls = _calls(turn, role, path, calls)
            calls += len(new_calls)
            waiting += [call["id"] for call in new_calls]
            text = _text(turn, path) if role == "assistant" else None
            _add_calls(messages, new_calls, text, more, path)
        elif role == "tool":
            messages.append(_result(turn, waiting, path) | more)
        else:
            messages.append({"role": role, "content": _text(turn, path)} | more)
    return messages


def _more(turn: dict[str, Any], role: str, path: str) -> Message:
    """Return what a turn's message has beside its content: its name and its weight."""
    empty: tuple[Any, ...] = (None, "", [], {})
    unknown = next((name for name in turn if name not in _KNOWN and turn[name] not in empty), None)
    if unknown is not None:
        raise BadInput(f"{path} has a field {unknown!r} that is not supported")
    flags = {name: turn[name] for name in _FLAGS if turn.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise BadInput(f"{path}.{name} must be 0 or 1, not {value!r}")
    trained = {bool(value) != (name == "mask") for name, value in flags.items()}
    if len(trained) > 1:
        raise BadInput(f"{path} is to be trained on and not to be, by its {' and '.join(flags)}")
    if trained == {True} and role not in ("assistant", "call"):
        raise BadInput(f"{path}.{next(iter(flags))}: only the assistant's turns are trained on")
    more: Message = {"name": turn["name"]} if turn.get("name") and role != "call" else {}
    if trained and role in ("assistant", "call"):
        more["weight"] = int(trained == {True})
    return more


def _role(turn: dict[str, Any], path: str) -> str:
    name = turn.get("from", turn.get("role"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadInput(f"{path}: who says it, {name!r}, is none of {', '.join(ROLES)}")
    return role


def _text(turn: dict[str, Any], path: str) -> str:
    text = turn.get("value", turn.get("content"))
    if text is None and turn.get("tool_calls"):
        return ""
    if not isinstance(text, str):
        raise BadInput(f"{path}: its value must be a text, not {type(text).__name__}")
    return text


def _add_calls(
    messages: list[Message], calls: list[dict[str, Any]], text: str | None, more: Message, path: str
) -> None:
    """Add tool calls, to the assistant's message right before them if there is one."""
    if text is None and messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        if (last.get("weight") == 0) != (more.get("weight") == 0):
            raise BadInput(f"{path} joins the turn before it, and one of the two is not trained on")
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    else:
        message = {"role": "assistant", "content": text or None, "tool_calls": calls}
        messages.append(message | more)


def _calls(turn: dict[str, Any], role: str, path: str, count: int) -> list[dict[str, Any]]:
    """Return a turn's tool calls in OpenAI's shape, numbered from `count` on."""
    turn_value = turn.get("value", turn.get("content"))
    value = turn["tool_calls"] if role == "assistant" else turn_value
    if isinstance(value, str):
        value = _json(value, path)
    calls = value if isinstance(value, list) else [value]
    converted = []
    for number, call in enumerate(calls, count):
        each = require_object(call, f"{path}: a call")
        function = require_object(each.get("function", each), f"{path}: a call")
        arguments = function.get("arguments", function.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        named = {"name": function.get("name"), "arguments": arguments}
        call_id = each.get("id")
        call_id = call_id if isinstance(call_id, str) and call_id else f"call_{number}"
        converted.append({"id": call_id, "type": "function", "function": named})
    return converted


def _result(turn: dict[str, Any], waiting: list[str], path: str) -> Message:
    """Return a result, of the call that the turn names or of the first one still waiting."""
    named = turn.get("tool_call_id")
    if named not in waiting:
        if not waiting or isinstance(named, str):
            raise BadInput(f"{path} answers no call of a tool")
        named = waiting[0]
    waiting.remove(named)
    return {"role": "tool", "tool_call_id": named, "content": _text(turn, path)}


def _json(text: str, path: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadInput(f"{path}: {text[:80]!r} is no JSON: {error}") from error


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's shape."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else []
    if value is None:
        return []
    tools = [
        require_object(tool, "a tool") for tool in (value if isinstance(value, list) else [value])
    ]
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
