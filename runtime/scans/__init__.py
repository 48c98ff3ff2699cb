"""Scans of what models wrote and read: secrets, jailbreaks and others, drift, memorisation.

`sampled_texts` gives the texts of a run that its model wrote, and nothing that it only read;
`prompt_texts` those of its users, and of its tools if asked.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any

from cray_agents.records import Run

#: Who speaks in a message, by its role. An engine takes any role: all others are the user's.
SIDES = {"assistant": "assistant", "system": "system", "developer": "system"}
SIDES |= {"tool": "tool", "function": "tool"}


def sampled_texts(run: Run) -> Iterator[str]:
    """Yield the texts of answers, reasoning and arguments of tool calls, in order.

    An imported run has no calls: its assistant's messages are read.
    """
    messages = [call.message for call in run.calls] or [
        message for message in run.trajectory.messages if message.get("role") == "assistant"
    ]
    for message in messages:
        yield from message_texts(message)


def prompt_texts(run: Run, roles: Collection[str] = ("user",)) -> Iterator[str]:
    """Yield the texts of a run's messages of these sides, each once, in order."""
    conversations = [call.messages for call in run.calls] or [run.trajectory.messages]
    messages = [each for conversation in conversations for each in conversation]
    texts = (text for each in messages if side_of(each) in roles for text in message_texts(each))
    yield from dict.fromkeys(texts if messages else filter(None, [run.input]))


def side_of(message: Any) -> str:
    """Return who speaks: the assistant, system, tool, or user, which also any other role is."""
    role = message.get("role")
    return SIDES.get(role, "user") if isinstance(role, str) else "user"


def message_texts(message: Any) -> Iterator[str]:
    """Yield the texts of a message that are not empty, and an assistant's arguments of calls."""
    for field in ("content", "reasoning", "reasoning_content"):
        value = message.get(field)
        items = value if isinstance(value, list) else [value]
        for item in items:
            text = item.get("text") if isinstance(item, dict) else item
            if isinstance(text, str) and text:
                yield text
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():  # a client may send anything
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (arguments := function.get("arguments")):
            yield arguments if isinstance(arguments, str) else json.dumps(arguments)
