"""OpenAI's fine-tuning files: `openai` for conversations, `openai-preference` for pairs.

POST /v1/fine_tuning/jobs reads both, at OpenAI and here (runtime/fine_tuning). A line holds the
conversation up to the assistant's last message. Answers in the history that a run was given have
the weight 0. A run whose calls saw different system messages or tools, as after a handoff, is one
line for each; answers of the other calls have the weight 0 in it. Listed in catalog.py.
"""

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversations.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.conversations.pairs import difference
from cray_agents.runtime.exports.export_format import Json, LineFormat, Written, unsupported


def _write_run(run: Run) -> Written:
    chats = chats_of(run)
    records = [_record(run, chat) for chat in chats]
    return Written(records, tuple(sorted({code for chat in chats for code in _losses(chat)})))


def _record(run: Run, chat: ChatMessages) -> Json:
    messages = [_weighted(chat, index, m) for index, m in enumerate(chat.until_answer())]
    if all(m.get("weight") == 0 for m in messages if m["role"] == "assistant"):
        raise unsupported(run, "trajectory.messages", "hold no answer of this run to train on")
    return _add_tools({"messages": messages}, chat)


def _weighted(chat: ChatMessages, index: int, message: Message) -> Message:
    written = _without_empty_content(message)
    if index in chat.history:
        written["weight"] = 0
    return written


def _without_empty_content(message: Message) -> Message:
    """Return the message; one that only calls tools loses its empty content."""
    if "tool_calls" in message and not message["content"]:
        return {name: value for name, value in message.items() if name != "content"}
    return {**message}


def _write_pair(better: Run, worse: Run) -> Written:
    """Write the common messages, and the first answer of each run that differs."""
    one, other, same, losses = difference(better, worse, reasoning=False)
    if 0 in (one.messages[same].get("weight"), other.messages[same].get("weight")):
        losses.add("weights")
    if one.reasoning or other.reasoning:
        losses.add("reasoning")
    record = {
        "input": _add_tools({"messages": [_plain(m) for m in one.messages[:same]]}, one),
        "preferred_output": [_plain(one.messages[same])],
        "non_preferred_output": [_plain(other.messages[same])],
    }
    return Written([record], tuple(sorted(losses)))


def _plain(message: Message) -> Message:
    return {
        name: value for name, value in _without_empty_content(message).items() if name != "weight"
    }


def _add_tools(record: Json, chat: ChatMessages) -> Json:
    """Add the tools to a record; parallel_tool_calls is allowed only with tools."""
    if chat.tools:
        record["tools"] = chat.tools
        if chat.parallel is not None:
            record["parallel_tool_calls"] = chat.parallel
    return record


def _losses(chat: ChatMessages) -> tuple[str, ...]:
    return tuple(sorted(chat.losses | ({"reasoning"} if chat.reasoning else set())))


OPENAI = LineFormat(
    name="openai",
    title="OpenAI fine-tuning (chat)",
    about="conversations with their tools, up to the assistant's last message: messages, tools, "
    "parallel_tool_calls",
    write_run=_write_run,
)
OPENAI_PREFERENCE = LineFormat(
    name="openai-preference",
    title="OpenAI fine-tuning (preference)",
    about="pairs of runs on a task: the messages both read, and the first answers that differ",
    write_pair=_write_pair,
)
