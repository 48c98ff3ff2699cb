"""Replies: redact a recorded answer, which is JSON or an event stream in a string.

A stream sends a text in pieces, and sensitive text may be split over several of them. So the pieces
of a text are joined and redacted, and the result is put into the first. Called by redactor.py.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Clean = Callable[[str], str]

_SAMPLES = ',"samples":'  # the gateway's own member, at the end of an answer or an event
_DATA = "data:"
# ids and fixed words of all APIs; below _FREE nothing is kept, for models or clients wrote it
_KEPT = {
    "id", "item_id", "call_id", "tool_use_id", "object", "type", "role", "model", "status",
    "finish_reason", "stop_reason", "system_fingerprint", "service_tier",
}  # fmt: skip
_TOKENS = {
    "prompt_token_ids", "token_ids", "logprobs", "prompt_logprobs", "top_logprobs", "samples",
    "bytes",
}  # fmt: skip
_FREE = ("input", "metadata")
_PLACES = ("type", "item_id", "output_index", "content_index", "summary_index", "index")


class Slot(NamedTuple):
    """A text in a value: the member `key` of an object, or the item `key` of a list."""

    holder: Any
    key: Any


def is_interleaved(body: dict[str, Any]) -> bool:
    """Tell whether a call's reply streams several choices; its message has only one of them."""
    several = (body.get("sampling") or {}).get("n") or 1
    return several != 1 and body["reply"].lstrip().startswith((_DATA, "event:", ":"))


def without_samples(reply: str) -> str:
    """Return a reply without its exact tokens, which are numbers and need no search."""
    start = reply.find(_SAMPLES)
    if start < 0:
        return reply
    end = reply.find("\n", start)
    return reply[:start] + (reply[end:] if end >= 0 else "")


def redact_reply(reply: str, clean: Clean) -> str:
    """Return the reply with all its texts passed through `clean`; the same if nothing changed."""
    lines, events = _read(reply)
    changed = False
    for slots in _texts(events.values()).values():
        before = "".join(slot.holder[slot.key] for slot in slots)
        after = clean(before)
        if after != before:
            changed = True
            for slot, text in zip(slots, [after, *[""] * (len(slots) - 1)], strict=True):
                slot.holder[slot.key] = text
    if not events:  # neither JSON nor a stream
        return clean(reply)
    for number, value in events.items():
        events[number] = _redact_keys(value, clean, free=False)
        changed = changed or events[number] != value
    return _join(lines, events) if changed else reply


def without_tokens(reply: str) -> str:
    """Return the reply without any token ids and logprobs."""
    lines, events = _read(reply)
    for value in events.values():
        _drop_tokens(value)
    return _join(lines, events) if events else reply


def _read(reply: str) -> tuple[list[str], dict[int, Any]]:
    """Split a reply into lines, with the values of data lines by number. JSON is one line."""
    whole = _json(reply)
    if whole is not None:
        return [reply], {0: whole}
    lines = reply.split("\n")
    events = {
        number: value
        for number, line in enumerate(lines)
        if line.startswith(_DATA) and (value := _json(line.removeprefix(_DATA))) is not None
    }
    return lines, events


def _join(lines: list[str], events: dict[int, Any]) -> str:
    """Return the reply of `_read` with these values."""
    head = f"{_DATA} " if lines[0].lstrip()[:1] not in ("{", "[") else ""
    texts = {
        number: head + json.dumps(value, ensure_ascii="\\u" in lines[number], separators=(",", ":"))
        for number, value in events.items()
    }
    return "\n".join(texts.get(number, line) for number, line in enumerate(lines))


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or too deep to be an answer
        return None
    return value if isinstance(value, dict | list) else None


def _texts(events: Iterable[Any]) -> dict[tuple[Any, ...], list[Slot]]:
    """Return all texts in order, grouped so that the pieces of one text share a key."""
    texts: dict[tuple[Any, ...], list[Slot]] = {}
    for value in events:
        for path, slot in _slots(value, (), kept=True):
            texts.setdefault(path, []).append(slot)
    return texts


def _slots(value: Any, path: tuple[Any, ...], *, kept: bool) -> Iterator[tuple[Any, Slot]]:
    if isinstance(value, dict):
        found = ((name, value.get(name)) for name in _PLACES)
        places = tuple((name, item) for name, item in found if isinstance(item, str | int))
        for name, item in value.items():
            if name in _TOKENS or (kept and name in _KEPT):
                continue
            below = (*path, *places, name)
            if isinstance(item, str):
                yield below, Slot(value, name)
            else:
                yield from _slots(item, below, kept=kept and name not in _FREE)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            # an item's own index identifies it better than its position
            below = path if isinstance(item, dict) and "index" in item else (*path, number)
            if isinstance(item, str):
                yield below, Slot(value, number)
            else:
                yield from _slots(item, below, kept=kept)


def _redact_keys(value: Any, clean: Clean, *, free: bool) -> Any:
    """Return a value with redacted keys, except the keys of the API."""
    if isinstance(value, list):
        return [_redact_keys(item, clean, free=free) for item in value]
    if not isinstance(value, dict):
        return value
    renamed: dict[str, Any] = {}
    for name, item in value.items():
        key = unused_key(clean(name), renamed) if free else name
        renamed[key] = _redact_keys(item, clean, free=free or name in _FREE)
    return renamed


def unused_key(key: str, taken: Mapping[str, Any]) -> str:
    """Return a key that is not taken yet, since redaction may make two keys equal."""
    number, candidate = 1, key
    while candidate in taken:
        number += 1
        candidate = f"{key} {number}"
    return candidate


def _drop_tokens(value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if name in _TOKENS and isinstance(item, list | dict):
                value[name] = [] if isinstance(item, list) else None
            else:
                _drop_tokens(item)
    elif isinstance(value, list):
        for item in value:
            _drop_tokens(item)
