"""What the engine read and sampled, told by vLLM's API server to whoever asks by a header.

replica.py has vLLM take `Capture` as its middleware; vllm_engine.py sends the header and reads what
is appended to the answer. It works alike for every API that samples (chat, completions, responses,
Anthropic's messages), and costs a fraction of vLLM's own `logprobs` and `return_token_ids`, which
build and serialise an object per token.

vLLM makes a LogprobsProcessor for each sequence and hands it all that the engine core gives back;
`Keeper` takes its place for a captured request. Which weights sampled a token, the engine core says
with each step; `Stamped` takes it down. Read next: vllm_scheduler.py, the other half.
"""

import asyncio
from contextvars import ContextVar
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState

from cray_agents.runtime.vllm_plugins.adapters import unload_for_good
from cray_agents.runtime.vllm_plugins.scheduler import MARK

ASK = b"x-cray-capture"  # request header; its value names the request for ABORT
BODY = b"x-cray-body"  # response header: bytes of the answer proper; the samples follow them
VERSION = b"x-cray-version"  # of a stream: which weights sampled its first token
EVENT = b"event: cray.samples\ndata: "  # the last event of a stream
GATHER = 0.02  # seconds
ABORT = "/cray/abort/"  # + name: ends a request as if its client had left, but it is answered

UNMET = orjson.dumps(
    {
        "error": {
            "message": "no text fits the schema or grammar that the answer is to have: it refers "
            "to itself without an end, or leaves nothing that may come next",
            "type": "BadRequestError",
            "param": "response_format",
            "code": 400,
        }
    }
)

_asked: ContextVar["list[CapturedSequence] | None"] = ContextVar("asked", default=None)


TOLD = ("finish_reason", "logprobs", "name", "prompt_token_ids", "token_ids", "versions")


class CapturedSequence:
    """One sequence: `token_ids` and `logprobs` are parallel. `name` is vLLM's of the request.

    `versions`: from which token on which weights sampled. `constrained`: to a schema or grammar.
    """

    __slots__ = (*TOLD, "constrained")

    def __init__(self, name: str, prompt_token_ids: list[int], constrained: bool) -> None:
        self.name = name
        self.constrained = constrained
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.versions: list[tuple[int, str]] = []


class Keeper(LogprobsProcessor):  # type: ignore[misc]
    """Keeps what comes for one sequence; does vLLM's own work only if the client asked for it."""

    sampled: CapturedSequence
    shown: bool

    def update_from_output(self, output: Any) -> None:
        """Called by vLLM with each step's new tokens, those after a stop string cut off already."""
        sampled = self.sampled
        sampled.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            sampled.finish_reason = str(output.finish_reason)
        if self.shown:
            super().update_from_output(output)


class Stamped(RequestState):  # type: ignore[misc]
    """Stands where vLLM looks up RequestState."""

    seen: str | None = None

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        if isinstance(self.logprobs_processor, Keeper) and self.detokenizer.stop:
            self.make_request_output = self._told_output  # costs nothing where nothing stops

    def _told_output(
        self, new_token_ids: Any, pooled: Any, finish_reason: Any, *more: Any, **by: Any
    ) -> Any:
        """Called by vLLM with each step, once it has looked for stop strings.

        One that the last token completes ends the request by that, whatever the engine core says.
        """
        if finish_reason is not None:
            self.logprobs_processor.sampled.finish_reason = str(finish_reason)
        return super().make_request_output(new_token_ids, pooled, finish_reason, *more, **by)

    def track_weight_version(self, weight_version: str) -> None:
        """Called by vLLM with each step's version, before the step's tokens are taken."""
        if weight_version == self.seen:
            return
        self.seen = weight_version
        super().track_weight_version(weight_version)
        if isinstance(self.logprobs_processor, Keeper):
            sampled = self.logprobs_processor.sampled
            # an adapter's name is the label of what it makes of the weights
            sampled.versions.append((len(sampled.token_ids), self.lora_name or weight_version))


class _Processors:
    """Stands where vLLM looks up LogprobsProcessor."""

    @staticmethod
    def from_new_request(tokenizer: Any, request: Any) -> LogprobsProcessor:
        asked = _asked.get()
        params = request.sampling_params
        if asked is None:
            return LogprobsProcessor.from_new_request(tokenizer=tokenizer, request=request)
        # the choices of one request may share their parameters: an earlier one has marked them then
        marked = MARK in (params.extra_args or ())
        shown = not marked and (params.logprobs, params.prompt_logprobs) != (None, None)
        if params.logprobs is None:  # the request goes to the engine core after this
            params.logprobs = 0  # that of the sampled token
        # a stop string is found here and ends the request there, with what is kept for it
        if not shown and not params.stop:
            params.extra_args = {**(params.extra_args or {}), MARK: True}
        keeper: Keeper = Keeper.from_new_request(tokenizer=tokenizer, request=request)
        if not shown:
            keeper.logprobs = None
        keeper.shown = shown
        keeper.sampled = CapturedSequence(
            request.external_req_id,
            request.prompt_token_ids or [],
            params.structured_outputs is not None,
        )
        asked.append(keeper.sampled)
        return keeper


