"""A model call in flight: its identity, and the `call` events that record it.

Made by answer.py; relay.py records streamed ones. On the hot path, hence dicts and no validation.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import Event, Message, new_id
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi

if TYPE_CHECKING:
    from cray_agents.runtime.observability.live_traces import CallTrace

LEAST_LOGPROB = -9999.0  # vLLM's own stand-in for minus infinity
NOT_SAMPLING = {"model", "stream", "stream_options", "request_id"}


@dataclass
class Call:
    """A request that samples. A `key` makes it repeatable; see idempotency.py.

    A canary keeps the calls of one `session` on one side. With `returns_samples` the answer also
    carries the exact tokens, as `samples`. `conversation_hash` is set where the conversation leads
    to its run; see store/conversations.py. `owner`: see ownership.py. `trace`: its span, if any
    are sent.
    """

    api: SamplingApi
    exchange: EngineCall
    messages: list[Message]
    run_id: str
    session: str
    conversation_hash: str | None = None
    key: str | None = None
    fingerprint: str = ""
    returns_samples: bool = False
    tags: list[str] = field(default_factory=list)
    owner: str = ""
    trace: "CallTrace | None" = None
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)

    @property
    def id(self) -> str:
        """The answer's id."""
        return self.api.id_prefix + self.exchange.id

    @property
    def has_tokens(self) -> bool:
        """True once any token was sampled."""
        return any(sample.token_ids for sample in self.exchange.samples)

    def samples_member(self) -> bytes:
        """Return the answer's JSON member `samples`, with a comma before it."""
        samples = [
            {
                "prompt_token_ids": s.prompt_token_ids,
                "token_ids": s.token_ids,
                "logprobs": s.logprobs,
            }
            for s in self.exchange.samples
        ]
        return b',"samples":' + orjson.dumps(samples)

    def answer_events(self, answer: Body, reply: bytes) -> list[Event]:
        """Return the events of a call that was answered in one piece."""
        return self._events(self.api.parse_answer(answer), None, reply)

    def stream_events(self, data: list[Body], cut: str | None, reply: bytes | None) -> list[Event]:
        """Return the events of a streamed call; `cut` is the reason if the stream broke off."""
        samples = len(self.exchange.samples) or 1
        return self._events(self.api.parse_stream(data, samples), cut, reply)

    def _events(
        self, messages: Sequence[Message], cut: str | None, reply: bytes | None
    ) -> list[Event]:
        """Return an event per sampled sequence. `messages` belong to the last sequences."""
        samples = self.exchange.samples or [SampledSequence([], [], [])]
        empty = [{"role": "assistant", "content": None}] * (len(samples) - len(messages))
        base = self.id
        if cut is not None and self.key is not None:  # a repeat will use the id itself
            base = f"{base}-{new_id('cut')}"
        events = []
        for index, (sample, message) in enumerate(zip(samples, [*empty, *messages], strict=False)):
            call_id = f"{base}-{index}" if index else base
            events.append(self._event(call_id, sample, message, cut))
        if self.key is not None and cut is None and reply is not None:
            replay = {"fingerprint": self.fingerprint, "reply": reply.decode()}
            events[0] = events[0].model_copy(update={"body": events[0].body | replay})
        return events

    def _event(
        self, call_id: str, sample: SampledSequence, message: Message, cut: str | None
    ) -> Event:
        request = self.exchange.request
        finish = sample.finish_reason
        if finish == "stop" and message.get("tool_calls"):
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
        if self.tags:
            body["tags"] = self.tags
        if self.owner:
            body["owner"] = self.owner
        if self.conversation_hash is not None and cut is None:
            body["asked"] = self.conversation_hash
        return Event(id=call_id, run_id=self.run_id, kind="call", body=body)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
