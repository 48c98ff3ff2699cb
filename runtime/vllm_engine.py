"""VllmEngine: the `Engine` port spoken to a vLLM server over HTTP.

pool.py owns one per replica. Chat requests go through as they are, save that exact tokens and
their logprobs are always asked for; vLLM's answers come back as they are. The log-probabilities
are of the distribution sampled from (replica.py starts vLLM with `processed_logprobs`); those of
`score` are of the plain softmax, whatever the mode.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable, SwapError

_CONTROL_TIMEOUT = 300.0  # seconds: reading a large checkpoint takes a while
_IDLE = 2.0  # seconds; vLLM closes idle connections after 5, and must not be the first to


class VllmEngine:
    """A vLLM server at `url` that calls its model `model`. Close it when done.

    `timeout`: seconds without a byte from the server before EngineTimeout.
    """

    def __init__(self, url: str, model: str, *, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat completion request, with exact tokens and logprobs."""
        body = self._exact(request) | {"stream": False}
        body.pop("stream_options", None)
        return await self._post("/v1/chat/completions", body)

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chunks; the last one carries the usage. Leaving early cancels the request."""
        options = {**(request.get("stream_options") or {}), "include_usage": True}
        body = self._exact(request) | {"stream": True, "stream_options": options}
        async with self._answer("POST", "/v1/chat/completions", body) as response:
            async for data in _server_sent(response):
                if data == b"[DONE]":
                    return
                chunk: dict[str, Any] = orjson.loads(data)
                if "error" in chunk:
                    raise _refusal(0, chunk)
                yield chunk
            raise EngineUnavailable(f"{self.url}: the stream ended before its end")

    async def load(self, checkpoint: Path, version: str) -> dict[str, float]:
        """Put a checkpoint's weights in place; no cache survives. Raises SwapError.

        The caller has drained the requests. Seconds by phase: pause, load, resume.
        """
        seconds: dict[str, float] = {}
        try:
            with _timed(seconds, "pause"):
                await self._control("/pause?mode=abort&clear_cache=true")
            try:
                with _timed(seconds, "load"):
                    await self._replace_weights(checkpoint, version)
            finally:
                with _timed(seconds, "resume"):
                    await self._control("/resume")
        except EngineError as error:
            raise SwapError(f"{self.url} did not load {checkpoint}: {error}") from error
        return seconds

    async def _replace_weights(self, checkpoint: Path, version: str) -> None:
        where = {"weights_path": str(checkpoint)}
        await self._control("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        await self._control("/collective_rpc", {"method": "repack_kept_weights"})
        await self._control("/update_weight_version", {"new_version": version})
        answer = await self._control("/reset_prefix_cache")
        if not answer.get("success"):
            raise EngineError("the prefix cache was not reset: blocks of it are still in use")

    async def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Logprobs of each prompt's tokens but its first, under the weights now loaded."""
        if not prompts:
            return []
        body = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
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

    async def model_root(self) -> str:
        """The directory that the server was started on; EngineUnavailable while it starts."""
        async with self._answer("GET", "/health", timeout=5.0):
            pass
        async with self._answer("GET", "/v1/models", timeout=5.0) as response:
            answer = orjson.loads(await response.read())
        return str(answer["data"][0]["root"])

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _exact(self, request: dict[str, Any]) -> dict[str, Any]:
        return {**request, "model": self.model, "return_token_ids": True, "logprobs": True}

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._answer("POST", path, body) as response:
            answer: dict[str, Any] = orjson.loads(await response.read())
            return answer

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._answer("POST", path, body or {}, _CONTROL_TIMEOUT, once=True) as response:
            content = await response.read()
        answer = orjson.loads(content) if content else {}
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 0.0,
        once: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with a good status; whatever goes wrong becomes one of our errors.

        `once` closes the connection afterwards: vLLM drops it after a failed control request, and
        the `/resume` that has to follow must not die of that.
        """
        if self._session is None:  # made here because it belongs to the running loop
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE)
            self._session = aiohttp.ClientSession(connector=connector)
        limit = aiohttp.ClientTimeout(total=None, sock_read=timeout or self._timeout)
        content = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} | ({"Connection": "close"} if once else {})
        try:
            async with self._session.request(
                method, self.url + path, data=content, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                yield response
        except TimeoutError as error:  # aiohttp's timeouts are both kinds: ask for this one first
            raise EngineTimeout(
                f"{self.url}{path}: nothing came for {limit.sock_read} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        except asyncio.IncompleteReadError as error:
            raise EngineUnavailable(f"{self.url}{path}: the answer broke off") from error


async def _server_sent(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Not by line: the first may hold 100,000 token ids."""
    rest = b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


def _logprob(at: dict[str, Any] | None, token: int) -> float:
    if at is None:  # the first token: nothing stands before it
        return 0.0
    value = at[str(token)]["logprob"]
    if value is None or value != value:
        raise EngineError(f"the model gives token {token} no logprob: its weights hold NaN")
    return float(value)


def _refusal(status: int, body: bytes | dict[str, Any]) -> EngineError:
    """vLLM's error, whose `code` is an int and whose shape varies, as one of ours."""
    if isinstance(body, bytes):
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError:
            content = body.decode(errors="replace")[:500]
    else:
        content = body
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        error = {"message": str(error or f"status {status}")}
    message = str(error.get("message") or f"status {status}")
    status = status or int(error.get("code") or 500)
    param = error.get("param")
    if param is not None:
        param = str(param).removeprefix("body.") or None
    if "EngineDead" in str(error.get("type")) + message or "EngineCore" in message:
        return EngineUnavailable(message, status=status)
    return EngineError(message, status=status, param=param, code=_code(status, message))


def _code(status: int, message: str) -> str | None:
    """OpenAI's word for it, where it has one."""
    if "maximum context length" in message or "max_model_len" in message:
        return "context_length_exceeded"
    if status == 404:
        return "model_not_found"
    return "invalid_value" if 400 <= status < 500 else None


class _timed:  # noqa: N801 - reads as a statement: `with _timed(seconds, "load")`
    """Adds the seconds a block takes to `seconds[phase]`."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = time.perf_counter() - self._started
