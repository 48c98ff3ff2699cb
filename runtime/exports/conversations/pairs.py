"""Preference pair: find the first answer in which two runs on one task differ.

What follows it is left out: trainers of preferences learn each token after the prompt, so the
results of tools and what users said would be learned as if the model had said them.

Ids of tool calls are new in every run, so they do not count as a difference. Runs with several
conversations, as after a handoff, are compared conversation by conversation, until two differ in an
answer. Called by openai_lines.py and trl.py.
"""

from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.records import Run
from cray_agents.runtime.exports.conversations.chat_messages import ChatMessages, chats_of
from cray_agents.runtime.exports.export_format import unsupported


class Difference(NamedTuple):
    """Two chats up to the answers that differ, the last of each. `same` counts equal messages."""

    better: ChatMessages
    worse: ChatMessages
    same: int
    losses: set[str]


def difference(better: Run, worse: Run, *, reasoning: bool) -> Difference:
    """Return the first difference of two runs; with `reasoning`, a difference there counts too.

    Raises BadInput for two runs that do not first differ in an answer of the model.
    """
    problems: list[BadInput] = []
    for one, other in zip(chats_of(better), chats_of(worse), strict=False):
        try:
            return _compare_chats(better, worse, one, other, reasoning=reasoning)
        except BadInput as error:
            problems.append(error)
    raise problems[0]


def _compare_chats(
    better: Run, worse: Run, one: ChatMessages, other: ChatMessages, *, reasoning: bool
) -> Difference:
    if one.tools != other.tools:
        raise _pair_error(better, worse, "were given different tools")
    for chat in (one, other):
        chat.messages = chat.until_answer()
    shorter = min(len(one.messages), len(other.messages))
    differing = (n for n in range(shorter) if _key(one, n, reasoning) != _key(other, n, reasoning))
    same = next(differing, None)
    if same is None:
        raise _pair_error(better, worse, "say the same, as far as both go")
    roles = one.messages[same]["role"], other.messages[same]["role"]
    if roles != ("assistant", "assistant"):
        problem = f"first differ in a message that is no answer ({' and '.join(roles)})"
        raise _pair_error(better, worse, problem)
    if same in one.history | other.history:
        raise _pair_error(better, worse, "first differ in the history they were given")
    if same == 0:
        raise _pair_error(better, worse, "begin with an answer: there is nothing that both read")
    losses = one.losses | other.losses
    for chat in (one, other):
        if len(chat.messages) > same + 1:
            losses.add("after_the_difference")
        chat.messages = chat.messages[: same + 1]
    return Difference(one, other, same, losses)


def _key(chat: ChatMessages, index: int, reasoning: bool) -> Any:
    """Return the fields of a message that are compared: not its call ids, and not its weight."""
    message = chat.messages[index]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    thought = chat.reasoning.get(index) if reasoning else None
    return message["role"], message["content"], message.get("name"), calls, thought


def _pair_error(better: Run, worse: Run, problem: str) -> BadInput:
    return unsupported(better, "trajectory.messages", f"and those of run {worse.id} {problem}")
