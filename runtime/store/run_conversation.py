"""A run's conversation: its messages, each answer matched to the model call that made it.

The messages come from the run record, or from the last call if the record has none. A call is
matched to a message by its prompt and its answer. Some calls match none: the client trimmed its
history, or the run holds calls of other conversations. Used by exports, views and the command line.

After a handoff, calls see other system messages or tools, and no single list fits all messages.
Formats for training then get one conversation per beginning, from `conversations_of`. Each is as
its own calls saw it; answers made by other calls count as its history.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.records import Message, Run, Trajectory, Turn

Json = dict[str, Any]


class Conversation(NamedTuple):
    """A run's messages, and its turns by the index of the message that each produced.

    `other_turns` match no message. `own_start` is the index of the first call's answer: assistant
    messages before it are not the run's own. It is 0 if a call is unknown, so that all messages
    count as the run's own. `history` holds the indices of assistant messages not produced here.
    """

    messages: list[Message]
    turns_by_message: dict[int, Turn]
    other_turns: list[Turn]
    tools: list[Json]
    own_start: int
    history: frozenset[int]


def conversation_of(run: Run) -> Conversation:
    """Return a run's conversation; it is empty for a run without messages and calls.

    Raises BadInput for malformed tool calls, since clients may send anything.
    """
    messages = run.trajectory.messages
    if not messages and (calls := run.calls):
        messages = [*calls[-1].messages, calls[-1].message]
    check_calls(run, messages)
    check_calls(run, (call.message for call in run.calls))
    placed, unplaced = _place_turns(messages, run.trajectory.turns)
    calls = [turn.call for turn in placed.values() if turn.call is not None]
    tools = _merge_tools([call.tools for call in calls] or [run.trajectory.tools])
    whole = all(turn.call is not None for turn in run.trajectory.turns)
    start = min(placed, default=0) if whole else 0
    history = frozenset(index for index in _answer_indices(messages) if index < start)
    return Conversation(messages, placed, unplaced, tools or run.trajectory.tools, start, history)


def conversations_of(run: Run) -> list[Conversation]:
    """Return one conversation per beginning (system messages, tools) that the run's calls saw.

    They stand in the order in which they began; most runs have one. Raises BadInput as
    `conversation_of` does.
    """
    whole, groups = conversation_of(run), _group_turns(run.trajectory.turns)
    if len(groups) < 2:
        return [whole]
    as_sent = {id(turn): whole.messages[index] for index, turn in whole.turns_by_message.items()}
    conversations = []
    for turns in groups:
        ends = ((turn, turn.call) for turn in reversed(turns))
        last, call = next((turn, call) for turn, call in ends if call is not None)
        messages = [*call.messages, as_sent.get(id(last), call.message)]
        trajectory = Trajectory(messages=messages, turns=turns)
        conversation = conversation_of(run.model_copy(update={"trajectory": trajectory}))
        history = frozenset(_answer_indices(messages) - conversation.turns_by_message.keys())
        conversations.append(conversation._replace(history=history))
    return conversations


def _group_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Group turns by the beginning of their calls; a turn without a known call joins the last."""
    groups: list[tuple[Any, list[Turn]]] = []
    group: list[Turn] = []
    for turn in turns:
        if (call := turn.call) is not None:
            system = takewhile(lambda m: m.get("role") in ("system", "developer"), call.messages)
            beginning = (list(system), call.tools)
            known = next((members for key, members in groups if key == beginning), None)
            if known is None:
                known = [] if groups else group  # turns before the first known call join it
                groups.append((beginning, known))
            group = known
        group.append(turn)
    return [members for _, members in groups]


def _answer_indices(messages: Sequence[Message]) -> set[int]:
    return {index for index, each in enumerate(messages) if each.get("role") == "assistant"}


def check_calls(run: Run, messages: Iterable[Message]) -> None:
    """Raise BadInput for tool calls that are not objects with a function or custom tool."""
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            continue
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and isinstance(call.get("function", call.get("custom")), dict)
            for call in calls
        ):
            raise BadInput(
                f"run {run.id}: tool_calls of a message are none: {str(calls)[:80]}",
                param="tool_calls",
                code="unsupported_export",
            )


def _place_turns(
    messages: Sequence[Message], turns: Sequence[Turn]
) -> tuple[dict[int, Turn], list[Turn]]:
    """Return the turns by the index of their message, and the turns without one.

    A turn's message follows its prompt; if it does not, it is sought after the previous turn.
    """
    placed: dict[int, Turn] = {}
    unplaced: list[Turn] = []
    after = 0
    for turn in turns:
        call = turn.call
        index = len(call.messages) if call is not None else -1
        fits = 0 <= index < len(messages) and index not in placed
        if not (fits and _is_answer(messages[index], turn)):
            free = (n for n in range(after, len(messages)) if n not in placed)
            index = next((n for n in free if _is_answer(messages[n], turn)), -1)
        if index < 0:
            unplaced.append(turn)
        else:
            placed[index] = turn
            after = max(after, index + 1)
    return placed, unplaced


def _is_answer(message: Message, turn: Turn) -> bool:
    """Tell whether the turn produced the message; clients may send its arguments back repaired."""
    if message.get("role") != "assistant":
        return False
    call_ids = [call.get("id") for call in message.get("tool_calls") or ()]
    if turn.call is None:
        return bool(call_ids) and call_ids == [call.id for call in turn.tool_calls]
    answer = turn.call.message
    if (written := message.get("written")) is not None and answer.get("content") == written:
        return True  # a constrained call: the model wrote JSON (engines/tool_calls.py)
    if call_ids or answer.get("tool_calls"):
        return call_ids == [call.get("id") for call in answer.get("tool_calls") or ()]
    return (message.get("content") or "") == (answer.get("content") or "")


def _merge_tools(offered: Sequence[list[Json]]) -> list[Json]:
    """Return all tools that were offered, in the newest definition of each name."""
    last = offered[-1]
    if all(tools == last for tools in offered):
        return last
    newest: dict[str, Json] = {}
    for tools in offered:
        newest |= {_tool_name(tool): tool for tool in tools}
    return list(newest.values())


def _tool_name(tool: Json) -> str:
    function = tool.get("function")
    named = function if isinstance(function, dict) else tool
    return str(named.get("name") or tool.get("type"))
