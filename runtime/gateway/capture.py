"""From an engine's answer, or its chunks, to the `call` events that the store keeps.

The engine is always asked for token ids and logprobs; what the client did not ask for is taken out
of its answer here. Called by chat.py and relay.py; the hot path, hence dicts and no validation.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from cray_agents.records import Event

LEAST_LOGPROB = -9999.0  # what vLLM itself writes for minus infinity
NOT_SAMPLING = {"messages", "tools", "model", "stream", "stream_options"}


def outgoing(request: dict[str, Any]) -> dict[str, Any]:
    """What the engine is asked: the client's request, plus the exact tokens."""
    return {**request, "return_token_ids": True, "logprobs": True}


@dataclass
class _Choice:
    """One of `n` answers, as far as it has come."""

    message: dict[str, Any] = field(default_factory=dict)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Capture:
    """One request on its way: collects what is sampled, and cleans what the client is shown.

    `version` is what would serve it now; the pool stamps the answer with what did.
    """

    def __init__(self, call_id: str, run_id: str, version: str, request: dict[str, Any]) -> None:
        self.call_id = call_id
        self.run_id = run_id
        self.version = version
        self._request = request
        self._wants_ids = bool(request.get("return_token_ids"))
        self._wants_logprobs = bool(request.get("logprobs"))
        self._wants_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self._prompt: list[int] = []
        self._choices: dict[int, _Choice] = {}
        self._started = time.time()
        self._clock = time.perf_counter()

    @property
    def sampled(self) -> bool:
        """Whether any token came."""
        return any(choice.token_ids for choice in self._choices.values())

    def completion(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Take a whole answer in; returns it as the client is to see it."""
        self._prompt = answer.get("prompt_token_ids") or []
        for choice in answer["choices"]:
            kept = self._tokens(choice)
            kept.message = {k: v for k, v in choice["message"].items() if v not in (None, [])}
        return self._shown(answer)

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Take a chunk in; returns what the client is to see, None if that is nothing."""
        self._prompt = chunk.get("prompt_token_ids") or self._prompt
        for choice in chunk.get("choices", ()):
            _merge(self._tokens(choice), choice.get("delta") or {})
        shown = self._shown(chunk)
        return None if self._is_empty(shown) else shown

    def events(self, finish_reason: str | None = None) -> list[Event]:
        """A `call` event per choice; `finish_reason` for those that did not come to an end."""
        seconds = time.perf_counter() - self._clock
        choices = self._choices or {0: _Choice()}
        return [
            self._event(index, choice, finish_reason, seconds)
            for index, choice in sorted(choices.items())
        ]

    def _tokens(self, choice: dict[str, Any]) -> _Choice:
        kept = self._choices.setdefault(choice.get("index", 0), _Choice())
        kept.token_ids += choice.get("token_ids") or ()
        for token in (choice.get("logprobs") or {}).get("content") or ():
            kept.logprobs.append(_finite(token["logprob"]))
        kept.finish_reason = choice.get("finish_reason") or kept.finish_reason
        return kept

    def _shown(self, answer: dict[str, Any]) -> dict[str, Any]:
        answer["id"] = self.call_id
        self.version = answer.setdefault("model", self.version)
        if not self._wants_ids:
            answer.pop("prompt_token_ids", None)
        for choice in answer.get("choices", ()):
            if not self._wants_ids:
                choice.pop("token_ids", None)
            if not self._wants_logprobs:
                choice["logprobs"] = None
        return answer

    def _is_empty(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk was made only for what the client did not ask for."""
        if not chunk.get("choices"):  # clients that did not ask for usage expect a choice
            return "usage" in chunk and not self._wants_usage
        return not chunk.get("usage") and not any(
            choice.get(name)
            for choice in chunk["choices"]
            for name in ("delta", "finish_reason", "logprobs", "token_ids")
        )

    def _event(
        self, index: int, choice: _Choice, finish_reason: str | None, seconds: float
    ) -> Event:
        call_id = f"{self.call_id}-{index}" if index else self.call_id
        request = self._request
        body = {
            "id": call_id,
            "run_id": self.run_id,
            "model": self.version,
            "messages": request["messages"],
            "message": _message(choice),
            "tools": request.get("tools") or [],
            "prompt_token_ids": self._prompt,
            "token_ids": choice.token_ids,
            "logprobs": choice.logprobs,
            "sampling": {k: v for k, v in request.items() if k not in NOT_SAMPLING},
            "finish_reason": choice.finish_reason or finish_reason,
            "started": self._started,
            "seconds": seconds,
        }
        return Event(id=call_id, run_id=self.run_id, kind="call", body=body)


def _merge(kept: _Choice, delta: dict[str, Any]) -> None:
    """Add a chunk's delta: texts grow, tool calls grow by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value or ():
                _merge_tool_call(kept.tool_calls.setdefault(part.get("index", 0), {}), part)
        elif isinstance(value, str) and name != "role":
            kept.message[name] = kept.message.get(name, "") + value
        elif value is not None:
            kept.message[name] = value


def _merge_tool_call(call: dict[str, Any], part: dict[str, Any]) -> None:
    function = call.setdefault("function", {"name": "", "arguments": ""})
    for name, value in (part.get("function") or {}).items():
        function[name] = function.get(name, "") + (value or "")
    call["id"] = part.get("id") or call.get("id", "")
    call["type"] = part.get("type") or call.get("type", "function")


def _message(choice: _Choice) -> dict[str, Any]:
    """The assistant's message as it would be sent back in the next request."""
    message = {"role": "assistant", "content": None, **choice.message}
    if choice.tool_calls:
        message["tool_calls"] = [choice.tool_calls[place] for place in sorted(choice.tool_calls)]
        message["content"] = message["content"] or None
    return message


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
