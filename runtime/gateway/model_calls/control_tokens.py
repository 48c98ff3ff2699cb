"""Control tokens: tag a call whose texts spell a special token of its model, such as `<|im_end|>`.

vLLM makes the token of it, so a tool's result can end its own turn and begin another. The record
has what the model read; the tag tells whoever trains on it. Called by answer.py. What the platform
renders itself has no such tokens: see runtime/datasets/chat_template.py.
"""

import asyncio
import re
from collections.abc import Iterable

import orjson

from cray_agents.errors import CrayError
from cray_agents.records import CONTROL_TOKENS, Event
from cray_agents.runtime.registry.registry import Registry

_NONE = "(?!)"  # matches nothing


class ControlTokens:
    """The control tokens of each version, read once from its tokenizer.json."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._patterns: dict[str, re.Pattern[str]] = {}

    async def learn(self, versions: Iterable[str]) -> None:
        """Read the control tokens of these versions, unless they are known."""
        for version in versions:
            if version not in self._patterns:
                self._patterns[version] = await asyncio.to_thread(self._read, version)

    def tag(self, events: Iterable[Event]) -> None:
        """Tag the events of one call, if its messages or tools hold a control token.

        Each event's version is known.
        """
        text, matches = "", dict[str, bool]()
        for event in events:
            body, version = event.body, event.body["model"]
            text = text or repr([body["messages"], body["tools"]])
            if version not in matches:
                matches[version] = self._patterns[version].search(text) is not None
            if matches[version]:
                body["tags"] = [*body.get("tags", []), CONTROL_TOKENS]

    def _read(self, version: str) -> re.Pattern[str]:
        """Return what matches the control tokens in a `repr`; nothing where no file names them."""
        try:
            folder = self._registry.home.checkpoint(self._registry.resolve(version).checkpoint)
            added = orjson.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
            special = [repr(token["content"])[1:-1] for token in added if token["special"]]
        except (OSError, CrayError, ValueError, LookupError, TypeError):
            return re.compile(_NONE)
        return re.compile("|".join(map(re.escape, filter(None, special))) or _NONE)
