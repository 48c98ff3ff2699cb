"""Conversations and pairs for fine-tuning: the formats of OpenAI (`openai`, `openai-preference`)
and of TRL (`trl`, `trl-prompt-completion`, `trl-preference`).

POST /v1/fine_tuning/jobs reads OpenAI's, at OpenAI and here (runtime/fine_tuning). A line holds the
conversation up to the assistant's last message. A run whose calls saw different system messages or
tools, as after a handoff, is one line for each. Answers that the run was given, or that other calls
made, have the weight 0; TRL's formats have no weights, so there they are the loss `weights`.

`datasets.load_dataset("json")` and TRL's trainers read the formats of TRL. `tools` is a JSON
string, or null. Chat templates demand arguments of tool calls as objects, and an empty text beside
tool calls; the engine hands both to the template in the same way. Reasoning is kept as
`reasoning_content`. Listed in exporter.py.
"""

from collections.abc import Callable
from functools import partial

from cray_agents.exact_json import parse_json
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat_messages import ChatMessages, chats_of, difference
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    Written,
    json_text,
    unsupported,
)


def _openai_write_run(run: Run) -> Written:
    records, losses = [], set[str]()
    for chat in chats_of(run):
        messages = [_without_empty_content(message) for message in chat.until_answer()]
        for index in chat.history.intersection(range(len(messages))):
            messages[index]["weight"] = 0
        if all(m.get("weight") == 0 for m in messages if m["role"] == "assistant"):
            raise unsupported(run, "trajectory.messages", "hold no answer of this run to train on")
        records.append(_add_tools({"messages": messages}, chat))
        losses |= chat.losses | ({"reasoning"} if chat.reasoning else set())
    return Written(records, tuple(sorted(losses)))


def _without_empty_content(message: Message) -> Message:
    """Return the message; one that only calls tools loses its empty content."""
    if "tool_calls" in message and not message["content"]:
        return {name: value for name, value in message.items() if name != "content"}
    return {**message}


def _openai_write_pair(better: Run, worse: Run) -> Written:
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


OPENAI = LineFormat(
    name="openai",
    title="OpenAI fine-tuning (chat)",
    about="conversations with their tools, up to the assistant's last message: messages, tools, "
    "parallel_tool_calls",
    write_run=_openai_write_run,
)
OPENAI_PREFERENCE = LineFormat(
    name="openai-preference",
    title="OpenAI fine-tuning (preference)",
    about="pairs of runs on a task: the messages both read, and the first answers that differ",
    write_pair=_openai_write_pair,
)


def _prompt_and_completion(run: Run, chat: ChatMessages) -> Json:
    """Return the assistant's last message, and all messages before it as the prompt."""
    chat.messages = chat.until_answer()
    messages = _messages(chat)
    if len(messages) < 2 or messages[-2]["role"] == "system":
        problem = "hold no question before the last answer"
        raise unsupported(run, "trajectory.messages", problem)
    if any(message["role"] == "assistant" for message in messages[:-1]):
        chat.losses.add("earlier_turns")
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _rows(columns: Callable[[Run, ChatMessages], Json], run: Run) -> Written:
    """Write a row for each of a run's chats, with the losses of its trained part."""
    rows, losses = [], set[str]()
    for chat in chats_of(run):
        row = {**columns(run, chat), "tools": _tools(run, chat)}
        losses |= _trl_losses(chat, len(row.get("prompt", ())))
        rows.append(row)
    return Written(rows, tuple(sorted(losses)))


def _trl_write_pair(better: Run, worse: Run) -> Written:
    """Write the common messages, and the first answer of each run that differs."""
    one, other, same, losses = difference(better, worse, reasoning=True)
    chosen, rejected = _messages(one), _messages(other)
    if chosen[same - 1]["role"] == "system":
        problem = "hold no question before the answers that differ"
        raise unsupported(better, "trajectory.messages", problem)
    record = {
        "prompt": chosen[:same],
        "chosen": chosen[same:],
        "rejected": rejected[same:],
        "tools": _tools(better, one),
    }
    losses |= _trl_losses(one, same) | _trl_losses(other, same)
    return Written([record], tuple(sorted(losses)))


def _messages(chat: ChatMessages) -> list[Message]:
    return [_message(chat, index, message) for index, message in enumerate(chat.messages)]


def _message(chat: ChatMessages, index: int, message: Message) -> Message:
    written = {name: value for name, value in message.items() if name != "weight"}
    if message["role"] == "developer":  # templates know no such role
        written["role"] = "system"
        chat.losses.add("developer_role")
    written["content"] = chat.text(message)
    if index in chat.reasoning:
        written["reasoning_content"] = chat.reasoning[index]
    if "tool_calls" in message:
        calls = [(call, call["function"]) for call in message["tool_calls"]]
        written["tool_calls"] = [
            {**call, "function": {**called, "arguments": parse_json(called["arguments"])}}
            for call, called in calls
        ]
    return written


def _tools(run: Run, chat: ChatMessages) -> str | None:
    return json_text(run, "tools", chat.tools) if chat.tools else None


def _trl_losses(chat: ChatMessages, since: int) -> set[str]:
    """Return the losses of a chat that is trained on from message `since` on."""
    return chat.losses | ({"weights"} if chat.has_untrained(since) else set())


TRL = LineFormat(
    name="trl",
    title="TRL (language modeling)",
    about="conversations with their tools as TRL's SFTTrainer reads them: messages, tools",
    write_run=partial(_rows, lambda run, chat: {"messages": _messages(chat)}),
)
TRL_PROMPT_COMPLETION = LineFormat(
    name="trl-prompt-completion",
    title="TRL (prompt and completion)",
    about="the assistant's last message and all before it: prompt, completion, tools",
    write_run=partial(_rows, _prompt_and_completion),
)
TRL_PREFERENCE = LineFormat(
    name="trl-preference",
    title="TRL (preference)",
    about="pairs of runs on a task as TRL's DPOTrainer reads them: the messages both read, and "
    "the first answers that differ: prompt, chosen, rejected, tools",
    write_pair=_trl_write_pair,
)
