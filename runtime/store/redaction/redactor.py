"""Redactor: replace sensitive text in an event before it is written, and count it there.

Every text of a body is searched, also JSON in a text, and texts split over the pieces of a recorded
stream. A match becomes `[redacted:email]` or the like, counted in body["redacted"]. A
call with a match loses its exact tokens, for they would reveal the text. Ids, hashes and names of
models stay, since events refer to each other by them. For the kinds see sensitive.py. Made by
server/gateway_parts.py and cli/screen.py from the configuration; called by store.py in `append`.
"""

import difflib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cray_agents.config import Config
from cray_agents.errors import ConfigError, StoreError
from cray_agents.records import Event
from cray_agents.runtime.store.redaction.sensitive import KINDS, Sensitive, Substitute, placeholder

Hook = Callable[[str], str]
# The known fields of an object: None keeps a field unchanged, a dict describes its value.
# The value of an empty dict is free, and its keys are redacted too.
Kept = dict[str, Any]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ESCAPED = re.compile(r"\\u00[2-7]")  # JSON in a text may escape an `@` like this
_TOKENS = ("prompt_token_ids", "token_ids", "logprobs")
_FIELDS: Kept = {"type": None}
_MESSAGE: Kept = {
    "role": None,
    "tool_call_id": None,
    "content": _FIELDS,
    "tool_calls": {"id": None, "type": None, "function": _FIELDS},
}
_TOOLS: Kept = {"type": None, "function": _FIELDS}
_CALL: Kept = {
    **dict.fromkeys(("id", "run_id", "api", "model", "asked", "fingerprint", "finish_reason")),
    **dict.fromkeys(_TOKENS),
    "redacted": None,
    "reply": None,
    "messages": _MESSAGE,
    "message": _MESSAGE,
    "tools": _TOOLS,
    "sampling": _FIELDS,
}
_REWARD: Kept = {"name": None, "source": None}
_RUN: Kept = {
    **dict.fromkeys(("id", "agent", "model", "stop_reason", "loop", "imported", "redacted")),
    "rewards": _REWARD,
    "error": {"type": None},
    "task": {"id": None, "split": None, "input": _MESSAGE},
    "trajectory": {
        "messages": _MESSAGE,
        "tools": _TOOLS,
        "turns": {"call_id": None, "tool_calls": {"id": None}, "call": _CALL},
    },
}
_KEPT: dict[str, Kept] = {"call": _CALL, "run": _RUN, "reward": _REWARD, "forget": _FIELDS}


