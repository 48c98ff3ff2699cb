"""VllmEngine: the `Engine` port spoken to a vLLM server over HTTP.

pool.py owns one per replica. Requests and answers go through as bytes, save for the model's name;
what was sampled is told beside the answer by vllm_capture.py, inside vLLM. Its logprobs are of the
distribution sampled from (replica.py starts vLLM with `processed_logprobs`); those of `score` are
of the plain softmax, whatever the mode.
"""

import asyncio
import copy
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from cray_agents.errors import CrayError, EngineError, EngineUnavailable, SwapError
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import WeightChange
from cray_agents.runtime.pool.golden_probe import weights_of
from cray_agents.runtime.pool.vllm_http import Http, refusal

CAPTURE = "x-cray-capture"  # vllm_capture.py, which cannot be imported without vLLM, names the same
BODY = "x-cray-body"
VERSION = "x-cray-version"
EVENT = b"event: cray.samples\ndata: "
ABORT = "/cray/abort/"
PROBE = "cray_agents_probe"  # vllm_scheduler.py names the same

log = logging.getLogger(__name__)

_ERROR = b'data: {"error"'
_ABORT_TIMEOUT = 5.0  # seconds
_OF_ANOTHER_KIND = (404, 405, 501)  # of a route that vLLM does not have for its model


