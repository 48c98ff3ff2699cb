"""ChatMessages: a run's conversation in OpenAI's chat shape, for formats of plain text.

Runs of any API become plain texts, tool calls whose arguments are JSON objects, and results that
name their call. Images, audio and token ids have no such form: they are errors that name the
message. `difference` finds the first answer in which two runs on one task differ. What follows it
is left out: trainers of preferences learn each token after the prompt, so the results of tools and
what users said would be learned as if the model had said them. Used by fine_tuning_lines.py and
sharegpt.py.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.exact_json import read_arguments, sent_arguments
from cray_agents.messages import function_of, other_fields, part_text, reasoning_of, text_of
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.export_format import Json, json_text, text_losses, unsupported
from cray_agents.runtime.store.run_conversation import Conversation, conversations_of

ROLES = ("system", "developer", "user", "assistant", "tool")
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

    def text(self, message: Message) -> str:
        """Return the text of a message; several parts become one, which is a loss."""
        content = message["content"]
        if not isinstance(content, str) and len(content) > 1:
            self.losses.add("text_parts")
        return text_of(message)

    def until_answer(self) -> list[Message]:
        """Return the messages up to the assistant's last; further ones are a loss."""
        last = max(p for p, m in enumerate(self.messages) if m["role"] == "assistant")
        if last + 1 < len(self.messages):
            self.losses.add("unanswered_end")
        return self.messages[: last + 1]


def chats_of(run: Run) -> list[ChatMessages]:
    """Return a run as chats: one for each beginning (system messages, tools) that its calls saw.

    Raises BadInput (unsupported_export) naming the field that has no such form, also for a run
    without an answer, as one that failed before its model spoke.
    """
    conversations = conversations_of(run)
    if not all(any(m.get("role") == "assistant" for m in each.messages) for each in conversations):
        raise unsupported(run, "trajectory.messages", "has no message of the assistant")
    return [_chat(run, conversation) for conversation in conversations]


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
    if other_fields(message, "weight"):
        chat.losses.add("message_fields")
    return written


def _add_answer_fields(
    run: Run, path: str, message: Message, written: Message, chat: ChatMessages
) -> None:
    for name in _UNSUPPORTED:
        if message.get(name):
            raise unsupported(run, f"{path}.{name}", "has no place in this format")
    if thought := reasoning_of(message):
        chat.reasoning[len(chat.messages)] = str(thought)
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
        text = part_text(part)
        if text is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            problem = f"has a part of type {kind!r}, and this format carries text alone"
            raise unsupported(run, f"{path}.content", problem)
        if len(part) > 2:
            chat.losses.add("message_fields")
        texts.append({"type": "text", "text": text})
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


class Difference(NamedTuple):
    """Two chats up to the answers that differ, the last of each. `same` counts equal messages."""

    better: ChatMessages
    worse: ChatMessages
    same: int
    losses: set[str]


def difference(better: Run, worse: Run, *, reasoning: bool) -> Difference:
    """Return the first difference of two runs; with `reasoning`, a difference there counts too.

    Ids of tool calls are new in every run, so they are no difference. Several conversations, as
    after a handoff, are compared one by one until two differ in an answer. Raises BadInput for two
    runs that do not first differ in an answer of the model.
    """
    problems: list[BadInput] = []
    for one, other in zip(chats_of(better), chats_of(worse), strict=False):
        try:
            return _compare_chats(better, worse, one, other, reasoning=reasoning)
        except BadInput as error:
            problems.append(error)
    raise problems[0]


def _compare_chats(
    better: Run, worse: Run, one: ChatMessages, other: ChatMessages, *, reasoning: bool
) -> Difference:
    if one.tools != other.tools:
        raise _pair_error(better, worse, "were given different tools")
    for chat in (one, other):
        chat.messages = chat.until_answer()
    shorter = min(len(one.messages), len(other.messages))
    differing = (n for n in range(shorter) if _key(one, n, reasoning) != _key(other, n, reasoning))
    same = next(differing, None)
    if same is None:
        raise _pair_error(better, worse, "say the same, as far as both go")
    roles = one.messages[same]["role"], other.messages[same]["role"]
    if roles != ("assistant", "assistant"):
        problem = f"first differ in a message that is no answer ({' and '.join(roles)})"
        raise _pair_error(better, worse, problem)
    if same in one.history | other.history:
        raise _pair_error(better, worse, "first differ in the history they were given")
    if same == 0:
        raise _pair_error(better, worse, "begin with an answer: there is nothing that both read")
    losses = one.losses | other.losses
    for chat in (one, other):
        if len(chat.messages) > same + 1:
            losses.add("after_the_difference")
        chat.messages = chat.messages[: same + 1]
    return Difference(one, other, same, losses)


def _key(chat: ChatMessages, index: int, reasoning: bool) -> Any:
    """Return the fields of a message that are compared: not its call ids, and not its weight."""
    message = chat.messages[index]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    thought = chat.reasoning.get(index) if reasoning else None
    return message["role"], message["content"], message.get("name"), calls, thought


def _pair_error(better: Run, worse: Run, problem: str) -> BadInput:
    return unsupported(better, "trajectory.messages", f"and those of run {worse.id} {problem}")
