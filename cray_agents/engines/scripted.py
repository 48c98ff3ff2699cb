"""ScriptedEngine: an engine that gives prepared answers, to test agents, loops and pools.

    engine = ScriptedEngine([tool_call("calculator", expression="2 + 2"), "4"])
    run = await agent.override(engine=engine).run("What is 2 + 2?")
    assert engine.requests[1]["messages"][-1]["content"] == "4"

`override` makes a copy, so the tested agent does not change. The same engine answers its
sub-agents and the agents it hands over to. See replay.py for answers recorded from a real model,
and no_real_models.py for a guard against real models in tests.

The answers have OpenAI's shapes, with token ids (the bytes of the text) and logprobs. The engine
implements both `ChatEngine` and `Engine` (ports.py).
"""

import asyncio
import copy
import functools
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import EngineError, SwapError
from cray_agents.ports import EngineCall, PromptScore, SampledSequence
from cray_agents.records import Message, WeightChange, canonical, digest

FixedReply = str | dict[str, Any] | list[dict[str, Any]] | BaseException
Script = Callable[..., FixedReply | Awaitable[FixedReply]]
Reply = FixedReply | Script

_CHAT = "/v1/chat/completions"
_LOGPROB = -0.5  # of every sampled token
_CHUNK = 8  # characters of text in a streamed chunk


