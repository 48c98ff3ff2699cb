"""ShareGPT: `conversations` of {from, value}, with `tools` as JSON in a string, and the run's `id`.

A call of a tool is a turn of its own whose value is {"name", "arguments"}, its result the turn that
follows it. There are no ids of calls: of calls made at once, each is told with its result, one
after another. A run whose calls saw different system messages or tools, as after a handoff, is a
record for each, with the ids `<run>.1`, `<run>.2`, ...; answers of others in it are the loss
`weights`. Listed in format.py.
"""

from collections.abc import Iterator

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.chat import Chat, chats_of
from cray_agents.runtime.exports.written import Json, LineFormat, Written, json_text

_FROM = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "observation",
}


def _of_run(run: Run) -> Written:
    records, losses, chats = [], set[str](), chats_of(run)
    for number, chat in enumerate(chats, 1):
        chat.messages = chat.until_answer()
        name = run.id if len(chats) == 1 else f"{run.id}.{number}"
        record: Json = {"id": name, "conversations": list(_turns(run, chat))}
        if chat.tools:
            functions = [tool["function"] for tool in chat.tools]
            record["tools"] = json_text(run, "tools", functions)
        records.append(record)
        losses |= chat.losses | _left_out(chat)
    return Written(records, tuple(sorted(losses)))


def _turns(run: Run, chat: Chat) -> Iterator[Json]:
    """The messages in order, but each result of a tool right after its call."""
    told: set[int] = set()
    for place, message in enumerate(chat.messages):
        if place in told:
            continue
        calls = message.get("tool_calls") or ()
        text = _text(message, chat)
        if text or not calls:
            yield {"from": _FROM[message["role"]], "value": text}
        if len(calls) > 1 or (calls and text):
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


def _result(messages: list[Message], asked: int, call_id: str, told: set[int]) -> int | None:
    """The place of the message that answers a call, among the results right after it."""
    for place in range(asked + 1, len(messages)):
        if messages[place]["role"] != "tool":
            return None
        if messages[place]["tool_call_id"] == call_id and place not in told:
            return place
    return None


def _text(message: Message, chat: Chat) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    if len(content) > 1:
        chat.losses.add("text_parts")
    return "\n".join(part["text"] for part in content)


def _left_out(chat: Chat) -> set[str]:
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
