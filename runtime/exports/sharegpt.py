"""ShareGPT: `conversations` of {from, value}, with `tools` as JSON in a string, and the run's `id`.

Turns alternate, as LLaMA-Factory's converter demands (it drops a record that does not): after the
system's come `human` or `observation`, then `gpt` or `function_call`, and so on; the model's is the
last. A call of a tool is a turn whose value is {"name", "arguments"}, its result the turn that
follows it. There are no ids of calls: of calls made at once, each is told with its result, one
after another; of calls without results the value is a list. What was said beside a call has no
place. Turns of one speaker in a row are joined, and a record ends where turns do not alternate. A
run whose calls saw different system messages or tools, as after a handoff, is a
record for each, with the ids `<run>.1`, `<run>.2`, ...; answers of others in it are the loss
`weights`. Listed in format.py.
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


def _of_run(run: Run) -> Written:
    records, losses, chats = [], set[str](), chats_of(run)
    for number, chat in enumerate(chats, 1):
        chat.messages = chat.until_answer()
        name = run.id if len(chats) == 1 else f"{run.id}.{number}"
        turns = _alternating(_joined(list(_turns(run, chat)), chat), chat)
        if not any(turn["from"] in _ANSWERS for turn in turns):
            raise unsupported(run, "messages", "hold no question with an answer after it")
        record: Json = {"id": name, "conversations": turns}
        if chat.tools:
            functions = [tool["function"] for tool in chat.tools]
            record["tools"] = json_text(run, "tools", functions)
        records.append(record)
        losses |= chat.losses | _left_out(chat)
    return Written(records, tuple(sorted(losses)))


def _turns(run: Run, chat: ChatMessages) -> Iterator[Json]:
    """The messages in order, but each result of a tool right after its call."""
    told: set[int] = set()
    for place, message in enumerate(chat.messages):
        if place in told:
            continue
        calls = message.get("tool_calls") or ()
        text = _text(message, chat)
        if not calls:
            yield {"from": _FROM[message["role"]], "value": text}
        elif text:
            chat.losses.add("call_text")
        if len(calls) > 1:
            chat.losses.add("split_turns")
        for call in calls:
            function = call["function"]
            name = json_text(run, f"messages[{place}].tool_calls", function["name"])
            value = f'{{"name":{name},"arguments":{function["arguments"]}}}'
            yield {"from": "function_call", "value": value}
            result = _result(chat.messages, place, call["id"], told)
            if result is not None:
                told.add(result)
                yield {"from": "observation", "value": _text(chat.messages[result], chat)}


def _joined(turns: list[Json], chat: ChatMessages) -> list[Json]:
    """Turns of one speaker in a row as one: texts as paragraphs, calls as a list."""
    found: list[Json] = []
    for speaker, same in groupby(turns, key=itemgetter("from")):
        values = [turn["value"] for turn in same]
        if len(values) > 1 and speaker != "function_call":
            chat.losses.add("joined_turns")
        together = f"[{','.join(values)}]" if speaker == "function_call" else "\n\n".join(values)
        found.append({"from": speaker, "value": together if len(values) > 1 else values[0]})
    return found


def _alternating(turns: list[Json], chat: ChatMessages) -> list[Json]:
    """The turns up to where they alternate; answers before the first question are left out."""
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


def _result(messages: list[Message], asked: int, call_id: str, told: set[int]) -> int | None:
    """The place of the message that answers a call, among the results right after it."""
    for place in range(asked + 1, len(messages)):
        if messages[place]["role"] != "tool":
            return None
        if messages[place]["tool_call_id"] == call_id and place not in told:
            return place
    return None


def _text(message: Message, chat: ChatMessages) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    if len(content) > 1:
        chat.losses.add("text_parts")
    return "\n".join(part["text"] for part in content)


def _left_out(chat: ChatMessages) -> set[str]:
    """What the chat knows and no turn has a field for."""
    lost = {"reasoning"} if chat.reasoning else set()
    if chat.untaught():
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
    of_run=_of_run,
)
