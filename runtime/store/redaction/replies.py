"""An answer as it was sent, kept for its repeats: JSON, or the bytes of an event stream, as a text.

A stream tells a text in pieces, and what must not be stored may lie across several of them. So the
pieces of a text are joined, cleaned, and told again as one. Called by redactor.py.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Clean = Callable[[str], str]

_SAMPLES = ',"samples":'  # the gateway's own member, at the end of an answer or an event
_DATA = "data:"
# ids and fixed words, whatever the API; not below _FREE, which is the model's or the client's own
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
    """Where a text stands: as a member of an object, or an item of a list."""

    holder: Any
    key: Any


def interleaved(body: dict[str, Any]) -> bool:
    """Whether a call's reply tells texts in pieces that its message does not tell whole."""
    several = (body.get("sampling") or {}).get("n") or 1
    return several != 1 and body["reply"].lstrip().startswith((_DATA, "event:", ":"))


def without_samples(reply: str) -> str:
    """A reply without the exact tokens in it: numbers, among which nobody looks for a text."""
    start = reply.find(_SAMPLES)
    if start < 0:
        return reply
    end = reply.find("\n", start)
    return reply[:start] + (reply[end:] if end >= 0 else "")


def cleaned(reply: str, clean: Clean) -> str:
    """The reply with all its texts cleaned; the same text if nothing changed."""
    lines, told = _read(reply)
    changed = False
    for slots in _texts(told.values()).values():
        before = "".join(slot.holder[slot.key] for slot in slots)
        after = clean(before)
        if after != before:
            changed = True
            for slot, text in zip(slots, [after, *[""] * (len(slots) - 1)], strict=True):
                slot.holder[slot.key] = text
    if not told:  # neither JSON nor a stream
        return clean(reply)
    for number, value in told.items():
        told[number] = _rekeyed(value, clean, free=False)
        changed = changed or told[number] != value
    return _written(lines, told) if changed else reply


def without_tokens(reply: str) -> str:
    """The reply without token ids and logprobs, wherever they stand in it."""
    lines, told = _read(reply)
    for value in told.values():
        _drop_tokens(value)
    return _written(lines, told) if told else reply


def _read(reply: str) -> tuple[list[str], dict[int, Any]]:
    """The lines of a reply, and what those with data hold. A whole answer is one line."""
    whole = _json(reply)
    if whole is not None:
        return [reply], {0: whole}
    lines = reply.split("\n")
    told = {
        number: value
        for number, line in enumerate(lines)
        if line.startswith(_DATA) and (value := _json(line.removeprefix(_DATA))) is not None
    }
    return lines, told


def _written(lines: list[str], told: dict[int, Any]) -> str:
    head = f"{_DATA} " if lines[0].lstrip()[:1] not in ("{", "[") else ""
    texts = {
        number: head + json.dumps(value, ensure_ascii="\\u" in lines[number], separators=(",", ":"))
        for number, value in told.items()
    }
    return "\n".join(texts.get(number, line) for number, line in enumerate(lines))


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or deeper than any answer
        return None
    return value if isinstance(value, dict | list) else None


def _texts(told: Any) -> dict[tuple[Any, ...], list[Slot]]:
    """All texts by what they are a part of, in order: pieces of one text share a key."""
    found: dict[tuple[Any, ...], list[Slot]] = {}
    for value in told:
        for path, slot in _slots(value, (), kept=True):
            found.setdefault(path, []).append(slot)
    return found


def _slots(value: Any, path: tuple[Any, ...], *, kept: bool) -> Iterator[tuple[Any, Slot]]:
    if isinstance(value, dict):
        places = tuple((name, value[name]) for name in _PLACES if _scalar(value.get(name)))
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
            # what has an index says itself which of a kind it is
            below = path if isinstance(item, dict) and "index" in item else (*path, number)
            if isinstance(item, str):
                yield below, Slot(value, number)
            else:
                yield from _slots(item, below, kept=kept)


def _rekeyed(value: Any, clean: Clean, *, free: bool) -> Any:
    """A value with clean keys where they are not the API's own."""
    if isinstance(value, list):
        return [_rekeyed(item, clean, free=free) for item in value]
    if not isinstance(value, dict):
        return value
    whole: dict[str, Any] = {}
    for name, item in value.items():
        key = fresh(clean(name), whole) if free else name
        whole[key] = _rekeyed(item, clean, free=free or name in _FREE)
    return whole


def fresh(key: str, taken: Mapping[str, Any]) -> str:
    """A key that is not taken yet: two that were cleaned may have become one."""
    number, unlike = 1, key
    while unlike in taken:
        number += 1
        unlike = f"{key} {number}"
    return unlike


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int)


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