def tool_call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return a reply, or an item of a list reply, that calls a tool."""
    return {"name": name, "arguments": arguments}


class ScriptedEngine:
    """An engine that answers each request with the next reply, or all with one callable.

    A reply is a text; a tool call `{"name": ..., "arguments": dict or JSON text}` or a list of
    them; a whole assistant message (a dict with `role`); an exception to raise; or a callable,
    sync or async, that gets `(request)` or `(request, version)` and returns one of these. An
    exhausted script raises EngineError. `requests` are all requests, unchanged.

    `drift` is added to every logprob of `score`, so that a probe does not match. `delay` is the
    seconds that an answer takes. `offered` are jobs that offer their weights before they publish
    them, and `received` those that it took.
    """

    def __init__(
        self, replies: Iterable[Reply] | Script = (), *, drift: float = 0.0, delay: float = 0.0
    ) -> None:
        self._function = replies if callable(replies) else None
        self._replies = [] if callable(replies) else list(replies)
        self._position = 0
        self.requests: list[dict[str, Any]] = []
        self.loaded: list[str] = []  # versions, in order
        self.version = ""
        self.checkpoint: Path | None = None
        self.drift = drift
        self.delay = delay
        self.load_note = ""
        self.asleep = 0  # the level of its sleep
        self.offered: set[str] = set()
        self.received: list[str] = []
        self._early: dict[str, float] = {}
        self._proven = asyncio.Event()  # set while the loaded version may answer
        self._proven.set()

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next reply as a chat completion."""
        message = await self._next_message(request)
        sampled, prompt = _tokens(message), _prompt_tokens(request)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(message),
            "token_ids": sampled,
            "logprobs": _logprobs(sampled),
        }
        return self._envelope("chat.completion", request) | {
            "choices": [choice],
            "usage": _usage(prompt, sampled),
            "prompt_token_ids": prompt,
        }

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the next reply as chunks: the role, text or tool calls in pieces, usage."""
        message = await self._next_message(request)
        sampled, prompt = _tokens(message), _prompt_tokens(request)
        head = self._envelope("chat.completion.chunk", request)
        yield head | {
            "choices": [_delta({"role": "assistant", "content": ""})],
            "prompt_token_ids": prompt,
        }
        pieces = _pieces(message)
        share = -(-len(sampled) // len(pieces))
        for number, piece in enumerate(pieces):
            tokens = sampled[number * share : (number + 1) * share]
            delta = _delta(piece) | {"token_ids": tokens, "logprobs": _logprobs(tokens)}
            if number == len(pieces) - 1:
                delta["finish_reason"] = _finish_reason(message)
            yield head | {"choices": [delta]}
        yield head | {"choices": [], "usage": _usage(prompt, sampled)}

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Answer a chat completion, see `Engine.answer`. Raises EngineError for other APIs.

        All `n` choices are the same reply.
        """
        if exchange.path != _CHAT:
            raise EngineError(
                f"a scripted engine answers {_CHAT} alone, not {exchange.path}", status=400
            )
        exchange.samples = [
            SampledSequence([], [], []) for _ in range(exchange.request.get("n") or 1)
        ]
        if not exchange.streams:
            completion = await self.chat(exchange.request) | await self._stamp(exchange)
            yield orjson.dumps(
                _drop_unrequested(_collect_samples(exchange.samples, completion), exchange.request)
            )
            return
        async for chunk in self.stream(exchange.request):
            stamped = chunk | await self._stamp(exchange)
            visible = _drop_unrequested(
                _collect_samples(exchange.samples, stamped), exchange.request
            )
            if visible["choices"] or _wants_usage(exchange.request):
                yield b"data: " + orjson.dumps(visible) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """Load a checkpoint's version. With `keep`, answers in flight pause until `resume`.

        Raises SwapError if there is no such directory.
        """
        if keep:
            self._proven.clear()
        if not checkpoint.is_dir():
            raise SwapError(f"{checkpoint} is not a directory")
        self.checkpoint, self.version = checkpoint, version
        self.loaded.append(version)
        early, self._early = self._early, {}
        return {"pause": 0.0, "load": 0.0} | early

    async def is_offered(self, job: str) -> bool:
        """Return True for a job in `offered`."""
        return job in self.offered

    async def receive(self, job: str, like: Path) -> None:
        """Take the weights of a job in `offered`; the next `load` says that it did."""
        if job not in self.offered:
            raise SwapError(f"{job} does not offer its weights")
        self.checkpoint, self.version = None, ""
        self.received.append(job)
        self._early = {"early": 0.0}

    async def resume(self) -> None:
        """Continue the paused answers."""
        self._proven.set()

    async def admit(self, version: str) -> None:
        """Do nothing: only the pool that has this object sends it requests."""

    async def refuse(self, version: str = "") -> dict[str, int]:
        """Return {}: the pool knows its own requests."""
        return {}

    async def sleep(self, level: int) -> None:
        """Answer nothing until `wake`."""
        self.asleep = level

    async def wake(self, checkpoint: Path, version: str) -> None:
        """End the sleep; at level 2 the weights are gone."""
        if self.asleep == 2:
            self.checkpoint, self.version = None, ""
        self.asleep = 0

    async def load_adapter(self, adapter: Path, name: str) -> "ScriptedEngine":
        """Return a copy of the engine that has loaded the checkpoint and shares all else."""
        adapted = copy.copy(self)
        await adapted.load(adapter.parent, name.partition(" ")[0])
        return adapted

    async def unload_adapter(self, name: str) -> None:
        """Do nothing: the copy is garbage-collected."""

    async def score(self, prompts: list[list[int]]) -> list[PromptScore]:
        """Return the scores of the loaded checkpoint's own probe, with logprobs plus `drift`.

        Raises EngineError for a prompt that is not in its `manifest.json`.
        """
        known: dict[tuple[int, ...], PromptScore] = {}
        manifest = self.checkpoint / "manifest.json" if self.checkpoint else None
        if manifest is not None and manifest.exists():
            for prompt in json.loads(manifest.read_text())["probe"]:
                moved = [value + self.drift for value in prompt["logprobs"]]
                known[tuple(prompt["token_ids"])] = PromptScore(moved, prompt.get("top", []))
        try:
            return [known[tuple(prompt)] for prompt in prompts]
        except KeyError as error:
            raise EngineError(f"{manifest} has no probe for the prompt {error}") from None

    async def _stamp(self, exchange: EngineCall) -> dict[str, Any]:
        """Record the version of the next tokens; return the answer's id and model."""
        await self._proven.wait()
        now = self.version or exchange.version
        for sample in exchange.samples:
            before = sample.seams[-1].model if sample.seams else sample.version
            if not before:
                sample.version = exchange.version = now
            elif sample.token_ids and before != now:
                sample.seams.append(WeightChange(at=len(sample.token_ids), model=now))
        return {"id": f"chatcmpl-{exchange.id}", "model": exchange.version}

    async def _next_message(self, request: dict[str, Any]) -> Message:
        number = len(self.requests)
        self.requests.append(request)
        reply: Reply | None = self._function
        if reply is None:
            if self._position >= len(self._replies):
                raise EngineError(
                    f"the script holds {len(self._replies)} replies, and request {number + 1} came"
                )
            reply = self._replies[self._position]
            self._position += 1
        if self.delay:
            await asyncio.sleep(self.delay)
        if callable(reply):
            result = reply(request, self.version) if _wants_version(reply) else reply(request)
            reply = await result if inspect.isawaitable(result) else result
        if isinstance(reply, BaseException):
            raise reply
        return _message(reply, number)

    def _envelope(self, kind: str, request: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-scripted-{len(self.requests)}",
            "object": kind,
            "created": 0,
            "model": self.version or request.get("model", "scripted"),
        }