class VllmEngine:
    """A vLLM server at `url` that calls its model `model`. Close it when done.

    `secret`: what the server asks for (vllm_lock.py).
    `timeout`: seconds without a byte from the server before EngineTimeout; `load_timeout`: of a
    control request, such as one that reads a checkpoint.
    """

    def __init__(
        self,
        url: str,
        model: str,
        secret: str,
        *,
        timeout: float = 600.0,
        load_timeout: float = 300.0,
    ) -> None:
        self.model = model
        self._http = Http(url, secret, timeout)
        self._load_timeout = load_timeout

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._http.url

    def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """See `Engine.answer`; the exchange's path is the route asked for."""
        return self._events(exchange) if exchange.streams else self._whole(exchange)

    async def _whole(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        async with self._asked(exchange) as response:
            content = await response.read()
            size = int(response.headers.get(BODY, len(content)))
        if exchange.capture:
            exchange.samples = _samples(content[size:])
            exchange.version = next((s.version for s in exchange.samples), "") or exchange.version
        yield content[:size].replace(*self._stamp(exchange))

    async def _events(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Whole server-sent events; the last one, our own, is taken out."""
        rest, told = b"", not exchange.capture
        async with self._asked(exchange) as response:
            exchange.version = _version(response.headers.get(VERSION, "")) or exchange.version
            stamp, pieces = self._stamp(exchange), response.content.iter_any()
            try:
                async for piece in pieces:
                    whole, rest = _split(rest + piece)
                    if exchange.capture and (at := whole.find(EVENT)) >= 0:
                        exchange.samples, told = _samples(whole[at + len(EVENT) :]), True
                        whole = whole[:at]
                    if (at := _error_at(whole)) >= 0:
                        if at:
                            yield whole[:at].replace(*stamp)
                        raise refusal(0, orjson.loads(whole[at:].partition(b"\n")[0][6:]))
                    if whole:
                        yield whole.replace(*stamp)
            except asyncio.CancelledError:
                if exchange.capture:
                    tail = rest + await self._abort(exchange, response)
                    exchange.samples = _samples(tail.partition(EVENT)[2])
                raise
        if not told:
            raise EngineUnavailable(f"{self.url}: the stream ended before its end")

    def _asked(self, exchange: EngineCall) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"X-Request-Id": exchange.id}
        if exchange.capture:
            headers[CAPTURE] = exchange.id
        request = {**exchange.request, "model": self.model}
        return self._http.answer(
            "POST", exchange.path, request, headers=headers, named=exchange.version
        )

    def _stamp(self, exchange: EngineCall) -> tuple[bytes, bytes]:
        """What to replace by what, so that an answer names its version.

        JSON escapes quotes within strings, so this can only be the member itself.
        """
        member = b'"model":'
        return member + orjson.dumps(self.model), member + orjson.dumps(exchange.version)

    async def _abort(self, exchange: EngineCall, response: aiohttp.ClientResponse) -> bytes:
        """End a stream, and read what it then still says."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                await self._control(f"{ABORT}{exchange.id}")
                return await response.read()
        except (CrayError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("what %s sampled before it was ended is not known: %s", exchange.id, error)
            return b""

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """See `Engine.load`. Requests in flight that are not to be kept are aborted."""
        seconds: dict[str, float] = {}
        mode = "keep" if keep else "abort"
        try:
            with _timed(seconds, "pause"):
                await self._control(f"/pause?mode={mode}&clear_cache=true")
            with _timed(seconds, "load"):
                await self._replace_weights(checkpoint)
                await self._name_weights(checkpoint, version)
        except EngineError as error:
            raise SwapError(f"{self.url} did not load {checkpoint}: {error}") from error
        return seconds

    async def _replace_weights(self, checkpoint: Path) -> None:
        where = {"weights_path": str(checkpoint)}
        await self._control("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        await self._control("/collective_rpc", {"method": "repack_kept_weights"})
        answer = await self._control("/reset_prefix_cache")
        if not answer.get("success"):
            raise EngineError("the prefix cache was not reset: blocks of it are still in use")

    async def _name_weights(self, checkpoint: Path, version: str) -> None:
        """Tell vLLM what to stamp tokens with; until `resume` it then answers `score` alone."""
        label = f"{version} {weights_of(checkpoint)}"
        await self._control("/update_weight_version", {"new_version": label})

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._control("/resume")

    async def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Logprobs of each prompt's tokens but its first, under the weights now loaded.

        It samples after each prompt: of none, after one of its own. An engine that cannot raises.
        """
        if not prompts:
            await self._sample()
            return []
        body = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "vllm_xargs": {PROBE: 1},
        }
        answer = await self._post("/v1/completions", body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [
            [
                _logprob(at, token)
                for at, token in zip(choice["prompt_logprobs"], tokens, strict=True)
            ][1:]
            for choice, tokens in zip(choices, prompts, strict=True)
        ]

    async def _sample(self) -> None:
        """Sample two tokens, of which the second reads what the first has left in the cache."""
        body = {
            "model": self.model,
            "prompt": [[1]],
            "max_tokens": 2,
            "ignore_eos": True,
            "temperature": 0,
            "vllm_xargs": {PROBE: 1},
        }
        try:
            await self._post("/v1/completions", body)
        except EngineError as error:
            if error.status not in _OF_ANOTHER_KIND:
                raise

    async def alive(self) -> None:
        """Return when the engine core, behind the server, has answered. Raises EngineError."""
        async with self._http.answer("GET", "/is_sleeping") as response:
            await response.read()

    async def prepare(self, checkpoint: Path, version: str) -> None:
        """To be called once after a start; requests are answered after `resume`."""
        await self._control("/collective_rpc", {"method": "mend"})
        await self._name_weights(checkpoint, version)

    async def adapt(self, adapter: Path, name: str) -> "VllmEngine":
        """Load an adapter in PEFT's layout beside the weights; returns what answers under it.

        `name` is the label of what they are together, and stamps its tokens as that of weights does
        theirs. vLLM's cache of prefixes is keyed by it: it must never have been used before.
        """
        where = {"lora_name": name, "lora_path": str(adapter)}
        await self._control("/v1/load_lora_adapter", where)
        adapted = copy.copy(self)
        adapted.model = name
        return adapted

    async def release(self, name: str) -> None:
        """Unload an adapter, which no request may be in flight under."""
        await self._control("/v1/unload_lora_adapter", {"lora_name": name})

    async def model_root(self) -> str:
        """The directory that the server was started on; EngineUnavailable while it starts."""
        async with self._http.answer("GET", "/health", timeout=5.0):
            pass
        async with self._http.answer("GET", "/v1/models", timeout=5.0) as response:
            answer = orjson.loads(await response.read())
        return str(answer["data"][0]["root"])

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.answer("POST", path, body) as response:
            answer: dict[str, Any] = orjson.loads(await response.read())
            return answer

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._http.answer(
            "POST", path, body or {}, self._load_timeout, once=True
        ) as response:
            content = await response.read()
        answer = orjson.loads(content) if content[:1] in (b"{", b"[") else {}
        return answer if isinstance(answer, dict) else {}


def _error_at(events: bytes) -> int:
    """Where in a stream vLLM says that it failed; -1: nowhere."""
    if events.startswith(_ERROR):
        return 0
    at = events.find(b"\n" + _ERROR)
    return at + 1 if at >= 0 else -1


def _split(text: bytes) -> tuple[bytes, bytes]:
    """Whole server-sent events, and the beginning of the next one."""
    end = text.rfind(b"\n\n") + 2
    return (text[:end], text[end:]) if end > 1 else (b"", text)


def _samples(told: bytes) -> list[SampledSequence]:
    """What vllm_capture.py says, in the order of the answer's choices."""
    samples = [_sample(**sample) for sample in orjson.loads(told or b"[]")]
    if len({sample.name for sample in samples}) > 1:  # several prompts, asked side by side
        samples.sort(key=lambda sample: int(sample.name.rpartition("-")[2]))
    return samples


def _sample(*, versions: Sequence[tuple[int, str]] = (), **told: Any) -> SampledSequence:
    sample = SampledSequence(**told)
    for at, label in versions:
        if not sample.version:
            sample.version = _version(label)
        elif at < len(sample.token_ids):  # else a stop string has cut off what came after
            sample.seams.append(WeightChange(at=at, model=_version(label)))
    return sample


def _version(label: str) -> str:
    """The `name@N` of weights as `_name_weights` calls them."""
    return label.partition(" ")[0]


def _logprob(at: dict[str, Any] | None, token: int) -> float:
    if at is None:  # the first token: nothing stands before it
        return 0.0
    value = at[str(token)]["logprob"]
    if value is None or value != value:
        raise EngineError(f"the model gives token {token} no logprob: its weights hold NaN")
    return float(value)


class _timed:  # noqa: N801 - reads as a statement: `with _timed(seconds, "load")`
    """Adds the seconds a block takes to `seconds[phase]`."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = time.perf_counter() - self._started
