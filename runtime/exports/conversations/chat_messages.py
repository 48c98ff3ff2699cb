"""ChatMessages: a run's conversation in OpenAI's chat shape, for formats of plain text.

Runs of any API become plain texts, tool calls whose arguments are JSON objects, and results that
name their call. Images, audio and token ids have no such form: they are errors that name the
message. Called by openai_lines.py, trl.py and sharegpt.py.
"""

from dataclasses import dataclass, field
from typing import Any

from cray_agents.exact_json import read_arguments, sent_arguments
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversations.conversation import (
    Conversation,
    text_losses,
    trainable_conversations,
)
from cray_agents.runtime.exports.export_format import Json, json_text, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
_KNOWN = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "weight"}
    | {"reasoning", "reasoning_content"}
)
_UNSUPPORTED = ("audio", "function_call")  # fields with content in a shape not carried here


@dataclass(slots=True)
class ChatMessages:
    """A conversation's checked messages and tools, with the codes of its losses.

    `reasoning` is by the index of its message. `history` holds the indices of assistant messages
    that were not produced in this conversation and are not trained on. `parallel` is the request's
    parallel_tool_calls.
    """

    messages: list[Message]
    tools: list[Json]
    reasoning: dict[int, str]
    history: frozenset[int]
    parallel: bool | None
    losses: set[str] = field(default_factory=set)

    def has_untrained(self, since: int = 0) -> bool:
        """Tell whether any assistant message from index `since` on is not to be trained on."""
        return any(
            message["role"] == "assistant" and (index in self.history or message.get("weight") == 0)
            for index, message in enumerate(self.messages[since:], since)
        )

    def until_answer(self) -> list[Message]:
        """Return the messages up to the assistant's last; further ones are a loss."""
        last = max(p for p, m in enumerate(self.messages) if m["role"] == "assistant")
        if last + 1 < len(self.messages):
            self.losses.add("unanswered_end")
        return self.messages[: last + 1]


def chats_of(run: Run) -> list[ChatMessages]:
    """Return a run as chats: one for each beginning (system messages, tools) that its calls saw.

    Raises BadInput (unsupported_export) naming the field that has no such form.
    """
    return [_chat(run, conversation) for conversation in trainable_conversations(run)]


def _chat(run: Run, conversation: Conversation) -> ChatMessages:
    chat = ChatMessages(
        [], [], {}, conversation.history, _parallel(conversation), {"conversation_only"}
    )
    call_ids: set[str] = set()
    for index, message in enumerate(conversation.messages):
        path = f"messages[{index}]"
        written = _message(run, path, message, chat)
        if written["role"] == "tool" and written["tool_call_id"] not in call_ids:
            problem = f"answers the call {written['tool_call_id']!r}, which no message asked for"
            raise unsupported(run, path, problem)
        if "tool_calls" in written:
            call_ids.update(call["id"] for call in written["tool_calls"])
        chat.messages.append(written)
    chat.tools = _tools(conversation, chat.losses)
    if any(turn.call is not None for turn in conversation.other_turns):
        chat.losses.add("other_calls")
    calls = [turn.call for turn in conversation.turns_by_message.values() if turn.call is not None]
    chat.losses |= text_losses(run)
    if any(call.api == "/v1/completions" for call in calls):
        chat.losses.add("completions")
    return chat


def _message(run: Run, path: str, message: Message, chat: ChatMessages) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise unsupported(run, f"{path}.role", f"is {role!r}, which this format does not have")
    written: Message = {"role": role, "content": _content(run, path, message, chat)}
    if isinstance(message.get("name"), str):
        written["name"] = message["name"]
    if role == "assistant":
        _add_answer_fields(run, path, message, written, chat)
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise unsupported(run, f"{path}.tool_call_id", "is missing")
        written["tool_call_id"] = message["tool_call_id"]
    if any(name not in _KNOWN and message[name] not in (None, "", [], {}) for name in message):
        chat.losses.add("message_fields")
    return written


def _add_answer_fields(
    run: Run, path: str, message: Message, written: Message, chat: ChatMessages
) -> None:
    for name in _UNSUPPORTED:
        if message.get(name):
            raise unsupported(run, f"{path}.{name}", "has no place in this format")
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        chat.reasoning[len(chat.messages)] = thought if isinstance(thought, str) else str(thought)
    if (weight := message.get("weight")) in (0, 1):
        written["weight"] = int(weight)
    elif weight is not None:
        chat.losses.add("message_fields")
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            _tool_call(run, f"{path}.tool_calls[{index}]", call, chat)
            for index, call in enumerate(calls)
        ]


def _content(run: Run, path: str, message: Message, chat: ChatMessages) -> Any:
    """Return the content as a text, or as a list of plain text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise unsupported(run, f"{path}.content", "is neither a text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text") or not isinstance(
            part.get("text"), str
        ):
            problem = f"has a part of type {kind!r}, and this format carries text alone"
            raise unsupported(run, f"{path}.content", problem)
        if len(part) > 2:
            chat.losses.add("message_fields")
        texts.append({"type": "text", "text": part["text"]})
    return texts or ""


def _tool_call(run: Run, path: str, call: Any, chat: ChatMessages) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise unsupported(run, path, "is no call of a function")
    arguments = function.get("arguments")
    read = read_arguments(arguments)
    if read is None or list(read) == ["unparsed"]:  # now, or when it went back to the model
        chat.losses.add("tool_arguments")
    if read is None or not isinstance(arguments, str):
        arguments = json_text(run, path, sent_arguments(arguments))
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def function_of(tool: Json) -> Json | None:
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


def _tools(conversation: Conversation, losses: set[str]) -> list[Json]:
    tools = []
    for tool in conversation.tools:
        function = function_of(tool) if isinstance(tool, dict) else None
        if function is None:
            losses.add("other_tools")
        else:
            tools.append({"type": "function", "function": function})
    return tools


def _parallel(conversation: Conversation) -> bool | None:
    """Return the parallel_tool_calls of the newest call that set it."""
    for turn in reversed(conversation.turns_by_message.values()):
        value = turn.call.sampling.get("parallel_tool_calls") if turn.call is not None else None
        if isinstance(value, bool):
            return value
    return None
