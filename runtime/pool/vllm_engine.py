"""VllmEngine: implement the `Engine` port over the HTTP of a vLLM server.

vllm_process.py owns one per process. Answers pass through as bytes, except for the model's name.
vllm_plugins/capture.py, inside vLLM, appends the sampled tokens. Their logprobs are of the
distribution sampled from, since vllm_process.py starts vLLM with `processed_logprobs`. Logprobs of
`score` are of the plain softmax, in every mode.
"""

import asyncio
import copy
import logging
import math
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from cray_agents.errors import (
    CrayError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    Superseded,
    SwapError,
)
from cray_agents.ports import EngineCall, PromptScore, SampledSequence
from cray_agents.records import WeightChange
from cray_agents.runtime.disk.turns import off_loop
from cray_agents.runtime.pool.golden_probe import weights_of
from cray_agents.runtime.pool.vllm_http import MALFORMED, Http, to_engine_error, well_formed
from cray_agents.runtime.pool.weight_transfer import (
    STUCK,
    TransferSettings,
    fetch_weights,
    is_offered,
)
from cray_agents.runtime.registry.checkpoints import DELTA
from cray_agents.runtime.registry.deltas import changes_from
from cray_agents.runtime.registry.weight_offers import WeightOffer, find_offers
from cray_agents.runtime.vllm_plugins.wire import (
    ABORT,
    BODY,
    CAPTURE,
    EVENT,
    EXPECT,
    GUARD,
    MERGE,
    PROBE,
    START,
    VERSION,
)

log = logging.getLogger(__name__)

