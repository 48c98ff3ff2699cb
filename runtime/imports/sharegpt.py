"""ShareGPT and its many relatives: conversations of {from, value}, or of {role, content}.

Who speaks may be called human or user, gpt or assistant; calls of tools are turns of their own,
{"name", "arguments"} as JSON, and get ids here, for the format has none. A call right after the
assistant's text is one message with it. `system` and `tools` may stand beside the conversation, the
tools as JSON in a string; other fields become the task's metadata. Listed in importing.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.records import Event, Message
from cray_agents.runtime.fine_tuning.examples import example_of
from cray_agents.runtime.imports.imported_run import Importing, an_object, said

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


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """The run of a conversation. Raises BadInput."""
    record = an_object(value)
    key = next((name for name in TURNS if name in record), None)
    if key is None or not isinstance(record[key], list):
        raise BadInput(f"no list of turns: one of {', '.join(TURNS)}")
    messages = _messages(record[key], key)
    system = record.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(record.get("tools"))
    answered = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if answered < 0:
        raise BadInput(f"{key} has no turn of the assistant")
    example_of(0, {"messages": messages[: answered + 1], "tools": tools})
    more = {name: item for name, item in record.items() if name not in _BESIDE}
    yield said("sharegpt", messages, importing, tools=tools, metadata=more)


def _messages(turns: list[Any], key: str) -> list[Message]:
    messages: list[Message] = []
    waiting: list[str] = []  # ids of calls that no result was told of yet
    calls = 0
    for place, given in enumerate(turns):
        where = f"{key}[{place}]"
        turn = an_object(given, where)
        role = _role(turn, where)
        if role in ("call", "assistant") and (role == "call" or turn.get("tool_calls")):
            asked = _calls(turn, role, where, calls)
            calls += len(asked)
            waiting += [call["id"] for call in asked]
            _ask(messages, asked, _text(turn, where) if role == "assistant" else None)
        elif role == "tool":
            messages.append(_result(turn, waiting, where))
        else:
            message: Message = {"role": role, "content": _text(turn, where)}
            if turn.get("weight") is not None:
                message["weight"] = turn["weight"]
            messages.append(message)
    return messages


def _role(turn: dict[str, Any], where: str) -> str:
    name = turn.get("from", turn.get("role"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadInput(f"{where}: who says it, {name!r}, is none of {', '.join(ROLES)}")
    return role


def _text(turn: dict[str, Any], where: str) -> str:
    text = turn.get("value", turn.get("content"))
    if text is None and turn.get("tool_calls"):
        return ""
    if not isinstance(text, str):
        raise BadInput(f"{where}: its value must be a text, not {type(text).__name__}")
    return text


def _ask(messages: list[Message], asked: list[dict[str, Any]], text: str | None) -> None:
    """Add calls of tools: to the assistant's message that stands right before, if one does."""
    if text is None and messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        last["tool_calls"] = [*last.get("tool_calls", ()), *asked]
    else:
        messages.append({"role": "assistant", "content": text or None, "tool_calls": asked})


def _calls(turn: dict[str, Any], role: str, where: str, count: int) -> list[dict[str, Any]]:
    """What a turn calls, as OpenAI has it; `count` calls have ids before them."""
    if role == "assistant":
        given = turn["tool_calls"]
        given = _json(given, where) if isinstance(given, str) else given
    else:
        value = turn.get("value", turn.get("content"))
        given = _json(value, where) if isinstance(value, str) else value
    calls = given if isinstance(given, list) else [given]
    asked = []
    for number, call in enumerate(calls, count):
        each = an_object(call, f"{where}: a call")
        function = an_object(each.get("function", each), f"{where}: a call")
        arguments = function.get("arguments", function.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        named = {"name": function.get("name"), "arguments": arguments}
        call_id = each.get("id")
        call_id = call_id if isinstance(call_id, str) and call_id else f"call_{number}"
        asked.append({"id": call_id, "type": "function", "function": named})
    return asked


def _result(turn: dict[str, Any], waiting: list[str], where: str) -> Message:
    """The result of the call it names, or of the first that has none yet."""
    named = turn.get("tool_call_id")
    if named not in waiting:
        if not waiting or isinstance(named, str):
            raise BadInput(f"{where} answers no call of a tool")
        named = waiting[0]
    waiting.remove(named)
    return {"role": "tool", "tool_call_id": named, "content": _text(turn, where)}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInput(f"{where}: {text[:80]!r} is no JSON: {error}") from error


def _tools(given: Any) -> list[dict[str, Any]]:
    """The tools in OpenAI's shape."""
    if isinstance(given, str):
        given = _json(given, "tools") if given.strip() else []
    if given is None:
        return []
    tools = [an_object(tool, "a tool") for tool in (given if isinstance(given, list) else [given])]
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