class Capture:
    """ASGI middleware: appends the samples to the answer of a request that asks for them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._aborts: dict[str, asyncio.Event] = {}
        output_processor.LogprobsProcessor = _Processors
        output_processor.RequestState = Stamped
        unload_for_good()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _asked_name(scope)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(ABORT):
            abort = self._aborts.get(scope["path"].removeprefix(ABORT))
            if abort is not None:
                abort.set()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
        elif name is None:
            await self.app(scope, receive, send)
        else:
            await self._captured(name, scope, receive, send)

    async def _captured(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        abort = self._aborts[name] = asyncio.Event()
        answer = _CapturedAnswer(send)
        token = _asked.set(answer.samples)
        try:
            await self.app(scope, _until(abort, receive), answer.take)
            await answer.end(abort.is_set())
        finally:
            answer.gather_no_more()
            _asked.reset(token)
            self._aborts.pop(name, None)


class _CapturedAnswer:
    """Passes an answer on, held back where its end is, and appends the samples.

    A stream begins with its first token: the version that sampled it stands in the head. Of what
    follows, no more than one piece is sent in `GATHER` seconds: a send, and what it wakes in the
    gateway, costs more than a token does. A stream whose tokens come slower is sent as it comes.
    """

    def __init__(self, send: Send) -> None:
        self.samples: list[CapturedSequence] = []
        self._send = send
        self._head: Message | None = None
        self._parts: list[bytes] = []
        self._streams = False
        self._loop = asyncio.get_running_loop()
        self._sent = 0.0  # when, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def take(self, message: Message) -> None:
        """What the application sends."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
        elif self._streams and self._head is None:
            self._parts.append(message.get("body", b""))
            if self._sending is not None:  # it may be that the client reads no faster
                await self._sending
            if self._timer is not None:
                return
            now = self._loop.time()
            if now - self._sent >= GATHER:
                self._sent = now
                await self._pass_on()
            else:
                self._timer = self._loop.call_at(self._sent + GATHER, self._late)
        else:
            self._parts.append(message.get("body", b""))
            if self._streams and not self._unmet and any(s.versions for s in self.samples):
                await self._begin()

    @property
    def _unmet(self) -> bool:
        """Whether the engine core found no token that a schema or grammar allows."""
        return any(s.constrained and s.finish_reason == "error" for s in self.samples)

    async def _begin(self) -> None:
        """Send a stream's head, and what was held back of it."""
        assert self._head is not None
        first = [sampled.versions[0][1] for sampled in self.samples if sampled.versions]
        version = [(VERSION, first[0].encode())] if first else []
        await self._send({**self._head, "headers": [*self._head["headers"], *version]})
        self._head = None
        self._sent = self._loop.time()
        await self._pass_on()

    async def _pass_on(self) -> None:
        """Send what was gathered."""
        parts, self._parts = self._parts, []
        body = b"".join(parts)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _late(self) -> None:
        """What was gathered has waited for as long as it may."""
        self._timer = None
        self._sent = self._loop.time()
        self._sending = asyncio.create_task(self._pass_on())
        self._sending.add_done_callback(self._passed_on)

    def _passed_on(self, sending: "asyncio.Task[None]") -> None:
        self._sending = None

    def gather_no_more(self) -> None:
        """The end comes next, or nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def end(self, aborted: bool) -> None:
        """The application is done, or was aborted, maybe before it sent anything."""
        for sampled in self.samples:
            if sampled.finish_reason is None and not aborted:
                sampled.finish_reason = "stop"  # at a stop string: the engine core knows of none
        if self._unmet and self._head is not None:
            await self._refuse()
            return
        tail = orjson.dumps([{n: getattr(s, n) for n in TOLD} for s in self.samples])
        if self._streams:
            if self._head is not None:
                await self._begin()
            self.gather_no_more()
            if self._sending is not None:
                await self._sending
            last = b"".join([*self._parts, EVENT, tail, b"\n\n"])
            await self._send({"type": "http.response.body", "body": last})
            return
        body = b"".join(self._parts)
        head = self._head or {"type": "http.response.start", "status": 200, "headers": []}
        if head["status"] >= 400:
            await self._send(head)
            await self._send({"type": "http.response.body", "body": body})
            return
        headers = [pair for pair in head["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % (len(body) + len(tail))))
        headers.append((BODY, b"%d" % len(body)))
        await self._send({**head, "headers": headers})
        await self._send({"type": "http.response.body", "body": body + tail})

    async def _refuse(self) -> None:
        """In place of vLLM's internal error: it is the request that cannot be met."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(UNMET))]
        await self._send({"type": "http.response.start", "status": 400, "headers": headers})
        await self._send({"type": "http.response.body", "body": UNMET})


def _asked_name(scope: Scope) -> str | None:
    for key, value in scope.get("headers", ()):
        if key == ASK:
            return str(value.decode("latin-1"))
    return None


def _until(abort: asyncio.Event, receive: Receive) -> Receive:
    """What the client sends, and a disconnect when the request is aborted."""
    asked = False

    async def receiving() -> Message:
        nonlocal asked
        if not asked:
            message = await receive()
            asked = not message.get("more_body", False)
            return message
        coming, aborted = asyncio.ensure_future(receive()), asyncio.ensure_future(abort.wait())
        try:
            await asyncio.wait((coming, aborted), return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            coming.cancel()
            aborted.cancel()

    return receiving