_ERROR = b'data: {"error"'
_ABORT_TIMEOUT = 15.0  # seconds
_ADAPTERS_END, _ADAPTERS_LOOK = 30.0, 0.1  # seconds for requests of adapters; between two looks
_GUARD_TIMEOUT = 10.0  # seconds; the server's own process answers, whatever the engine does
_NO_SUCH_ROUTE = (404, 405, 501)  # statuses of a route that vLLM lacks for its model


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record the seconds that the block takes as `seconds[phase]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = time.perf_counter() - started


class ReplicaServer(NamedTuple):
    """A replica's server, None while it has none: its place in the pool, host and version."""

    replica: str
    host: str
    version: str
    engine: "VllmEngine | None"


class VllmEngine:
    """A vLLM server at `url` that calls its model `model`. Close it when done.

    `secret`: the value that the server requires in a header (vllm_plugins/lock.py).
    `timeout`: seconds without a byte from the server before EngineTimeout. `load_timeout`: the
    same for a control request, such as one that reads a checkpoint. `transfer`: how weights come
    from a training session; None: from files alone. `tls`: see `Http`. `load_note` says why the
    last load took the files all the same; "": it did not have to.
    """

    def __init__(
        self,
        url: str,
        model: str,
        secret: str,
        *,
        timeout: float = 600.0,
        load_timeout: float = 300.0,
        transfer: TransferSettings | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.model = model
        self.load_note = ""
        self.copy: tuple[Path, Path] | None = None  # a checkpoint's copy on its host: read once
        self.keep_copy: Callable[[Path], Awaitable[None]] | None = None  # drops the others
        self._transfer = transfer
        # the hash of weights that were fetched, until they are proven, and whether they came
        self._fetched = ("", False)
        # the offers of weights that came before their files were whole, and the seconds
        self._received: tuple[list[WeightOffer], float] = ([], 0.0)
        self._http = Http(url, secret, timeout, tls)
        self._load_timeout = load_timeout
        self._weights = ""  # the hash of those that the server holds; "": unknown
        self._context: int | None = None
        self._kept = False  # whether the last sleep kept them

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._http.url

    @property
    def secret(self) -> str:
        """The value that the server requires in a header."""
        return self._http.secret

    @property
    def busy(self) -> bool:
        """True while a request of this process is under way."""
        return self._http.active > 0

    def called(self, model: str) -> "VllmEngine":
        """Return the engine of the same server that calls its model by this name."""
        other = copy.copy(self)
        other.model = model
        return other

    def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Answer a request: see `Engine.answer`. Its path is the route on the server."""
        return self._answer_stream(exchange) if exchange.streams else self._answer_whole(exchange)

    async def _answer_whole(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        request, headers = self._request(exchange)
        asked = (exchange.path, request, headers, exchange.version, exchange.size)
        answer = await self._http.post(*asked)
        content = answer.body
        with well_formed(f"the replica of {exchange.version}"):
            size = int(answer.headers.get(BODY, len(content)))
            exchange.samples = await _parse_samples(content[size:]) if exchange.capture else []
        if exchange.capture:
            exchange.version = next((s.version for s in exchange.samples), "") or exchange.version
        yield content[:size].replace(*self._model_names(exchange))

    async def _answer_stream(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Yield whole server-sent events, without the last one, which holds the samples."""
        rest, complete = b"", not exchange.capture
        request, headers = self._request(exchange)
        async with self._http.answer(
            *("POST", exchange.path, request),
            headers=headers,
            public_name=exchange.version,
            size=exchange.size,
        ) as response:
            exchange.version = _version_of(response.headers.get(VERSION, "")) or exchange.version
            names, pieces = self._model_names(exchange), response.content.iter_any()
            try:
                async for piece in pieces:
                    whole, rest = _split_events(rest + piece)
                    if exchange.capture and (at := whole.find(EVENT)) >= 0:
                        exchange.samples = await _parse_samples(whole[at + len(EVENT) :])
                        complete = True
                        whole = whole[:at]
                    if (at := _find_error(whole)) >= 0:
                        if at:
                            yield whole[:at].replace(*names)
                        raise to_engine_error(0, whole[at:].partition(b"\n")[0][6:])
                    if whole:
                        yield whole.replace(*names)
            except asyncio.CancelledError:
                if exchange.capture:
                    tail = rest + await self._abort(exchange, response)
                    with suppress(*MALFORMED):
                        exchange.samples = await _parse_samples(tail.partition(EVENT)[2])
                raise
        if not complete:
            log.warning("%s: the stream of %s ended before its end", self.url, exchange.id)
            raise EngineUnavailable(f"the replica of {exchange.version}: its stream broke off")

    def _request(self, exchange: EngineCall) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the body and the headers of a call."""
        headers = {"X-Request-Id": exchange.id}
        if exchange.traceparent:
            headers["traceparent"] = exchange.traceparent
        if exchange.version:
            headers[EXPECT] = exchange.version
        if exchange.capture:
            headers[CAPTURE] = exchange.id
            if not exchange.request.get("tools"):  # vLLM's parsers of calls know single tokens best
                headers[MERGE] = "1"
        return {**exchange.request, "model": self.model}, headers

    def _model_names(self, exchange: EngineCall) -> tuple[bytes, bytes]:
        """Return the `model` member in vLLM's answer, and its replacement with the version.

        JSON escapes quotes within strings, so these bytes cannot occur in a string.
        """
        member = b'"model":'
        return member + orjson.dumps(self.model), member + orjson.dumps(exchange.version)

    async def _abort(self, exchange: EngineCall, response: aiohttp.ClientResponse) -> bytes:
        """End a stream, and return its last bytes."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                await self._control(f"{ABORT}{exchange.id}")
                return await response.read()
        except (CrayError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("what %s sampled before it was ended is not known: %s", exchange.id, error)
            return b""

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        """Load weights: see `Engine.load`. Without `keep`, requests in flight are aborted."""
        seconds: dict[str, float] = {}
        mode = "keep" if keep else "abort"
        try:
            with timed(seconds, "pause"):
                await self._control(f"/pause?mode={mode}&clear_cache=true")
            with timed(seconds, "load"):
                if await self._patch_weights(checkpoint):
                    self.load_note = ""
                elif not await self._fetch_weights(checkpoint, seconds):
                    (of, read), self.copy = self.copy or (checkpoint, checkpoint), None
                    files = {"weights_path": str(read if of == checkpoint else checkpoint)}
                    reload = {"method": "reload_weights", "kwargs": files}
                    await self._control("/collective_rpc", reload)
                    await self._control("/collective_rpc", {"method": "repack_kept_weights"})
                await self._reset_prefix_cache()
                await self._name_weights(checkpoint, version)
        except EngineError as error:
            raise SwapError(f"{self.url} did not load {checkpoint}: {error}") from error
        if self.keep_copy is not None:
            await self.keep_copy(checkpoint)
        return seconds

    async def take_over(self, checkpoint: Path, version: str) -> None:
        """Name the weights that an earlier platform loaded; answer `score` alone until `resume`.

        Its adapters are unloaded. Requests of gateways that outlive that platform go on under the
        same weights; those of an adapter end first, if they do so in time.
        """
        under_way, until = await self.refuse(), time.monotonic() + _ADAPTERS_END
        while under_way.keys() - {version} and time.monotonic() < until:
            await asyncio.sleep(_ADAPTERS_LOOK)
            under_way = await self.refuse()
        mode = "keep" if under_way else "abort"
        await self._control(f"/pause?mode={mode}&clear_cache=true")
        await self._reset_prefix_cache()
        async with self._http.answer("GET", "/v1/models", timeout=self._load_timeout) as response:
            models = orjson.loads(await response.read())["data"]
            adapters = [str(model["id"]) for model in models if model.get("parent")]
        for adapter in adapters:
            await self.unload_adapter(adapter)
        await self._name_weights(checkpoint, version)

    async def _fetch_weights(self, checkpoint: Path, seconds: dict[str, float]) -> bool:
        """Fetch the weights from a training session that offers them; return False for files.

        Until `resume` that is tried once: if they are not proven, the next load reads files.
        Raises SwapError, code STUCK, if vLLM itself hangs.
        """
        if self._transfer is None:
            return False
        backend, weights = self._transfer.backend, weights_of(checkpoint)
        (received, early), self._received = self._received, ([], 0.0)
        before, came = self._fetched
        if weights == before:
            if came:
                self.load_note = f"weights that came by {backend} failed the logprob check"
            return False
        self._fetched, self.load_note = (weights, False), ""
        try:
            offers = await asyncio.to_thread(find_offers, self._transfer.sessions, weights)
            if not offers:
                return False
            # the ranks say by their secrets: these are the files' weights
            if [one.token for one in offers] == [one.token for one in received]:
                self._fetched, seconds["early"] = (weights, True), early
                return True
            with timed(seconds, "transfer"):
                await fetch_weights(checkpoint, offers, self._transfer, self._control)
            self._fetched = (weights, True)
            return True
        except EngineTimeout as error:
            raise SwapError(f"a transfer of weights hangs: {error}", code=STUCK) from error
        except (CrayError, OSError, *MALFORMED) as error:
            if isinstance(error, CrayError) and error.code == STUCK:
                raise
            self.load_note = f"weights did not come by {backend}: {error}"
            log.warning("%s is loaded from its files: %s", checkpoint, self.load_note)
        return False

    async def is_offered(self, job: str) -> bool:
        """Tell whether a job offers its weights: see `Engine.is_offered`."""
        return self._transfer is not None and await is_offered(self._transfer.sessions, job)

    async def receive(self, job: str, like: Path) -> None:
        """Take the weights of a job whose files are not whole: see `Engine.receive`."""
        self._weights, self._received = "", ([], 0.0)
        seconds: dict[str, float] = {}
        try:
            if self._transfer is None:
                raise SwapError("weights come in files: weight_transfer is 'files'")
            offers = await asyncio.to_thread(find_offers, self._transfer.sessions, job)
            if not offers:
                raise SwapError("its ranks do not offer them any more")
            await self._control("/pause?mode=abort&clear_cache=true")
            with timed(seconds, "early"):
                await fetch_weights(like, offers, self._transfer, self._control)
        except EngineTimeout as error:
            raise SwapError(f"the weights of {job} did not come: {error}", code=STUCK) from error
        except (CrayError, OSError, *MALFORMED) as error:
            code = STUCK if isinstance(error, CrayError) and error.code == STUCK else None
            raise SwapError(f"the weights of {job} did not come: {error}", code=code) from error
        self._received = offers, seconds["early"]

    async def _patch_weights(self, checkpoint: Path) -> bool:
        """Change the weights in place, where a delta checkpoint says what changed in them.

        Returns False where vLLM cannot, or this is not what it holds: then all are to be loaded.
        A patch that fails half-way is made good by that.
        """
        before, self._weights = self._weights, ""
        if not (files := changes_from(checkpoint, before)):
            return False
        kwargs = {"folder": str(checkpoint / DELTA), "files": files}
        try:
            answer = await self._control(
                "/collective_rpc", {"method": "patch_weights", "kwargs": kwargs}
            )
        except EngineTimeout:
            raise
        except EngineError as error:
            log.warning("%s is loaded whole: its changes were not applied: %s", checkpoint, error)
            return False
        workers = answer["results"] or [{}]
        return all(isinstance(one, dict) and one.get("patched") for one in workers)

    async def _reset_prefix_cache(self) -> None:
        answer = await self._control("/reset_prefix_cache")
        if not answer.get("success"):
            raise EngineError("the prefix cache was not reset: blocks of it are still in use")

    async def _name_weights(self, checkpoint: Path, version: str) -> None:
        """Set the label that vLLM records with tokens; until `resume` it answers `score` alone."""
        weights = weights_of(checkpoint)
        await self._control("/update_weight_version", {"new_version": f"{version} {weights}"})
        self._weights = weights

    async def resume(self) -> None:
        """Answer requests again: see `Engine.resume`."""
        self._fetched = ("", False)
        await self._control("/resume")

    async def admit(self, version: str) -> None:
        """Answer requests that expect a version: see `Engine.admit`, and vllm_plugins/lock.py."""
        await self._order({"admit": version})

    async def refuse(self, version: str = "") -> dict[str, int]:
        """Begin no more answers with a version: see `Engine.refuse`."""
        return await self._order({"refuse": version})

    async def _order(self, order: dict[str, Any]) -> dict[str, int]:
        """Give the guard an order; return the number of requests in flight by version."""
        async with self._http.answer("POST", GUARD, order, _GUARD_TIMEOUT) as response:
            answer = orjson.loads(await response.read())
            if (term := answer.get("superseded")) is not None:
                raise Superseded(f"{self.url} follows a controller with term {term}")
            return {str(name): int(count) for name, count in answer.get("in_flight", {}).items()}

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back: see `Engine.sleep`. vLLM for CPUs gives nothing back."""
        await self._control(f"/sleep?level={level}&mode=abort")
        self._kept = level == 1

    async def wake(self, checkpoint: Path, version: str) -> None:
        """Take the GPU's memory again: see `Engine.wake`."""
        await self._control("/wake_up")
        await self._name_weights(checkpoint, version)
        if not self._kept:
            self._weights = ""  # the memory is there, and the weights are not

    async def score(self, prompts: list[list[int]]) -> list[PromptScore]:
        """Score each prompt's tokens but its first, under the weights now loaded.

        One token is sampled after each prompt; without prompts, two are sampled after a fixed one.
        Raises EngineError where the engine cannot sample.
        """
        if not prompts:
            await self._try_sampling()
            return []
        body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 1}
        async with self._probe(body) as response:
            answer = orjson.loads(await response.read())
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            return [
                _score(choice["prompt_logprobs"], tokens)
                for choice, tokens in zip(choices, prompts, strict=True)
            ]

    async def _try_sampling(self) -> None:
        """Sample two tokens; the second one also reads the cache that the first one wrote."""
        body = {"prompt": [[1]], "max_tokens": 2, "ignore_eos": True}
        try:
            async with self._probe(body) as response:
                orjson.loads(await response.read())
        except EngineError as error:
            if error.status not in _NO_SUCH_ROUTE:
                raise

    def _probe(self, body: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask for a completion that the guard lets through before `resume`."""
        marked = {"model": self.model, "temperature": 0, "vllm_xargs": {PROBE: 1}, **body}
        return self._http.answer("POST", "/v1/completions", marked)

    async def metrics(self, timeout: float) -> str:
        """Return the server's metrics as Prometheus' text. Raises EngineError."""
        async with self._http.answer("GET", "/metrics", timeout=timeout) as response:
            return (await response.read()).decode()

    async def check_alive(self) -> None:
        """Return when the engine core behind the server has answered. Raises EngineError."""
        async with self._http.answer("GET", "/is_sleeping") as response:
            await response.read()

    async def marks(self) -> dict[str, float]:
        """Return the points of the process's start, by its host's monotonic clock: see lock.py.

        Empty where the server is another program. Raises EngineError.
        """
        async with self._http.answer("GET", START, timeout=5.0) as response:
            marks = orjson.loads(await response.read())
            return {name: at for name, at in marks.items() if isinstance(at, float)}

    async def prepare(self, checkpoint: Path, version: str) -> None:
        """Prepare a fresh server; call once after each start. It answers after `resume`."""
        self._received = ([], 0.0)
        await self._control("/collective_rpc", {"method": "patch_worker"})
        await self._name_weights(checkpoint, version)

    async def load_adapter(self, adapter: Path, name: str) -> "VllmEngine":
        """Load an adapter in PEFT's layout beside the weights; return the engine that uses it.

        `name` is the label that vLLM records with tokens sampled under the adapter. It must never
        have been used before: vLLM's prefix cache is keyed by it.
        """
        body = {"lora_name": name, "lora_path": str(adapter)}
        await self._control("/v1/load_lora_adapter", body)
        return self.called(name)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that has no request in flight."""
        await self._control("/v1/unload_lora_adapter", {"lora_name": name})

    async def model_root(self) -> str:
        """Return the directory that the server was started on. Raises EngineUnavailable."""
        async with self._http.answer("GET", "/health", timeout=5.0):
            pass
        return str((await self._card())["root"])

    async def context(self) -> int | None:
        """Return how many tokens the server's model reads; None while it does not answer."""
        if self._context is None:
            with suppress(EngineError):
                self._context = (await self._card()).get("max_model_len")
        return self._context

    async def _card(self) -> dict[str, Any]:
        async with self._http.answer("GET", "/v1/models", timeout=5.0) as response:
            card: dict[str, Any] = orjson.loads(await response.read())["data"][0]
            return {"root": str(card["root"]), "max_model_len": card.get("max_model_len")}

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._http.answer(
            "POST", path, body or {}, self._load_timeout, once=True
        ) as response:
            content = await response.read()
            answer: dict[str, Any] = orjson.loads(content) if content[:1] == b"{" else {}
            return answer | {"results": [*(answer.get("results") or ())]}


def _find_error(events: bytes) -> int:
    """Return the index of vLLM's error in a stream; -1: none."""
    if events.startswith(_ERROR):
        return 0
    at = events.find(b"\n" + _ERROR)
    return at + 1 if at >= 0 else -1


def _split_events(text: bytes) -> tuple[bytes, bytes]:
    """Split off the whole server-sent events from the beginning of the next one."""
    end = text.rfind(b"\n\n") + 2
    return (text[:end], text[end:]) if end > 1 else (b"", text)


async def _parse_samples(content: bytes) -> list[SampledSequence]:
    """Parse the samples from vllm_plugins/capture.py, in the order of the answer's choices."""
    parsed = await off_loop(len(content), orjson.loads, content or b"[]")
    samples = [_parse_sample(**sample) for sample in parsed]
    if len({sample.name for sample in samples}) > 1:  # several prompts, answered side by side
        samples.sort(key=lambda sample: int(sample.name.rpartition("-")[2]))
    return samples


def _parse_sample(*, versions: Sequence[tuple[int, str]] = (), **fields: Any) -> SampledSequence:
    sample = SampledSequence(**fields)
    kinds = {*map(type, sample.token_ids)}, {*map(type, sample.logprobs)}
    if kinds[0] - {int} or kinds[1] - {int, float, type(None)}:
        raise ValueError(f"tokens or logprobs of sample {sample.name!r} are no numbers")
    for at, label in versions:
        if not sample.version:
            sample.version = _version_of(label)
        elif at < len(sample.token_ids):  # else a stop string has cut off the later tokens
            sample.seams.append(WeightChange(at=at, model=_version_of(label)))
    return sample


def _version_of(label: str) -> str:
    """Return the `name@N` in a label that `_name_weights` or `Adapters` composed."""
    return label.partition(" ")[0]


def _score(entries: Sequence[Any], tokens: list[int]) -> PromptScore:
    """Parse vLLM's entries, one for each token; the first token has none."""
    logprobs, top = [], []
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        value = entry[str(token)]["logprob"]
        if value is None or not math.isfinite(value):
            raise EngineError(f"the model gives token {token} no logprob: its weights hold NaN")
        logprobs.append(float(value))
        top.append(int(min(entry, key=lambda name: int(entry[name]["rank"]))))
    return PromptScore(logprobs, top)
