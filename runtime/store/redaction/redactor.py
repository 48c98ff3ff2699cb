"""Takes out of an event what must not be stored, before it is written, and says that it did.

Every text of a body is looked at, also in JSON within a text and across the pieces of a recorded
stream (replies.py); what is found becomes `[redacted:email]` or the like, counted in
body["redacted"]. A call that held any loses its exact tokens, for they would tell it. Ids, hashes
and names of models stay: they are how events find each other. The kinds: sensitive.py. Made by
compose.py from the configuration; called by store.py in `append`.
"""

import difflib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cray_agents.config import Config
from cray_agents.errors import ConfigError, StoreError
from cray_agents.records import Event
from cray_agents.runtime.store.redaction import replies
from cray_agents.runtime.store.redaction.sensitive import KINDS, Sensitive, Substitute, marked

Hook = Callable[[str], str]
# Of an object with fields of ours: which are kept as they are (None), and what lies within others.
# Where it is empty, anything may be, and the keys are texts too.
Kept = dict[str, Any]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_ESCAPED = re.compile(r"\\u00[2-7]")  # JSON in a text may hide an `@` so
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
    "task": {"id": None, "split": None},
    "trajectory": {
        "messages": _MESSAGE,
        "tools": _TOOLS,
        "turns": {"call_id": None, "tool_calls": {"id": None}, "call": _CALL},
    },
}
_KEPT: dict[str, Kept] = {"call": _CALL, "run": _RUN, "reward": _REWARD, "forget": _FIELDS}


class Redactor:
    """What is to be taken out: kinds of sensitive.py, own patterns by name, own functions.

    A kind with a colon, `package.module:function`, is a function from a text to the text that may
    be stored. Raises ConfigError for what is not known or cannot be used. Own patterns and
    functions see every text of every event: they are paid for with each.
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
        """The redactor a configuration asks for, if any. Raises ConfigError."""
        if not config.redact and not config.redact_patterns:
            return None
        return cls(config.redact, config.redact_patterns)

    def apply(self, event: Event) -> Event:
        """The event as it may be written; the same object where nothing was found.

        Raises StoreError if a function of the user's fails: then nothing may be written.
        """
        kept = _KEPT[event.kind]
        if not (self._own or self._suspicious(event.body, kept)):
            return event
        counts: Counter[str] = Counter()
        body: dict[str, Any] = self._within(event.body, kept, counts)
        if event.kind == "call":
            body = self._call(body, counts)
        if not counts:
            return event
        for earlier in event.body.get("redacted") or ():
            counts[earlier["kind"]] += earlier["count"]
        told = [{"kind": kind, "count": counts[kind]} for kind in sorted(counts)]
        return event.model_copy(update={"body": body | {"redacted": told}})

    def _suspicious(self, body: dict[str, Any], kept: Kept) -> bool:
        texts: list[str] = []
        _collect(body, kept, texts)
        reply = body.get("reply")
        if isinstance(reply, str):
            if replies.interleaved(body):
                return True
            texts.append(replies.without_samples(reply))
        text = "\n".join(texts)
        return self._known.suspicious(text) or _ESCAPED.search(text) is not None

    def _call(self, body: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
        """A call without what would tell its texts: its answer as it was sent, its tokens."""
        changes: dict[str, Any] = {}
        if isinstance(body.get("reply"), str):
            changes["reply"] = replies.cleaned(body["reply"], lambda text: self._text(text, counts))
        if not counts:
            return body
        if "reply" in changes:
            changes["reply"] = replies.without_tokens(changes["reply"])
        for name in ("messages", "message"):
            if name in body:
                changes[name] = _without_token_prompts(body[name])
        return body | changes | {name: [] for name in _TOKENS}

    def _within(self, value: Any, kept: Kept, counts: Counter[str]) -> Any:
        """A copy of a value with clean texts."""
        if isinstance(value, str):
            return self._text(value, counts)
        if isinstance(value, list):
            return [self._within(item, kept, counts) for item in value]
        if not isinstance(value, dict):
            return value
        clean: dict[str, Any] = {}
        for name, item in value.items():
            below: Kept | None = kept.get(name, {})
            key = name if kept else replies.fresh(self._text(name, counts), clean)
            clean[key] = item if below is None else self._within(item, below, counts)
        return clean

    def _text(self, text: str, counts: Counter[str]) -> str:
        """A clean text. One that is JSON is read as such, so that it is JSON afterwards too."""
        if text.lstrip()[:1] in ("{", "["):
            found: Counter[str] = Counter()
            try:
                value = self._within(json.loads(text), {}, found)
                text = json.dumps(value, ensure_ascii="\\u" in text) if found else text
            except (ValueError, RecursionError):  # no JSON, or too deep: then it is just a text
                return self._plain(text, counts)
            counts.update(found)
            return text
        return self._plain(text, counts)

    def _plain(self, text: str, counts: Counter[str]) -> str:
        for kind, substitute in self._substitutes:
            text, found = substitute(text)
            if found:
                counts[kind] += found
        return text


def _collect(value: Any, kept: Kept, texts: list[str]) -> None:
    """Append all texts of a value, but for what is kept as it is."""
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
    """Messages without prompts that were given as token ids."""
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
    mark = marked(name)
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
