"""Chat completions: read a server's answers, whole or in chunks, into our records.

Called by agent/conversation.py. A gateway reports exact tokens as `samples`. vLLM reports them as
`prompt_token_ids` and, per choice, `token_ids` and `logprobs`. With other servers they stay empty.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import EngineError
from cray_agents.records import Message, ModelCall

#: Keys of a message that stay when empty. Other empty ones would confuse a chat template.
_ALWAYS_KEPT = ("role", "content")
#: Request keys that are no settings of sampling.
_NOT_SAMPLING = {"model", "messages", "tools", "stream", "stream_options", "extra_headers"}


def read_completion(
    completion: Mapping[str, Any],
    request: Mapping[str, Any],
    run_id: str,
    started: float,
    seconds: float,
) -> ModelCall:
    """Make the record of a request and its answer. Raises EngineError for an unknown shape."""
    choice = first_choice(completion)
    try:
        sample = (completion.get("samples") or [_sample(completion, choice)])[0]
        return ModelCall(
            id=str(completion.get("id") or ""),
            run_id=run_id,
            model=str(completion.get("model") or request["model"]),
            messages=request["messages"],
            message=tidy(choice["message"]),
            tools=request.get("tools") or [],
            prompt_token_ids=sample["prompt_token_ids"],
            token_ids=sample["token_ids"],
            logprobs=sample["logprobs"],
            sampling={k: v for k, v in request.items() if k not in _NOT_SAMPLING},
            finish_reason=choice.get("finish_reason"),
            started=started,
            seconds=seconds,
        )
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        raise EngineError(f"the model server's answer has no known shape: {error}") from error


def _sample(completion: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the exact tokens as vLLM reports them; empty from servers without them."""
    logprobs = (choice.get("logprobs") or {}).get("content") or ()
    return {
        "prompt_token_ids": completion.get("prompt_token_ids") or [],
        "token_ids": choice.get("token_ids") or [],
        "logprobs": [entry["logprob"] for entry in logprobs],
    }


def first_choice(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice. Raises EngineError if it has no message."""
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise EngineError("the model server's answer holds no message")
    return choice


def tidy(message: Mapping[str, Any]) -> Message:
    """Return an assistant's message without empty fields, with complete tool calls."""
    kept = {k: v for k, v in message.items() if k in _ALWAYS_KEPT or v not in (None, "", [], {})}
    if "tool_calls" in kept:
        calls = enumerate(call for call in kept["tool_calls"] if isinstance(call, dict))
        kept["tool_calls"] = [_complete_call(call, position) for position, call in calls]
        kept["content"] = kept.get("content") or None  # streams give "", other answers None
    return {"role": "assistant", "content": None, **kept}


def _complete_call(call: Mapping[str, Any], position: int) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or ""
    return {
        **call,
        "id": call.get("id") or f"call_{position}",
        "type": "function",
        "function": {
            "name": function.get("name") or "",
            # some servers send the object itself
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }


class Assembly:
    """A completion assembled from the chunks of a stream."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self._token_ids: list[int] = []
        self._logprobs: list[Any] = []
        self._finish: str | None = None

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add the next chunk; return its text, if any. Raises EngineError."""
        try:
            return self._add(chunk)
        except (AttributeError, KeyError, TypeError) as error:
            raise EngineError(f"the model server's chunk has no known shape: {error}") from error

    def _add(self, chunk: Mapping[str, Any]) -> str:
        for key in ("id", "model", "prompt_token_ids", "samples", "usage"):
            if chunk.get(key):
                self._head[key] = chunk[key]
        text = ""
        for choice in chunk.get("choices") or ():
            self._token_ids += choice.get("token_ids") or ()
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self._finish = choice.get("finish_reason") or self._finish
            text += self._merge(choice.get("delta") or {})
        return text

    def _merge(self, delta: Mapping[str, Any]) -> str:
        for key, value in delta.items():
            if isinstance(value, str) and key != "role":
                self._message[key] = (self._message.get(key) or "") + value
        self._merge_calls(delta.get("tool_calls") or ())
        return delta.get("content") or ""

    def _merge_calls(self, deltas: Iterable[Mapping[str, Any]]) -> None:
        for delta in deltas:
            index = delta.get("index", len(self._calls))
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = self._calls.setdefault(index, empty)
            call["id"] = delta.get("id") or call["id"]
            function = delta.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def completion(self) -> dict[str, Any]:
        """Return the answer as if it had not been streamed.

        Raises EngineError if the stream stopped before its end.
        """
        if self._finish is None:
            raise EngineError("the model server's stream ended in the middle of an answer")
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self._finish,
            "token_ids": self._token_ids,
            "logprobs": {"content": self._logprobs},
        }
        return {**self._head, "object": "chat.completion", "choices": [choice]}
