"""Scans of what models wrote: secrets and personal data, drift, memorisation.

`sampled_texts` gives the texts of a run that its model wrote, and nothing that it only read.
"""

import json
from collections.abc import Iterator
from typing import Any

from cray_agents.records import Run


def sampled_texts(run: Run) -> Iterator[str]:
    """Yield the texts of answers, reasoning and arguments of tool calls, in order.

    An imported run has no calls: its assistant's messages are read.
    """
    messages = [call.message for call in run.calls] or [
        message for message in run.trajectory.messages if message.get("role") == "assistant"
    ]
    for message in messages:
        yield from message_texts(message)


def message_texts(message: Any) -> Iterator[str]:
    """Yield the texts of an assistant's message that are not empty."""
    for field in ("content", "reasoning", "reasoning_content"):
        value = message.get(field)
        items = value if isinstance(value, list) else [value]
        for item in items:
            text = item.get("text") if isinstance(item, dict) else item
            if isinstance(text, str) and text:
                yield text
    for call in message.get("tool_calls") or ():
        arguments = (call.get("function") or {}).get("arguments")
        if arguments:
            yield arguments if isinstance(arguments, str) else json.dumps(arguments)
