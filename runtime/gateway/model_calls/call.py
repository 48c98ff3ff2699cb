"""One model call on its way: what names it, and the `call` events that the store keeps of it.

Made by answers.py; relay.py ends it for a stream. The hot path, hence dicts and no validation.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import Event, Message, new_id
from cray_agents.runtime.gateway.model_calls.apis import Body, SamplingApi

LEAST_LOGPROB = -9999.0  # what vLLM itself writes for minus infinity
NOT_SAMPLING = {"model", "stream", "stream_options", "request_id"}


@dataclass
class Call:
    """A request that samples. `key` makes it repeatable: see repeats.py.

    `session`: what a canary keeps together. `tells`: whether the client wants the exact tokens in
    its answer, as `samples`. `asked` is the hash of its conversation, if its run is found by that;
    see conversations.py. `owner`: see ownership.py.
    """

    door: SamplingApi
    exchange: EngineCall
    messages: list[Message]
    run_id: str
    session: str
    asked: str | None = None
    key: str | None = None
    fingerprint: str = ""
    tells: bool = False
    tags: list[str] = field(default_factory=list)
    owner: str = ""
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)

    @property
    def id(self) -> str:
        """The answer's id."""
        return self.door.prefix + self.exchange.id

    @property
    def sampled(self) -> bool:
        """Whether any token came."""
        return any(sample.token_ids for sample in self.exchange.samples)

    def samples(self) -> bytes:
        """The member `samples` for an answer whose client wants it, with a comma before it."""
        told = [
            {
                "prompt_token_ids": s.prompt_token_ids,
                "token_ids": s.token_ids,
                "logprobs": s.logprobs,
            }
            for s in self.exchange.samples
        ]
        return b',"samples":' + orjson.dumps(told)

    def whole(self, answer: Body, reply: bytes) -> list[Event]:
        """The events of a call that was answered in one piece."""
        return self._events(self.door.said(answer), None, reply)

    def streamed(self, data: list[Body], cut: str | None, reply: bytes | None) -> list[Event]:
        """The events of a call whose stream had these data; `cut`: why it has no end."""
        samples = len(self.exchange.samples) or 1
        return self._events(self.door.streamed(data, samples), cut, reply)

    def _events(
        self, messages: Sequence[Message], cut: str | None, reply: bytes | None
    ) -> list[Event]:
        """An event per sampled sequence; the last ones are those that the messages tell of."""
        samples = self.exchange.samples or [SampledSequence([], [], [])]
        untold = [{"role": "assistant", "content": None}] * (len(samples) - len(messages))
        base = self.id
        if cut is not None and self.key is not None:  # the id is the repeat's to use
            base = f"{base}-{new_id('cut')}"
        events = []
        for index, (sample, message) in enumerate(zip(samples, [*untold, *messages], strict=False)):
            call_id = f"{base}-{index}" if index else base
            events.append(self._event(call_id, sample, message, cut))
        if self.key is not None and cut is None and reply is not None:
            kept = {"fingerprint": self.fingerprint, "reply": reply.decode()}
            events[0] = events[0].model_copy(update={"body": events[0].body | kept})
        return events

    def _event(
        self, call_id: str, sample: SampledSequence, message: Message, cut: str | None
    ) -> Event:
        request = self.exchange.request
        finish = sample.finish_reason
        if finish == "stop" and message.get("tool_calls"):
            finish = "tool_calls"
        left_out = NOT_SAMPLING | self.door.content
        body: dict[str, Any] = {
            "id": call_id,
            "run_id": self.run_id,
            "api": self.door.path,
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
        if self.asked is not None and cut is None:
            body["asked"] = self.asked
        return Event(id=call_id, run_id=self.run_id, kind="call", body=body)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB
