"""A run's conversation: its messages, and which of them which model call said.

The messages are the run record's; of a run that has none, those its last call read and said. Calls
are found in them by what they read and said: where a client trimmed its history, or calls of other
conversations stand in the run, some are in none of its messages. Used by all formats but `jsonl`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cray_agents.records import Message, Run, StopReason, Task, Trajectory, Turn, digest
from cray_agents.runtime.exports.written import Json, unsupported
from cray_agents.runtime.store.facts import text_of


class Conversation(NamedTuple):
    """A run's messages, its turns by the place of the message that each said, and the others.

    `own` is where its first call answered; an assistant's message before that was not said in this
    run. It is 0 where not all calls are known, and all messages count as the run's.
    """

    messages: list[Message]
    said: dict[int, Turn]
    others: list[Turn]
    tools: list[Json]
    tools_changed: bool
    own: int


def conversation_of(run: Run) -> Conversation:
    """A run's conversation; its messages are empty for a run that has neither any nor calls.

    Raises BadInput for messages whose tool calls are none: clients may send anything.
    """
    messages = run.trajectory.messages
    if not messages and (calls := run.calls):
        messages = [*calls[-1].messages, calls[-1].message]
    check_calls(run, messages)
    check_calls(run, (call.message for call in run.calls))
    said, others = _placed(messages, run.trajectory.turns)
    calls = [turn.call for turn in said.values() if turn.call is not None]
    offered = [call.tools for call in calls] or [run.trajectory.tools]
    tools, changed = _tools(offered)
    whole = all(turn.call is not None for turn in run.trajectory.turns)
    own = min(said, default=0) if whole else 0
    return Conversation(messages, said, others, tools or run.trajectory.tools, changed, own)


def check_calls(run: Run, messages: Iterable[Message]) -> None:
    """Raise BadInput for tool calls that are not objects with a function (or custom tool)."""
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            continue
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and isinstance(call.get("function", call.get("custom")), dict)
            for call in calls
        ):
            raise unsupported(run, "tool_calls", f"of a message are none: {str(calls)[:80]}")


def spoken(run: Run) -> Conversation:
    """`conversation_of` for formats that are to learn from. Raises BadInput where nothing is said.

    A run that failed before its model said anything cannot be learned from.
    """
    conversation = conversation_of(run)
    if not any(message.get("role") == "assistant" for message in conversation.messages):
        raise unsupported(run, "trajectory.messages", "has no message of the assistant")
    return conversation


def run_of_demonstration(
    messages: Sequence[Message],
    tools: Sequence[Json] = (),
    metadata: Json | None = None,
) -> Run:
    """A demonstration of a dataset as an imported run, named by its content."""
    asked = next((text_of(m) for m in messages if m.get("role") == "user"), "")
    return Run(
        id=f"demonstration-{digest([list(messages), list(tools)])}",
        agent="",
        model="",
        input=asked,
        output=messages[-1].get("content") if messages else None,
        stop_reason=StopReason.completed,
        trajectory=Trajectory(messages=list(messages), tools=list(tools)),
        task=Task(input=asked, metadata=metadata) if metadata else None,
        imported="demonstration",
    )


def _placed(
    messages: Sequence[Message], turns: Sequence[Turn]
) -> tuple[dict[int, Turn], list[Turn]]:
    """Each turn where its message stands: after all that it read, or else after the turn before."""
    said: dict[int, Turn] = {}
    others: list[Turn] = []
    after = 0
    for turn in turns:
        call = turn.call
        place = len(call.messages) if call is not None else -1
        if not (0 <= place < len(messages) and place not in said and _says(messages[place], turn)):
            places = (p for p in range(after, len(messages)) if p not in said)
            place = next((p for p in places if _says(messages[p], turn)), -1)
        if place < 0:
            others.append(turn)
        else:
            said[place] = turn
            after = max(after, place + 1)
    return said, others


def _says(message: Message, turn: Turn) -> bool:
    """Whether the message is the turn's; arguments may have been mended on their way back."""
    if message.get("role") != "assistant":
        return False
    asked = [call.get("id") for call in message.get("tool_calls") or ()]
    if turn.call is None:
        return bool(asked) and asked == [call.id for call in turn.tool_calls]
    given = turn.call.message
    if (written := message.get("written")) is not None and given.get("content") == written:
        return True  # a constrained call: the model wrote JSON (cray_agents/constrained.py)
    if asked or given.get("tool_calls"):
        return asked == [call.get("id") for call in given.get("tool_calls") or ()]
    return (message.get("content") or "") == (given.get("content") or "")


def _tools(offered: Sequence[list[Json]]) -> tuple[list[Json], bool]:
    """All tools that were offered, the newest definition of each name; whether they changed."""
    last = offered[-1]
    if all(tools == last for tools in offered):
        return last, False
    newest: dict[str, Json] = {}
    for tools in offered:
        newest |= {_name(tool): tool for tool in tools}
    return list(newest.values()), True


def _name(tool: Json) -> str:
    function = tool.get("function")
    named = function if isinstance(function, dict) else tool
    return str(named.get("name") or tool.get("type"))
