"""Two runs on the same task as a preference: what both read, and where their model's words part.

Ids of tool calls are made up anew in every run, so they do not count as a difference. Of runs whose
calls saw different system messages or tools, as after a handoff, the first conversations that part
so are compared. Called by openai_lines.py and trl.py.
"""

from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.records import Run
from cray_agents.runtime.exports.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.export_format import unsupported


class Difference(NamedTuple):
    """Two chats up to their last answers; from the place `same` on they differ, in an answer."""

    better: ChatMessages
    worse: ChatMessages
    same: int
    losses: set[str]


def difference(better: Run, worse: Run, *, reasoning: bool) -> Difference:
    """Where two runs part. `reasoning`: whether a difference in the model's reasoning counts.

    Raises BadInput for two that no answer of the model parts.
    """
    problems: list[BadInput] = []
    for one, other in zip(chats_of(better), chats_of(worse), strict=False):
        try:
            return _difference(better, worse, one, other, reasoning=reasoning)
        except BadInput as error:
            problems.append(error)
    raise problems[0]


def _difference(
    better: Run, worse: Run, one: ChatMessages, other: ChatMessages, *, reasoning: bool
) -> Difference:
    if one.tools != other.tools:
        raise _apart(better, worse, "were given different tools")
    for chat in (one, other):
        chat.messages = chat.until_answer()
    shorter = min(len(one.messages), len(other.messages))
    places = (p for p in range(shorter) if _at(one, p, reasoning) != _at(other, p, reasoning))
    same = next(places, None)
    if same is None:
        raise _apart(better, worse, "say the same, as far as both go")
    roles = one.messages[same]["role"], other.messages[same]["role"]
    if roles != ("assistant", "assistant"):
        problem = f"first differ in a message that is no answer ({' and '.join(roles)})"
        raise _apart(better, worse, problem)
    if same in one.history | other.history:
        raise _apart(better, worse, "first differ in the history they were given")
    if same == 0:
        raise _apart(better, worse, "begin with an answer: there is nothing that both read")
    return Difference(one, other, same, one.losses | other.losses)


def _at(chat: ChatMessages, place: int, reasoning: bool) -> Any:
    """What counts of a message: not the ids of its calls, nor whether it was to be trained on."""
    message = chat.messages[place]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    thought = chat.reasoning.get(place) if reasoning else None
    return message["role"], message["content"], message.get("name"), calls, thought


def _apart(better: Run, worse: Run, problem: str) -> BadInput:
    return unsupported(better, "trajectory.messages", f"and those of run {worse.id} {problem}")
