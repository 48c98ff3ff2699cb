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
    chats = chats_of(run)
    records = [_record(run, chat) for chat in chats]
    return Written(
        records, tuple(sorted({code for chat in chats for code in _openai_losses(chat)}))
    )


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


def _openai_losses(chat: ChatMessages) -> tuple[str, ...]:
    return tuple(sorted(chat.losses | ({"reasoning"} if chat.reasoning else set())))


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


def _trl_write_run(run: Run) -> Written:
    return _rows(run, lambda chat: {"messages": _messages(chat)})


def _write_completion(run: Run) -> Written:
    """Write the assistant's last message, and all messages before it as the prompt."""
    return _rows(run, lambda chat: _prompt_and_completion(run, chat))


def _prompt_and_completion(run: Run, chat: ChatMessages) -> Json:
    chat.messages = chat.until_answer()
    messages = _messages(chat)
    if len(messages) < 2 or messages[-2]["role"] == "system":
        problem = "hold no question before the last answer"
        raise unsupported(run, "trajectory.messages", problem)
    if any(message["role"] == "assistant" for message in messages[:-1]):
        chat.losses.add("earlier_turns")
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _rows(run: Run, columns: Callable[[ChatMessages], Json]) -> Written:
    """Write a row for each of a run's chats, with the losses of its trained part."""
    rows, losses = [], set[str]()
    for chat in chats_of(run):
        row = {**columns(chat), "tools": _tools(run, chat)}
        losses.update(_trl_losses(chat, len(row.get("prompt", ()))))
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
    return Written(
        [record], tuple(sorted({*losses, *_trl_losses(one, same), *_trl_losses(other, same)}))
    )


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
        written["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return written


def _tool_call(call: Json) -> Json:
    function = call["function"]
    arguments = parse_json(function["arguments"])
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _tools(run: Run, chat: ChatMessages) -> str | None:
    return json_text(run, "tools", chat.tools) if chat.tools else None


def _trl_losses(chat: ChatMessages, since: int = 0) -> tuple[str, ...]:
    """Return the losses of a chat that is trained on from message `since` on."""
    return tuple(sorted(chat.losses | ({"weights"} if chat.has_untrained(since) else set())))


TRL = LineFormat(
    name="trl",
    title="TRL (language modeling)",
    about="conversations with their tools as TRL's SFTTrainer reads them: messages, tools",
    write_run=_trl_write_run,
)
TRL_PROMPT_COMPLETION = LineFormat(
    name="trl-prompt-completion",
    title="TRL (prompt and completion)",
    about="the assistant's last message and all before it: prompt, completion, tools",
    write_run=_write_completion,
)
TRL_PREFERENCE = LineFormat(
    name="trl-preference",
    title="TRL (preference)",
    about="pairs of runs on a task as TRL's DPOTrainer reads them: the messages both read, and "
    "the first answers that differ: prompt, chosen, rejected, tools",
    write_pair=_trl_write_pair,
)
