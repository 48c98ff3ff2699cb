"""A run's conversation as chat messages that text formats can be made of, in OpenAI's shape.

Whatever API it was held through: plain texts, tool calls with arguments that are JSON objects, and
results that name the call they answer. What cannot be told that way (images, audio, token ids) is
an error that names the message. Called by openai_lines.py, trl.py and sharegpt.py.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversation import Conversation, spoken
from cray_agents.runtime.exports.export_format import Json, json_text, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
_KNOWN = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "weight"}
    | {"reasoning", "reasoning_content"}
)
_SOUND = ("audio", "function_call")  # fields that hold what was said, in a shape we do not carry


@dataclass(slots=True)
class ChatMessages:
    """The messages, complete and checked, the tools, and the codes of what was left out.

    `reasoning` is by the place of the message; `history`: the places of the assistant's messages
    that were not said in this conversation, and are not to be learned from it.
    """

    messages: list[Message]
    tools: list[Json]
    reasoning: dict[int, str]
    history: frozenset[int]
    parallel: bool | None
    losses: set[str] = field(default_factory=set)

    def untaught(self, since: int = 0) -> bool:
        """Whether there are answers, from a place on, that are not to be learned."""
        return any(
            message["role"] == "assistant" and (place in self.history or message.get("weight") == 0)
            for place, message in enumerate(self.messages[since:], since)
        )

    def until_answer(self) -> list[Message]:
        """The messages up to the assistant's last one; it is a loss if there are more."""
        last = max(p for p, m in enumerate(self.messages) if m["role"] == "assistant")
        if last + 1 < len(self.messages):
            self.losses.add("unanswered_end")
        return self.messages[: last + 1]


def chats_of(run: Run) -> list[ChatMessages]:
    """A run as chats: one, or one for each system message and tools that its calls saw.

    Raises BadInput (unsupported_export) naming what has no such form.
    """
    return [_chat(run, told) for told in spoken(run)]


def _chat(run: Run, told: Conversation) -> ChatMessages:
    chat = ChatMessages([], [], {}, told.history, _parallel(told), {"conversation_only"})
    asked: set[str] = set()
    for place, message in enumerate(told.messages):
        where = f"messages[{place}]"
        written = _message(run, where, message, chat)
        if written["role"] == "tool" and written["tool_call_id"] not in asked:
            problem = f"answers the call {written['tool_call_id']!r}, which no message asked for"
            raise unsupported(run, where, problem)
        if "tool_calls" in written:
            asked.update(call["id"] for call in written["tool_calls"])
        chat.messages.append(written)
    chat.tools = _tools(run, told, chat.losses)
    if any(turn.call is not None for turn in told.others):
        chat.losses.add("other_calls")
    calls = [turn.call for turn in told.said.values() if turn.call is not None]
    if run.redacted or any(call.redacted for call in run.calls):
        chat.losses.add("redacted")
    if any(call.api == "/v1/completions" for call in calls):
        chat.losses.add("completions")
    return chat


def _message(run: Run, where: str, message: Message, chat: ChatMessages) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise unsupported(run, f"{where}.role", f"is {role!r}, which this format does not have")
    written: Message = {"role": role, "content": _content(run, where, message, chat)}
    if isinstance(message.get("name"), str):
        written["name"] = message["name"]
    if role == "assistant":
        _assistant(run, where, message, written, chat)
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise unsupported(run, f"{where}.tool_call_id", "is missing")
        written["tool_call_id"] = message["tool_call_id"]
    if any(name not in _KNOWN and message[name] not in (None, "", [], {}) for name in message):
        chat.losses.add("message_fields")
    return written


def _assistant(
    run: Run, where: str, message: Message, written: Message, chat: ChatMessages
) -> None:
    for name in _SOUND:
        if message.get(name):
            raise unsupported(run, f"{where}.{name}", "has no place in this format")
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        chat.reasoning[len(chat.messages)] = thought if isinstance(thought, str) else str(thought)
    if (weight := message.get("weight")) in (0, 1):
        written["weight"] = int(weight)
    elif weight is not None:
        chat.losses.add("message_fields")
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            _tool_call(run, f"{where}.tool_calls[{place}]", call, chat)
            for place, call in enumerate(calls)
        ]


def _content(run: Run, where: str, message: Message, chat: ChatMessages) -> Any:
    """A text, or a list of text parts without anything else in them."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise unsupported(run, f"{where}.content", "is neither a text nor a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text") or not isinstance(
            part.get("text"), str
        ):
            problem = f"has a part of type {kind!r}, and this format carries text alone"
            raise unsupported(run, f"{where}.content", problem)
        if len(part) > 2:
            chat.losses.add("message_fields")
        parts.append({"type": "text", "text": part["text"]})
    return parts or ""


def _tool_call(run: Run, where: str, call: Any, chat: ChatMessages) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise unsupported(run, where, "is no call of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json_text(run, where, arguments)
    elif not isinstance(arguments, str) or not _is_object(arguments):
        chat.losses.add("tool_arguments")
        arguments = json_text(run, where, {"unparsed": arguments} if arguments else {})
    elif arguments.startswith('{"unparsed":'):  # mended when it went back to the model
        chat.losses.add("tool_arguments")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def function_of(tool: Json) -> Json | None:
    """A tool's {"name", "description", "parameters", ...}; None for one that is no function.

    Chat completions list it under `function`, Responses flat, Anthropic with an `input_schema`.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        if tool.get("type") not in (None, "function") and "input_schema" not in tool:
            return None
        schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
        beside = ("type", "function", "input_schema")
        function = {k: v for k, v in tool.items() if k not in beside} | schema
    shown = {name: value for name, value in function.items() if value is not None}
    if not isinstance(shown.get("name"), str) or not isinstance(shown.get("parameters", {}), dict):
        return None
    return shown


def _tools(run: Run, told: Conversation, losses: set[str]) -> list[Json]:
    tools = []
    for tool in told.tools:
        function = function_of(tool) if isinstance(tool, dict) else None
        if function is None:
            losses.add("other_tools")
        else:
            tools.append({"type": "function", "function": function})
    return tools


def _parallel(told: Conversation) -> bool | None:
    """What the newest call said of parallel tool calls."""
    for turn in reversed(told.said.values()):
        given = turn.call.sampling.get("parallel_tool_calls") if turn.call is not None else None
        if isinstance(given, bool):
            return given
    return None
