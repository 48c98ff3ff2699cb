"""TRL's conversational datasets: `trl` (messages), `trl-prompt-completion` and `trl-preference`.

`datasets.load_dataset("json")` and TRL's trainers read them. `tools` is a JSON string, or null.
Chat templates demand arguments of tool calls as objects, and an empty text beside tool calls; the
engine hands both to the template in the same way. Reasoning is kept as `reasoning_content`. A run
whose calls saw different system messages or tools, as after a handoff, is one row for each, up to
its last answer. Answers of the other calls in it are the loss `weights`. Listed in catalog.py.
"""

from collections.abc import Callable

from cray_agents.exact_json import parse_json
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversations.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.conversations.pairs import difference
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    Written,
    json_text,
    unsupported,
)
from cray_agents.runtime.store.segments.facts import text_of


def _write_run(run: Run) -> Written:
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
        losses.update(_losses(chat, len(row.get("prompt", ()))))
        rows.append(row)
    return Written(rows, tuple(sorted(losses)))


def _write_pair(better: Run, worse: Run) -> Written:
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
    return Written([record], tuple(sorted({*losses, *_losses(one, same), *_losses(other, same)})))


def _messages(chat: ChatMessages) -> list[Message]:
    return [_message(chat, index, message) for index, message in enumerate(chat.messages)]


def _message(chat: ChatMessages, index: int, message: Message) -> Message:
    written = {name: value for name, value in message.items() if name != "weight"}
    if message["role"] == "developer":  # templates know no such role
        written["role"] = "system"
        chat.losses.add("developer_role")
    content = message["content"]
    if not isinstance(content, str):
        written["content"] = text_of(message)
        if len(content) > 1:
            chat.losses.add("text_parts")
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


def _losses(chat: ChatMessages, since: int = 0) -> tuple[str, ...]:
    """Return the losses of a chat that is trained on from message `since` on."""
    return tuple(sorted(chat.losses | ({"weights"} if chat.has_untrained(since) else set())))


TRL = LineFormat(
    name="trl",
    title="TRL (language modeling)",
    about="conversations with their tools as TRL's SFTTrainer reads them: messages, tools",
    write_run=_write_run,
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
    write_pair=_write_pair,
)