class Redactor:
    """A redactor of kinds of sensitive.py, and of the user's own patterns and functions.

    A kind with a colon, `package.module:function`, is a function from a text to the text that may
    be stored. Raises ConfigError for unknown kinds and unusable patterns or functions. Own patterns
    and functions run on every text of every event, which costs time.
    """

    def __init__(self, kinds: Sequence[str], patterns: Mapping[str, str]) -> None:
        self._known = Sensitive(frozenset(kind for kind in kinds if ":" not in kind))
        for kind in self._known.kinds - set(KINDS):
            near = difflib.get_close_matches(kind, KINDS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"redact: unknown kind {kind!r}; {hint}there are {', '.join(KINDS)}, and a "
                "function of your own as package.module:function",
                param="redact",
            )
        self._own = [_own_pattern(name, pattern) for name, pattern in patterns.items()]
        self._own += [_own_function(kind) for kind in kinds if ":" in kind]
        self._substitutes = [*self._known.substitutes(), *self._own]

    @classmethod
    def of(cls, config: Config) -> "Redactor | None":
        """Return the redactor of a configuration, if it sets one. Raises ConfigError."""
        if not config.redact and not config.redact_patterns:
            return None
        return cls(config.redact, config.redact_patterns)

    def apply(self, event: Event) -> Event:
        """Return the redacted event; the same object if nothing matched.

        Raises StoreError if a function of the user fails; the event must then not be written.
        """
        kept = _KEPT[event.kind]
        if not (self._own or self._suspicious(event.body, kept)):
            return event
        counts: Counter[str] = Counter()
        body: dict[str, Any] = self._redact_value(event.body, kept, counts)
        if event.kind == "call":
            body = self._redact_call(body, counts)
        if not counts:
            return event
        for earlier in event.body.get("redacted") or ():
            counts[earlier["kind"]] += earlier["count"]
        report = [{"kind": kind, "count": counts[kind]} for kind in sorted(counts)]
        return event.model_copy(update={"body": body | {"redacted": report}})

    def _suspicious(self, body: dict[str, Any], kept: Kept) -> bool:
        texts: list[str] = []
        _collect(body, kept, texts)
        reply = body.get("reply")
        if isinstance(reply, str):
            if is_interleaved(body):
                return True
            texts.append(without_samples(reply))
        text = "\n".join(texts)
        return self._known.suspicious(text) or _ESCAPED.search(text) is not None

    def _redact_call(self, body: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
        """Redact a call's recorded reply and, after any match, remove its exact tokens."""
        changes: dict[str, Any] = {}
        if isinstance(body.get("reply"), str):
            changes["reply"] = redact_reply(
                body["reply"], lambda text: self._redact_text(text, counts)
            )
        if not counts:
            return body
        if "reply" in changes:
            changes["reply"] = without_tokens(changes["reply"])
        for name in ("messages", "message"):
            if name in body:
                changes[name] = _without_token_prompts(body[name])
        if "routes" in body:
            changes["routes"] = None
        return body | changes | {name: [] for name in _TOKENS}

    def _redact_value(self, value: Any, kept: Kept, counts: Counter[str]) -> Any:
        """Return a copy of a value with redacted texts."""
        if isinstance(value, str):
            return self._redact_text(value, counts)
        if isinstance(value, list):
            return [self._redact_value(item, kept, counts) for item in value]
        if not isinstance(value, dict):
            return value
        clean: dict[str, Any] = {}
        for name, item in value.items():
            below: Kept | None = kept.get(name, {})
            key = name if kept else unused_key(self._redact_text(name, counts), clean)
            clean[key] = item if below is None else self._redact_value(item, below, counts)
        return clean

    def _redact_text(self, text: str, counts: Counter[str]) -> str:
        """Return a redacted text. JSON is decoded first, so that the result is JSON too."""
        if text.lstrip()[:1] in ("{", "["):
            matches: Counter[str] = Counter()
            try:
                value = self._redact_value(json.loads(text), {}, matches)
                text = json.dumps(value, ensure_ascii="\\u" in text) if matches else text
            except (ValueError, RecursionError):  # no JSON, or too deep: treat it as plain text
                return self._redact_plain(text, counts)
            counts.update(matches)
            return text
        return self._redact_plain(text, counts)

    def _redact_plain(self, text: str, counts: Counter[str]) -> str:
        for kind, substitute in self._substitutes:
            text, count = substitute(text)
            if count:
                counts[kind] += count
        return text


def _collect(value: Any, kept: Kept, texts: list[str]) -> None:
    """Append all texts of a value except those of kept fields."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        if not kept:
            texts += value
        for name, item in value.items():
            below = kept.get(name, {})
            if below is not None:
                _collect(item, below, texts)
    elif isinstance(value, list):
        for item in value:
            _collect(item, kept, texts)


def _without_token_prompts(value: Any) -> Any:
    """Return messages without prompts that were given as token ids."""
    if isinstance(value, list):
        return [_without_token_prompts(message) for message in value]
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and any(isinstance(item, int | list) for item in content):
        return {**value, "content": [item for item in content if isinstance(item, str | dict)]}
    return value


def _own_pattern(name: str, pattern: str) -> tuple[str, Substitute]:
    if not _NAME.fullmatch(name) or name in KINDS:
        raise ConfigError(
            f"redact_patterns: {name!r} cannot name a pattern: letters, digits, _ and -, and none "
            f"of {', '.join(KINDS)}",
            param="redact_patterns",
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"redact_patterns: {name} = {pattern!r} is no regular expression: {error}",
            param="redact_patterns",
        ) from error
    if compiled.match(""):
        raise ConfigError(
            f"redact_patterns: {name} = {pattern!r} matches no text at all, and so everywhere",
            param="redact_patterns",
        )
    mark = placeholder(name)
    return name, lambda text: compiled.subn(lambda _: mark, text)


def _own_function(path: str) -> tuple[str, Substitute]:
    module, _, name = path.partition(":")
    try:
        hook: Hook = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"redact: {path!r} cannot be imported: {error}", param="redact"
        ) from error

    def substitute(text: str) -> tuple[str, int]:
        try:
            clean = hook(text)
        except Exception as error:
            raise StoreError(f"nothing is stored: {path} failed to redact: {error!r}") from error
        if not isinstance(clean, str):
            raise StoreError(f"nothing is stored: {path} returned {type(clean).__name__}, not str")
        return clean, int(clean != text)

    return name, substitute


# ---- replies: recorded answers, JSON or an event stream in a string
# A stream sends a text in pieces, and sensitive text may be split over several of them. So the
# pieces of a text are joined and redacted, and the result is put into the first.
Clean = Callable[[str], str]

_SAMPLES = ',"samples":'  # the gateway's own member, at the end of an answer or an event
_DATA = "data:"
# ids and fixed words of all APIs; below _FREE nothing is kept, for models or clients wrote it
_KEPT_IN_REPLIES = {
    "id", "item_id", "call_id", "tool_use_id", "object", "type", "role", "model", "status",
    "finish_reason", "stop_reason", "system_fingerprint", "service_tier",
}  # fmt: skip
_TOKENS_IN_REPLIES = {
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
            if name in _TOKENS_IN_REPLIES or (kept and name in _KEPT_IN_REPLIES):
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
            if name in _TOKENS_IN_REPLIES and isinstance(item, list | dict):
                value[name] = [] if isinstance(item, list) else None
            else:
                _drop_tokens(item)
    elif isinstance(value, list):
        for item in value:
            _drop_tokens(item)
