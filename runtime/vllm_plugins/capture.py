"""Capture: append the sampled tokens, logprobs and weight versions to vLLM's answers.

runtime/pool/vllm_process.py starts vLLM with `Capture` as a middleware. The header `CAPTURE`
asks for the samples; runtime/pool/vllm_engine.py sends it, and cuts the samples off the
answer. All APIs that sample work alike (chat, completions, responses, Anthropic's messages). The
cost is a fraction of vLLM's own `logprobs` and `return_token_ids`, which build and serialise an
object per token.

vLLM makes a LogprobsProcessor per sequence, and passes it every output of the engine core.
`CapturingProcessor` replaces it for a captured request. The engine core reports the weight version
with each step; `VersionedState` records it. Read next: scheduler.py, in the engine core.
"""

import asyncio
import base64
import contextlib
import functools
import time
import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import output_processor
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState

from cray_agents.runtime.vllm_plugins import chat_route
from cray_agents.runtime.vllm_plugins.scheduler import MARK
from cray_agents.runtime.vllm_plugins.wire import ABORT, BODY, CAPTURE, EVENT, MERGE, VERSION

INTERVAL, LONGEST = 0.02, 0.1  # seconds between two events of a stream: if few, at most
SENDS = 1000  # a second, of all streams; beyond that the interval grows
LAST_LOGPROBS = 10.0  # seconds that an abort waits for those of the tokens sampled so far, at most