@functools.lru_cache
def _wants_version(script: Script) -> bool:
    return len(inspect.signature(script).parameters) > 1


def _message(reply: Any, number: int) -> Message:
    if isinstance(reply, str):
        return {"role": "assistant", "content": reply}
    if isinstance(reply, dict) and "role" in reply:
        return reply
    calls = [reply] if isinstance(reply, dict) else reply
    if not isinstance(calls, list) or not all(isinstance(c, dict) and "name" in c for c in calls):
        raise EngineError(
            f"reply {number + 1} of the script is {reply!r}: a text, tool calls, a message, an "
            "exception or a callable that returns one of these is needed"
        )
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": str(call.get("id") or f"call_{digest([number, index], 8)}"),
                "type": "function",
                "function": {"name": call["name"], "arguments": _arguments(call)},
            }
            for index, call in enumerate(calls)
        ],
    }


def _arguments(call: dict[str, Any]) -> str:
    arguments = call.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _finish_reason(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _pieces(message: Message) -> list[dict[str, Any]]:
    """Split a message into deltas: text in short chunks, each tool call's name, then arguments."""
    text = message.get("content") or ""
    pieces: list[dict[str, Any]] = [
        {"content": text[start : start + _CHUNK]} for start in range(0, len(text), _CHUNK)
    ]
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        rest = {"index": index, "function": {"arguments": function["arguments"]}}
        pieces += [{"tool_calls": [opening]}, {"tool_calls": [rest]}]
    return pieces or [{}]


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _tokens(message: Message) -> list[int]:
    """Return a token for each byte of a message's text, and of its tool calls as JSON."""
    written = (message.get("content") or "").encode()
    if message.get("tool_calls"):
        written += canonical([call["function"] for call in message["tool_calls"]])
    return list(written)


def _prompt_tokens(request: dict[str, Any]) -> list[int]:
    return list(canonical(request.get("messages", [])))


def _logprobs(tokens: list[int]) -> dict[str, Any]:
    return {
        "content": [
            {"token": chr(token), "logprob": _LOGPROB, "bytes": [token], "top_logprobs": []}
            for token in tokens
        ]
    }


def _usage(prompt: list[int], sampled: list[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "total_tokens": len(prompt) + len(sampled),
    }


def _collect_samples(samples: list[SampledSequence], part: dict[str, Any]) -> dict[str, Any]:
    """Add the tokens of a completion or chunk to `samples`; return it with a choice per sample."""
    choices = [
        {**choice, "index": index} for choice in part["choices"] for index in range(len(samples))
    ]
    for sample in samples:
        sample.prompt_token_ids = part.get("prompt_token_ids") or sample.prompt_token_ids
    for choice in choices:
        sample = samples[choice["index"]]
        sample.token_ids += choice.get("token_ids") or ()
        for token in (choice.get("logprobs") or {}).get("content") or ():
            sample.logprobs.append(token["logprob"])
        sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    return {**part, "choices": choices}


def _drop_unrequested(part: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Remove the tokens and logprobs from an answer, unless the client requested them."""
    if not request.get("return_token_ids"):
        part.pop("prompt_token_ids", None)
        for choice in part["choices"]:
            choice.pop("token_ids", None)
    if not request.get("logprobs"):
        for choice in part["choices"]:
            choice["logprobs"] = None
    return part


def _wants_usage(request: dict[str, Any]) -> bool:
    return bool((request.get("stream_options") or {}).get("include_usage"))
