"""OpenAI's fine-tuning files: `openai`, conversations to imitate, and `openai-preference`, pairs.

What `openai` writes is what POST /v1/fine_tuning/jobs reads, here (runtime/fine_tuning) and there:
the conversation up to the assistant's last message. Messages of the history that a run was given,
which it did not say itself, have the weight 0. A run whose calls saw different system messages or
tools, as after a handoff, is a line for each, with its own answers to train on and the others' at
weight 0. Listed in format.py.
"""

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.export_format import Json, LineFormat, Written, unsupported
from cray_agents.runtime.exports.pairs import difference


def _of_run(run: Run) -> Written:
    chats = chats_of(run)
    records = [_record(run, chat) for chat in chats]
    return Written(records, tuple(sorted({code for chat in chats for code in _losses(chat)})))


def _record(run: Run, chat: ChatMessages) -> Json:
    messages = [_weighed(chat, place, m) for place, m in enumerate(chat.until_answer())]
    if all(m.get("weight") == 0 for m in messages if m["role"] == "assistant"):
        raise unsupported(run, "trajectory.messages", "hold no answer of this run to train on")
    return _offered({"messages": messages}, chat)


def _weighed(chat: ChatMessages, place: int, message: Message) -> Message:
    written = _bare(message)
    if place in chat.history:
        written["weight"] = 0
    return written


def _bare(message: Message) -> Message:
    """The message as a line holds it: one that only calls tools has no content."""
    if "tool_calls" in message and not message["content"]:
        return {name: value for name, value in message.items() if name != "content"}
    return {**message}


def _of_pair(better: Run, worse: Run) -> Written:
    """What both read, and the first message of each that the other did not say.

    OpenAI takes one message of the assistant on each side, so what follows them is left out.
    """
    one, other, same, losses = difference(better, worse, reasoning=False)
    if max(len(one.messages), len(other.messages)) > same + 1:
        losses.add("after_the_difference")
    if 0 in (one.messages[same].get("weight"), other.messages[same].get("weight")):
        losses.add("weights")
    if one.reasoning or other.reasoning:
        losses.add("reasoning")
    record = {
        "input": _offered({"messages": [_plain(m) for m in one.messages[:same]]}, one),
        "preferred_output": [_plain(one.messages[same])],
        "non_preferred_output": [_plain(other.messages[same])],
    }
    return Written([record], tuple(sorted(losses)))


def _plain(message: Message) -> Message:
    return {name: value for name, value in _bare(message).items() if name != "weight"}


def _offered(record: Json, chat: ChatMessages) -> Json:
    """The record with the tools; only with tools may it say whether calls may be parallel."""
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
    of_run=_of_run,
)
OPENAI_PREFERENCE = LineFormat(
    name="openai-preference",
    title="OpenAI fine-tuning (preference)",
    about="pairs of runs on a task: the messages both read, and the first answers that differ",
    of_pair=_of_pair,
)
