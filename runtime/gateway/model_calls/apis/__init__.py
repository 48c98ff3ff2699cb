"""The APIs that sample, as the gateway sees them: what was asked and said, in chat messages.

An answer passes through the gateway as bytes; a Door only reads it for the record. One module per
API beside this one; answers.py is who calls them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cray_agents.records import Message

Body = dict[str, Any]


@dataclass(frozen=True)
class SamplingApi:
    """One API. `prefix` begins its answers' ids, `last` the event that ends a stream.

    `asked` gives a request's conversation, and raises BadInput where there is none. `said` gives
    the assistant's message of each choice of a whole answer; `streamed`, of the data of all events
    of a stream, perhaps cut off, and the number of sequences it sampled, those messages that are
    the last sequences'. `content` tells a request's fields that are no sampling parameters.
    """

    path: str
    prefix: str
    last: bytes
    asked: Callable[[Body], list[Message]]
    said: Callable[[Body], list[Message]]
    streamed: Callable[[list[Body], int], list[Message]]
    content: frozenset[str]


def assistant(content: str | None, tool_calls: list[dict[str, Any]], **more: Any) -> Message:
    """A message as it would be sent back in the next request; empty fields are left out."""
    message: Message = {"role": "assistant", "content": content or None}
    message |= {name: value for name, value in more.items() if value not in (None, "", [], {})}
    if tool_calls:
        message["tool_calls"] = tool_calls
    elif content is not None:
        message["content"] = content
    return message


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in the shape of chat completions."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
