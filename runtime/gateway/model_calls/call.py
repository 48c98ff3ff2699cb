"""A model call in flight: its identity, and the `call` events that record it.

Made by answer.py; relay.py records streamed ones. On the hot path, hence dicts and no validation.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from cray_agents.errors import CrayError
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import Event, Message, new_id
from cray_agents.runtime.gateway.http.error_envelope import LONGEST, without_paths
from cray_agents.runtime.gateway.model_calls.admission import Ticket
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi
from cray_agents.runtime.gateway.model_calls.idempotency import (
    SAMPLE_FIELDS,
    InFlightKey,
    replay_of,
    samples_member,
)
from cray_agents.runtime.store.conversations import Continuation

if TYPE_CHECKING:
    from cray_agents.runtime.scans.text_scanners import Blocks
    from cray_agents.runtime.telemetry.live_traces import CallTrace

LEAST_LOGPROB = -9999.0  # vLLM's own stand-in for minus infinity
NOT_SAMPLING = {"model", "stream", "stream_options", "request_id"}
#: Anthropic's stop reasons -> OpenAI's finish reasons.
STOP_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
DATA = b"data: {"  # beginning of the line of an event that carries an object
Piece = bytes | CrayError | None  # of a stream: whole events; the error that ended it; the end


@dataclass
class Call:
    """A request that samples. A `key` makes it repeatable; see idempotency.py.

    A canary keeps the calls of one `session` on one side. With `returns_samples` the answer also
    carries the exact tokens, as `samples`. `conversation_hash` is set where the conversation leads
    to its run, and `continuation` where it found one; see store/conversations.py. `named`: the
    client named the run. `retry`: the client's library says that it repeats a request.
    `in_flight`: see idempotency.py. `owner`: see ownership.py. `trace`: its span, if any are sent.
    `blocks`: what may withhold its answer. `ticket`: its place in the queue, once it is let in.
    """

    api: SamplingApi
    exchange: EngineCall
    messages: list[Message]
    run_id: str
    session: str
    conversation_hash: str | None = None
    continuation: Continuation | None = None
    named: bool = False
    retry: bool = False
    in_flight: InFlightKey | None = None
    key: str | None = None
    fingerprint: str = ""
    returns_samples: bool = False
    tags: list[str] = field(default_factory=list)
    owner: str = ""
    trace: "CallTrace | None" = None
    blocks: "Blocks | None" = None
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    ticket: Ticket = field(init=False)

    @property
    def id(self) -> str:
        """The answer's id."""
        return self.api.id_prefix + self.exchange.id

    @property
    def has_tokens(self) -> bool:
        """True once any token was sampled."""
        return any(sample.token_ids for sample in self.exchange.samples)

    @property
    def choices(self) -> int:
        """The number of sequences that the client asks for."""
        return choices_of(self.exchange.request)

    @property
    def versions(self) -> set[str]:
        """The versions that sampled; without samples the one that was asked."""
        samples, version = self.exchange.samples, self.exchange.version
        return {sample.version or version for sample in samples} or {version}

    def leave(self) -> None:
        """End the call, whatever its outcome. Safe to call twice."""
        if self.continuation is not None:
            self.continuation.end()
        if self.in_flight is not None:
            self.in_flight.leave()

    def samples_member(self) -> bytes:
        """Return the answer's JSON member `samples`, with a comma before it."""
        samples = self.exchange.samples
        return samples_member({name: getattr(s, name) for name in SAMPLE_FIELDS} for s in samples)

    def samples_event(self) -> bytes:
        """Return the event of a stream that carries `samples`; nothing if they are not wanted."""
        if not self.returns_samples:
            return b""
        head = orjson.dumps({"id": self.id, "model": self.exchange.version, "choices": []})
        return b"data: " + head[:-1] + self.samples_member() + b"}\n\n"

    def answer_events(self, answer: Body, reply: bytes) -> list[Event]:
        """Return the events of a call that was answered in one piece."""
        return self._events(self.api.parse_answer(answer), [answer], None, reply)

    def messages_of(self, reply: bytes) -> list[Message]:
        """Return the assistant's messages of a whole answer, as the client reads it."""
        if self.exchange.streams:
            return self.api.parse_stream(_parse_data(reply), self.choices)
        return self.api.parse_answer(orjson.loads(reply))

    def stream_events(self, stream: bytes, cut: str | None, end: Piece) -> list[Event]:
        """Return the events of a streamed call; `cut` is the reason if the stream broke off."""
        data = _parse_data(stream)
        samples = len(self.exchange.samples) or self.choices
        return self._events(self.api.parse_stream(data, samples), data, cut, end)

    def _events(
        self, messages: Sequence[Message], data: Sequence[Body], cut: str | None, end: Piece
    ) -> list[Event]:
        """Return an event per sampled sequence. `messages` belong to the last sequences."""
        samples = self.exchange.samples or [SampledSequence([], [], []) for _ in messages]
        reasons = _client_reasons(data)
        empty = [{"role": "assistant", "content": None}] * (len(samples) - len(messages))
        base = self.id
        if cut is not None and self.key is not None:  # a repeat will use the id itself
            base = f"{base}-{new_id('cut')}"
        events = []
        for index, (sample, message) in enumerate(zip(samples, [*empty, *messages], strict=False)):
            call_id = f"{base}-{index}" if index else base
            event = self._event(call_id, sample, message, cut, reasons.get(index))
            if isinstance(end, CrayError):
                event.body["error"] = without_paths(str(end)[:LONGEST])
            events.append(event)
        if not events:
            raise ValueError("no choice is in it")
        if self.key is not None and cut is None and isinstance(end, bytes):
            replay = replay_of(end, events[0].body) | {"fingerprint": self.fingerprint}
            events[0] = events[0].model_copy(update={"body": events[0].body | replay})
        return events

    def _event(
        self,
        call_id: str,
        sample: SampledSequence,
        message: Message,
        cut: str | None,
        reason: str | None,
    ) -> Event:
        """Return an event. `reason`: the finish reason that the client read, if it read one."""
        request = self.exchange.request
        finish = reason or sample.finish_reason
        if reason is None and finish == "stop" and message.get("tool_calls"):
            finish = "tool_calls"
        left_out = NOT_SAMPLING | self.api.conversation_fields
        body: dict[str, Any] = {
            "id": call_id,
            "run_id": self.run_id,
            "api": self.api.path,
            "model": sample.version or self.exchange.version,
            "messages": self.messages,
            "message": message,
            "tools": request.get("tools") or [],
            "prompt_token_ids": sample.prompt_token_ids,
            "token_ids": sample.token_ids,
            "logprobs": [_finite(logprob) for logprob in sample.logprobs],
            "sampling": {k: v for k, v in request.items() if k not in left_out},
            "finish_reason": cut if cut == "error" or finish in (None, "abort") else finish,
            "started": self.started,
            "seconds": time.perf_counter() - self.clock,
        }
        if sample.seams:
            body["seams"] = [seam.model_dump() for seam in sample.seams]
        if sample.routes is not None:
            body["routes"] = sample.routes
        if sample.cached_tokens:
            body["cached_tokens"] = sample.cached_tokens
        if self.retry:
            body["retry"] = True
        if self.tags:
            body["tags"] = self.tags
        if self.owner:
            body["owner"] = self.owner
        if self.conversation_hash is not None and cut is None:
            body["asked"] = self.conversation_hash
        return Event(id=call_id, run_id=self.run_id, kind="call", body=body)


def choices_of(request: Body) -> int:
    """Return the number of sequences that a request asks for: `n` of each prompt."""
    prompt, n = request.get("prompt"), request.get("n")
    single = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    return (1 if single else len(prompt or ())) * (n if isinstance(n, int) else 1)


def _parse_data(stream: bytes) -> list[Body]:
    """Return the JSON objects that a stream's events carry."""
    objects = [line[6:] for line in stream.split(b"\n") if line.startswith(DATA)]
    data: list[Body] = orjson.loads(b"[" + b",".join(objects) + b"]")
    return data


def _client_reasons(data: Sequence[Body]) -> dict[int, str]:
    """Return the finish reasons that the client read, by choice. The responses API has none."""
    reasons = {}
    for part in data:
        for choice in part.get("choices") or ():
            if choice.get("finish_reason"):
                reasons[choice.get("index", 0)] = choice["finish_reason"]
        delta = part.get("delta")
        reason = (delta if isinstance(delta, dict) else part).get("stop_reason")
        if reason in STOP_REASONS:
            reasons[0] = STOP_REASONS[reason]
    return reasons


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
