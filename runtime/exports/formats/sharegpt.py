"""ShareGPT: `conversations` of {from, value}, with `tools` as a JSON string, and the run's `id`.

LLaMA-Factory's converter drops a record whose turns do not alternate. After a system turn, `human`
or `observation` alternates with `gpt` or `function_call`; a turn of the model is last. A tool call
is a turn whose value is {"name", "arguments"}; the next turn is its result. Calls have no ids:
parallel calls are written one by one, each with its result. Calls without results share one turn,
whose value is a list. The text beside a call is left out. Turns of one speaker in a row are joined,
and a record ends at the first turn that does not alternate.

A run whose calls saw different system messages or tools, as after a handoff, is one record for
each, with the ids `<run>.1`, `<run>.2`, ... Answers of the other calls in it are the loss
`weights`. Listed in exporter.py.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    Written,
    json_text,
    unsupported,
)

_FROM = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "observation",
}
_QUESTIONS, _ANSWERS = ("human", "observation"), ("gpt", "function_call")


def _write_run(run: Run) -> Written:
    records, losses, chats = [], set[str](), chats_of(run)
    for number, chat in enumerate(chats, 1):
        chat.messages = chat.until_answer()
        name = run.id if len(chats) == 1 else f"{run.id}.{number}"
        turns = _cut_to_alternating(_join_turns(list(_turns(run, chat)), chat), chat)
        if not any(turn["from"] in _ANSWERS for turn in turns):
            raise unsupported(run, "messages", "hold no question with an answer after it")
        record: Json = {"id": name, "conversations": turns}
        if chat.tools:
            functions = [tool["function"] for tool in chat.tools]
            record["tools"] = json_text(run, "tools", functions)
        records.append(record)
        losses |= chat.losses | _lost_fields(chat)
    return Written(records, tuple(sorted(losses)))


def _turns(run: Run, chat: ChatMessages) -> Iterator[Json]:
    """Yield the messages in order, but each result of a tool right after its call."""
    written: set[int] = set()
    for index, message in enumerate(chat.messages):
        if index in written:
            continue
        calls = message.get("tool_calls") or ()
        text = chat.text(message)
        if not calls:
            yield {"from": _FROM[message["role"]], "value": text}
        elif text:
            chat.losses.add("call_text")
        if len(calls) > 1:
            chat.losses.add("split_turns")
        for call in calls:
            function = call["function"]
            name = json_text(run, f"messages[{index}].tool_calls", function["name"])
            value = f'{{"name":{name},"arguments":{function["arguments"]}}}'
            yield {"from": "function_call", "value": value}
            result = _result(chat.messages, index, call["id"], written)
            if result is not None:
                written.add(result)
                yield {"from": "observation", "value": chat.text(chat.messages[result])}


def _join_turns(turns: list[Json], chat: ChatMessages) -> list[Json]:
    """Join turns of one speaker in a row: texts become paragraphs, calls a list."""
    joined: list[Json] = []
    for speaker, same in groupby(turns, key=itemgetter("from")):
        values = [turn["value"] for turn in same]
        if len(values) > 1 and speaker != "function_call":
            chat.losses.add("joined_turns")
        value = f"[{','.join(values)}]" if speaker == "function_call" else "\n\n".join(values)
        joined.append({"from": speaker, "value": value if len(values) > 1 else values[0]})
    return joined


def _cut_to_alternating(turns: list[Json], chat: ChatMessages) -> list[Json]:
    """Return the turns as far as they alternate, without answers before the first question."""
    begin = 1 if turns and turns[0]["from"] == "system" else 0
    while begin < len(turns) and turns[begin]["from"] in _ANSWERS:
        del turns[begin]
        chat.losses.add("not_alternating")
    end = begin
    while end < len(turns) and turns[end]["from"] in (_QUESTIONS, _ANSWERS)[(end - begin) % 2]:
        end += 1
    end -= (end - begin) % 2
    if end < len(turns):
        chat.losses.add("not_alternating")
    return turns[:end]


def _result(messages: list[Message], caller: int, call_id: str, written: set[int]) -> int | None:
    """Return the index of a call's result, among the results right after the calling message."""
    for index in range(caller + 1, len(messages)):
        if messages[index]["role"] != "tool":
            return None
        if messages[index]["tool_call_id"] == call_id and index not in written:
            return index
    return None


def _lost_fields(chat: ChatMessages) -> set[str]:
    """Return the losses of the chat's fields that no turn has."""
    lost = {"reasoning"} if chat.reasoning else set()
    if chat.has_untrained():
        lost.add("weights")
    for message in chat.messages:
        if message["role"] == "developer":
            lost.add("developer_role")
        if "name" in message:
            lost.add("message_fields")
        if "tool_calls" in message:
            lost.add("tool_call_ids")
    return lost


SHAREGPT = LineFormat(
    name="sharegpt",
    title="ShareGPT",
    about="conversations of {from: system, human, gpt, function_call or observation, value} up to "
    "the assistant's last message, and tools",
    write_run=_write_run,
)
