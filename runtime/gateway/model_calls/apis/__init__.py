"""Sampling APIs: read their requests and answers as chat messages, for the record.

An answer passes through the gateway as bytes; a SamplingApi only reads it. Each API has a module
in this folder. Called by ../answer.py and ../call.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.records import Message

Body = dict[str, Any]


@dataclass(frozen=True)
class SamplingApi:
    """One API.

    Args:
        path: its route.
        id_prefix: beginning of its answers' ids.
        finish: tells in a stream that a sequence has ended. No text of an answer can hold it: JSON
            escapes quotes and newlines.
        last_event: beginning of the event that ends a stream.
        parse_request: returns a request's conversation. Raises BadInput if it has none.
        parse_answer: returns the assistant's message of each choice of a whole answer.
        parse_stream: returns the messages of a stream that may be cut off. Takes the data of its
            events and the number of sampled sequences; the messages belong to the last ones.
        conversation_fields: request fields that are no sampling parameters.
    """

    path: str
    id_prefix: str
    finish: bytes
    last_event: bytes
    parse_request: Callable[[Body], list[Message]]
    parse_answer: Callable[[Body], list[Message]]
    parse_stream: Callable[[list[Body], int], list[Message]]
    conversation_fields: frozenset[str]


def assistant(content: Any, tool_calls: list[dict[str, Any]], **more: Any) -> Message:
    """Return a message as the next request would send it back, without empty fields."""
    message: Message = {"role": "assistant", "content": content or None}
    message |= {name: value for name, value in more.items() if value not in (None, "", [], {})}
    if tool_calls:
        message["tool_calls"] = tool_calls
    elif content is not None:
        message["content"] = content
    return message


def content_of(texts: Sequence[str]) -> Any:
    """Return the content of a message of these texts: the text, or the parts as they were sent.

    The chat template, or the engine for it, joins several: see `text_of` of
    cray_agents/messages.py.
    """
    content = [{"type": "text", "text": text} for text in texts]
    return content if len(content) > 1 else "".join(texts)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the shape of chat completions."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
