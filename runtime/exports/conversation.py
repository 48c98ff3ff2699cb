"""A run's conversation: its messages, and which of them which model call said.

The messages are the run record's; of a run that has none, those its last call read and said. Calls
are found in them by what they read and said: where a client trimmed its history, or calls of other
conversations stand in the run, some are in none of its messages. Used by all formats but `jsonl`.

Where calls began with different system messages, or were given different tools, as after a handoff,
no one of these goes over all messages: formats to learn from get a conversation for each
(`conversations_of`), as the calls under it saw it; what others said in it is its history.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from cray_agents.records import Message, Run, StopReason, Task, Trajectory, Turn, digest
from cray_agents.runtime.exports.export_format import Json, unsupported
from cray_agents.runtime.store.segments.facts import text_of


class Conversation(NamedTuple):
    """A run's messages, its turns by the place of the message that each said, and the others.

    `own` is where its first call answered; an assistant's message before that was not said in this
    run. It is 0 where not all calls are known, and all messages count as the run's. `history`: the
    places of the assistant's messages that were not said here.
    """

    messages: list[Message]
    said: dict[int, Turn]
    others: list[Turn]
    tools: list[Json]
    own: int
    history: frozenset[int]


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
    tools = _tools([call.tools for call in calls] or [run.trajectory.tools])
    whole = all(turn.call is not None for turn in run.trajectory.turns)
    own = min(said, default=0) if whole else 0
    history = frozenset(place for place in _answers(messages) if place < own)
    return Conversation(messages, said, others, tools or run.trajectory.tools, own, history)


def conversations_of(run: Run) -> list[Conversation]:
    """A run's conversations: one for each beginning (system messages, tools) that its calls saw.

    In the order in which they began; mostly it is one. Raises BadInput as `conversation_of` does.
    """
    whole, parts = conversation_of(run), _parts(run.trajectory.turns)
    if len(parts) < 2:
        return [whole]
    as_sent = {id(turn): whole.messages[place] for place, turn in whole.said.items()}
    found = []
    for turns in parts:
        ends = ((turn, turn.call) for turn in reversed(turns))
        last, call = next((turn, call) for turn, call in ends if call is not None)
        messages = [*call.messages, as_sent.get(id(last), call.message)]
        part = Trajectory(messages=messages, turns=turns)
        told = conversation_of(run.model_copy(update={"trajectory": part}))
        found.append(told._replace(history=frozenset(_answers(messages) - told.said.keys())))
    return found


def _parts(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns by what their calls began with; one whose call is not known goes with the last."""
    parts: list[tuple[Any, list[Turn]]] = []
    part: list[Turn] = []
    for turn in turns:
        if (call := turn.call) is not None:
            system = takewhile(lambda m: m.get("role") in ("system", "developer"), call.messages)
            began = (list(system), call.tools)
            known = next((found for how, found in parts if how == began), None)
            if known is None:
                known = [] if parts else part  # with those before the first that is known
                parts.append((began, known))
            part = known
        part.append(turn)
    return [found for _, found in parts]


def _answers(messages: Sequence[Message]) -> set[int]:
    return {place for place, each in enumerate(messages) if each.get("role") == "assistant"}


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


def spoken(run: Run) -> list[Conversation]:
    """`conversations_of` for formats that are to learn from. Raises BadInput if nothing is said.

    A run that failed before its model said anything cannot be learned from.
    """
    conversations = conversations_of(run)
    if not all(_answers(each.messages) for each in conversations):
        raise unsupported(run, "trajectory.messages", "has no message of the assistant")
    return conversations


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


def _tools(offered: Sequence[list[Json]]) -> list[Json]:
    """All tools that were offered, the newest definition of each name."""
    last = offered[-1]
    if all(tools == last for tools in offered):
        return last
    newest: dict[str, Json] = {}
    for tools in offered:
        newest |= {_name(tool): tool for tool in tools}
    return list(newest.values())


def _name(tool: Json) -> str:
    function = tool.get("function")
    named = function if isinstance(function, dict) else tool
    return str(named.get("name") or tool.get("type"))