UNSATISFIABLE = orjson.dumps(
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

#: The list that the current request's samples go to; None: it is not captured.
_capture: ContextVar["list[CapturedSequence] | None"] = ContextVar("capture", default=None)
_merge: ContextVar[bool] = ContextVar("merge", default=False)  # what MERGE of that request says

FIELDS = (
    "cached_tokens",
    "finish_reason",
    "logprobs",
    "name",
    "prompt_token_ids",
    "routes",
    "token_ids",
    "versions",
)


class CapturedSequence:
    """One sampled sequence: `token_ids` and `logprobs` are parallel, [tokens].

    `name` is vLLM's name of the request, `id` the engine core's. `versions` holds pairs of a token
    index and the weights that sampled from it on. `constrained`: a schema or grammar restricted the
    tokens. `routed` has the experts of the tokens read, [tokens, layers, experts of a token], in
    pieces, where vLLM returns them. `cached_tokens`: of the prompt, not computed anew.
    """

    __slots__ = (*(field for field in FIELDS if field != "routes"), "constrained", "id", "routed")

    def __init__(
        self, name: str, request_id: str, prompt_token_ids: list[int], constrained: bool
    ) -> None:
        self.name = name
        self.id = request_id
        self.constrained = constrained
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.versions: list[tuple[int, str]] = []
        self.routed: list[Any] = []

    @property
    def routes(self) -> dict[str, Any] | None:
        """The routes of all tokens but the last; None if there are none."""
        return encode(self.routed, len(self.prompt_token_ids) + len(self.token_ids) - 1)


class CapturingProcessor(LogprobsProcessor):  # type: ignore[misc]
    """Recorder of one sequence. It does vLLM's own work only if the client wants logprobs."""

    sampled: CapturedSequence
    wants_logprobs: bool

    def update_from_output(self, output: Any) -> None:
        """Record a step's new tokens. vLLM calls it, with tokens after a stop string cut off."""
        sampled = self.sampled
        sampled.token_ids += output.new_token_ids
        if output.prefill_stats is not None:
            sampled.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_logprobs is not None:
            sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if getattr(output, "routed_experts", None) is not None:
            sampled.routed.append(output.routed_experts)
        if output.finish_reason is not None:
            sampled.finish_reason = str(output.finish_reason)
        if self.wants_logprobs:
            super().update_from_output(output)


class VersionedState(RequestState):  # type: ignore[misc]
    """A RequestState that records the version of each step, and the reason of a stop string.

    In a stream it merges the tokens of `send_interval` seconds into one output, where the request
    allows that: vLLM's work for an event costs more than a token, however many the event holds.
    """

    last_version: str | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not isinstance(self.logprobs_processor, CapturingProcessor):
            return
        self._unsent: list[int] = []  # tokens that no output holds yet
        self._sent_at = 0.0  # by time.monotonic
        self._merges = self.output_kind is RequestOutputKind.DELTA and _merge.get()
        if self._merges or self.detokenizer.stop:
            self.make_request_output = self._make_captured_output

    def _make_captured_output(
        self,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Return the output of a step, or None; record the finish reason.

        vLLM calls this each step, after looking for stop strings, and for a request that ends
        early. If the last token completes a stop string, the reason differs from the engine core's.
        """
        if finish_reason is not None:
            self.logprobs_processor.sampled.finish_reason = str(finish_reason)
        if self._merges:
            self._unsent += new_token_ids
            now = time.monotonic()
            if finish_reason is None and now - self._sent_at < send_interval():
                return None
            self._sent_at = now
            new_token_ids, self._unsent = self._unsent, []
        make_output = super().make_request_output
        return make_output(new_token_ids, pooling_output, finish_reason, *more, **options)

    def track_weight_version(self, weight_version: str) -> None:
        """Record a step's version. vLLM calls this before it takes the step's tokens."""
        if weight_version == self.last_version:
            return
        self.last_version = weight_version
        super().track_weight_version(weight_version)
        if isinstance(self.logprobs_processor, CapturingProcessor):
            sampled = self.logprobs_processor.sampled
            # an adapter's name is the label of weights and adapter together
            sampled.versions.append((len(sampled.token_ids), self.lora_name or weight_version))


class _ProcessorFactory:
    """A stand-in for the class LogprobsProcessor, in vLLM's module."""

    @staticmethod
    def from_new_request(tokenizer: Any, request: Any) -> LogprobsProcessor:
        samples = _capture.get()
        params = request.sampling_params
        if samples is None:
            return LogprobsProcessor.from_new_request(tokenizer=tokenizer, request=request)
        # the choices of one request may share their parameters, marked by an earlier choice
        marked = MARK in (params.extra_args or ())
        wants_logprobs = not marked and (params.logprobs, params.prompt_logprobs) != (None, None)
        if params.logprobs is None:  # the request goes to the engine core after this
            params.logprobs = 0  # the sampled token's alone
        # a stop string is detected in this process, and loses logprobs kept in the engine core
        if not wants_logprobs and not params.stop:
            waits = params.output_kind is RequestOutputKind.FINAL_ONLY
            params.extra_args = {**(params.extra_args or {}), MARK: waits}
        processor: CapturingProcessor = CapturingProcessor.from_new_request(
            tokenizer=tokenizer, request=request
        )
        if not wants_logprobs:
            processor.logprobs = None
        processor.wants_logprobs = wants_logprobs
        processor.sampled = CapturedSequence(
            request.external_req_id,
            request.request_id,
            request.prompt_token_ids or [],
            params.structured_outputs is not None,
        )
        samples.append(processor.sampled)
        return processor


class Capture:
    """ASGI middleware that appends the samples to each answer whose request asks for them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._aborts: dict[str, tuple[asyncio.Event, list[CapturedSequence]]] = {}
        output_processor.LogprobsProcessor = _ProcessorFactory
        output_processor.RequestState = VersionedState
        unload_completely()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _header(scope, CAPTURE)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(ABORT):
            known = self._aborts.get(scope["path"].removeprefix(ABORT))
            if known is not None:
                await _await_logprobs(known[1], scope["app"].state.engine_client)
                known[0].set()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
        elif name is None:
            await self.app(scope, receive, send)
        else:
            await self._run_captured(name, scope, receive, send)

    async def _run_captured(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        abort, answer = asyncio.Event(), _CapturedAnswer(send)
        self._aborts[name] = abort, answer.samples
        token = _capture.set(answer.samples)
        _merge.set(_header(scope, MERGE) is not None)
        left: Receive | None = receive
        try:
            if scope["path"] == chat_route.PATH:
                left = await chat_route.answer_chat(scope, receive, answer.take)
            if left is not None:
                answer.samples.clear()  # of an attempt that failed
                await self.app(scope, _disconnect_on(abort, left), answer.take)
            await answer.end(abort.is_set())
        finally:
            answer.close()
            _capture.reset(token)
            self._aborts.pop(name, None)


class _CapturedAnswer:
    """An answer on its way to the client; its end is held back until the samples are appended.

    A stream starts at its first token, and its headers carry that token's version. Later tokens
    are sent in pieces, at most one per `send_interval` seconds. A send, with the gateway's work
    for it, costs more than a token. A slower stream is sent token by token.
    """

    streaming = 0  # answers that have begun to stream, and have not ended

    def __init__(self, send: Send) -> None:
        self.samples: list[CapturedSequence] = []
        self._send = send
        self._head: Message | None = None  # until it is sent
        self._pieces: list[bytes] = []  # received, and not sent yet
        self._streams = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._counted = False

    async def take(self, message: Message) -> None:
        """Receive a message from the application, as its ASGI `send`."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
        elif self._streams and self._head is None:
            self._pieces.append(message.get("body", b""))
            if self._sending is not None:  # wait for a client that reads slowly
                await self._sending
            if self._timer is not None:
                return
            now = self._loop.time()
            interval = send_interval()
            if now - self._sent_at >= interval:
                self._sent_at = now
                await self._send_pieces()
            else:
                self._timer = self._loop.call_at(self._sent_at + interval, self._send_later)
        else:
            self._pieces.append(message.get("body", b""))
            if self._streams and not self._unsatisfiable and any(s.versions for s in self.samples):
                await self._begin()

    @property
    def _unsatisfiable(self) -> bool:
        """True if the engine core had no token that the schema or grammar allows."""
        return any(s.constrained and s.finish_reason == "error" for s in self.samples)

    async def _begin(self) -> None:
        """Send a stream's head and its first pieces."""
        assert self._head is not None
        first = [sampled.versions[0][1] for sampled in self.samples if sampled.versions]
        version = [(VERSION.encode(), first[0].encode())] if first else []
        await self._send({**self._head, "headers": [*self._head["headers"], *version]})
        self._head = None
        self._counted = True
        _CapturedAnswer.streaming += 1
        self._sent_at = self._loop.time()
        await self._send_pieces()

    async def _send_pieces(self) -> None:
        """Send the pieces received so far."""
        body = b"".join(self._pieces)
        self._pieces = []
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _send_later(self) -> None:
        """Send in a task; the timer calls this."""
        self._timer = None
        self._sent_at = self._loop.time()
        self._sending = asyncio.create_task(self._send_pieces())
        self._sending.add_done_callback(self._clear_sending)

    def _clear_sending(self, sending: "asyncio.Task[None]") -> None:
        self._sending = None

    def close(self) -> None:
        """Count the stream as ended, and send no more by the timer."""
        self._cancel_timer()
        if self._counted:
            self._counted = False
            _CapturedAnswer.streaming -= 1

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def end(self, aborted: bool) -> None:
        """Send the rest of the answer and the samples; the application may have sent nothing."""
        for sampled in self.samples:
            if sampled.finish_reason is None and not aborted:
                sampled.finish_reason = "stop"  # a stop string, unknown to the engine core
        if self._unsatisfiable and self._head is not None:
            await self._refuse()
            return
        tail = orjson.dumps([{n: getattr(s, n) for n in FIELDS} for s in self.samples])
        if self._streams:
            if self._head is not None:
                await self._begin()
            self._cancel_timer()
            if self._sending is not None:
                await self._sending
            last = b"".join([*self._pieces, EVENT, tail, b"\n\n"])
            await self._send({"type": "http.response.body", "body": last})
            return
        body = b"".join(self._pieces)
        head = self._head or {"type": "http.response.start", "status": 200, "headers": []}
        if head["status"] >= 400:
            await self._send(head)
            await self._send({"type": "http.response.body", "body": body})
            return
        headers = [pair for pair in head["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % (len(body) + len(tail))))
        headers.append((BODY.encode(), b"%d" % len(body)))
        await self._send({**head, "headers": headers})
        await self._send({"type": "http.response.body", "body": body + tail})

    async def _refuse(self) -> None:
        """Answer 400 in place of vLLM's internal error: the request cannot be satisfied."""
        length = b"%d" % len(UNSATISFIABLE)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._send({"type": "http.response.start", "status": 400, "headers": headers})
        await self._send({"type": "http.response.body", "body": UNSATISFIABLE})


def send_interval() -> float:
    """Return the seconds between two events of a stream.

    All streams of a replica share the process that makes and sends events, so it grows with their
    number: 20 ms up to 20 streams, 32 ms with 32, 100 ms with 100 or more.
    """
    return min(max(INTERVAL, _CapturedAnswer.streaming / SENDS), LONGEST)


async def _await_logprobs(samples: list[CapturedSequence], client: Any) -> None:
    """Have the engine core send the logprobs that it keeps, and wait until they are there."""

    def late() -> list[str]:
        return [s.id for s in samples if not s.finish_reason and len(s.logprobs) < len(s.token_ids)]

    with contextlib.suppress(TimeoutError, EngineDeadError):  # then they stay unknown
        async with asyncio.timeout(LAST_LOGPROBS):
            if ids := late():
                await client.engine_core.call_utility_async("send_logprobs", ids)
            while late():  # noqa: ASYNC110 - the engine core's next step brings them
                await asyncio.sleep(INTERVAL / 4)


def _header(scope: Scope, name: str) -> str | None:
    for key, value in scope.get("headers", ()):
        if key == name.encode():
            return str(value.decode("latin-1"))
    return None


def _disconnect_on(abort: asyncio.Event, receive: Receive) -> Receive:
    """Wrap ASGI's `receive`: it reports a disconnect when the request is aborted."""
    body_complete = False

    async def receive_or_disconnect() -> Message:
        nonlocal body_complete
        if not body_complete:
            message = await receive()
            body_complete = not message.get("more_body", False)
            return message
        coming, aborted = asyncio.ensure_future(receive()), asyncio.ensure_future(abort.wait())
        try:
            await asyncio.wait((coming, aborted), return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            coming.cancel()
            aborted.cancel()

    return receive_or_disconnect


def unload_completely() -> None:
    """Make the worker drop an adapter when the server does.

    vLLM's server only forgets an unloaded adapter's name. The adapter stays in the worker until the
    worker has no room. Then the least used one goes, which may be one that is served. vLLM would
    read it from its file again, without a proof.
    """
    original = OpenAIServingModels.unload_lora_adapter

    @functools.wraps(original)
    async def unload_lora_adapter(models: Any, request: Any) -> Any:
        loaded = models.lora_requests.get(request.lora_name)
        answer = await original(models, request)
        if loaded is not None and request.lora_name not in models.lora_requests:
            await models.engine_client.remove_lora(loaded.lora_int_id)
        return answer

    OpenAIServingModels.unload_lora_adapter = unload_lora_adapter


# ---- Routes: write the experts of a mixture that each token of a call was sent to, compactly
def encode(pieces: Sequence[Any], tokens: int) -> dict[str, Any] | None:
    """Return pieces of [tokens, layers, experts of a token] as JSON: at most so many tokens.

    None without pieces. A stop string drops tokens that vLLM returned the routes of.
    """
    if not pieces:
        return None
    whole = np.concatenate(pieces)[:tokens]
    data = base64.b64encode(zlib.compress(whole.astype("<u2").tobytes(), 1)).decode()
    return {"layers": whole.shape[1], "experts": whole.shape[2], "data": data}
