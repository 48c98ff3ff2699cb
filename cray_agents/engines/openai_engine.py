"""OpenAIEngine: the ChatEngine of a gateway, or of any other server with OpenAI's API.

The engine requests exact tokens, unless the server cannot report them. Retries (429, 408, 409,
5xx, no connection) are the openai client's own, with its back-off. That client is imported when
first used, as its import takes longer than all of ours. A gateway is asked directly at first
(plain_http.py); if that comes to nothing, the openai client asks. Called by agent/description.py
and platform/transport.py.
"""

import asyncio
import functools
import logging
import math
import os
import random
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

import orjson

from cray_agents.engines.no_real_models import check_real_model
from cray_agents.engines.plain_http import Connection, PlainHttp
from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable, StoreError
from cray_agents.exact_json import dump_json
from cray_agents.records import REWARD_REFUSED, Run, digest

if TYPE_CHECKING:
    import openai
    from openai import AsyncOpenAI

WIDTH = 16  # concurrent requests of a client, before another one is made
MAX_CLIENTS = 64


@dataclass
class _Client:
    """A client and the number of its current requests."""

    client: "AsyncOpenAI"
    busy: int = 0


class ClientPool:
    """Clients, made on demand. Consecutive requests share a connection."""

    def __init__(self, make: Callable[[], "AsyncOpenAI"]) -> None:
        self._make = make
        # connections belong to the event loop that opened them
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Client]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def borrow(self) -> Iterator["AsyncOpenAI"]:
        """Lend a client to one request, until the request has ended."""
        chosen = self._choose(self._open.setdefault(asyncio.get_running_loop(), []))
        chosen.busy += 1
        try:
            yield chosen.client
        finally:
            chosen.busy -= 1

    def _choose(self, clients: list[_Client]) -> _Client:
        """Return the first client with room, else a new one, else the least busy one."""
        free = next((entry for entry in clients if entry.busy < WIDTH), None)
        if free is None and len(clients) < MAX_CLIENTS:
            free = _Client(self._make())
            clients.append(free)
        return free or min(clients, key=lambda entry: entry.busy)

    async def close(self) -> None:
        """Close this event loop's clients; the next request opens new ones."""
        for entry in self._open.pop(asyncio.get_running_loop(), []):
            await entry.client.close()


URL = "http://127.0.0.1:8000/v1"
RETRIES = 4  # after about 0.5, 1, 2 and 4 s: enough for the restart of a replica
TIMEOUT = 600.0  # seconds, as the openai client's own
REPEATED = "x-stainless-retry-count"  # the openai client's header of a request that it sends again
#: The first two are for vLLM. A gateway answers the third in their place, at less cost.
_EXACT = {"return_token_ids": True, "logprobs": True, "return_samples": True}
_REJECTED = (400, 422)  # HTTP status of servers that do not know a field

log = logging.getLogger(__name__)


#: A key, or a function that returns it.
KeySource = str | Callable[[], Awaitable[str]]


class OpenAIEngine:
    """Chat completions of the server at `base_url`, which may leave out the `/v1`.

    A request is a dict in the shape of OpenAI's chat completions. Its key `extra_headers`, named as
    in the openai client, contains headers for this one request (agents send X-Run-Id there).

    Args:
        base_url: default $CRAY_AGENTS_URL, else http://127.0.0.1:8000/v1.
        api_key: default $CRAY_AGENTS_API_KEY, else "none". A function is called for each request.
        retries: repetitions of a request to an overloaded or absent server.
        timeout: seconds per request; default: 600.
        exact_tokens: True to request token ids and logprobs. None: request them until the server
            turns out not to know them.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: KeySource | None = None,
        retries: int = RETRIES,
        timeout: float | None = None,
        exact_tokens: bool | None = None,
    ) -> None:
        url = (base_url or os.environ.get("CRAY_AGENTS_URL") or URL).rstrip("/")
        self.base_url = url if urlsplit(url).path else f"{url}/v1"
        self.exact_tokens = exact_tokens
        #: True if the server is a cray-agents gateway; None until checked.
        self.gateway: bool | None = None
        self._api_key = api_key or os.environ.get("CRAY_AGENTS_API_KEY") or "none"
        self._retries = retries
        self._timeout = timeout
        self.connections = ClientPool(self._new_client)
        self._direct = _direct_client(self.base_url)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request. Raises EngineError and its subclasses, after retries."""
        check_real_model(self.base_url)
        content = await self._chat_directly(request)
        if content is None:
            repeated = {REPEATED: "1", **request.get("extra_headers", {})}
            again = {**request, "extra_headers": repeated} if self.gateway else request
            with self.connections.borrow() as client:
                content = (await self._send(client, again, stream=False)).content
        try:
            completion = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.base_url} answered with no JSON: {error}") from error
        if not isinstance(completion, dict):
            raise EngineError(f"{self.base_url} answered with no JSON object")
        self._learn_exact(completion)
        return completion

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer as chunks. Raises as `chat` does. After the first chunk nothing is retried."""
        check_real_model(self.base_url)
        with self.connections.borrow() as client:
            raw = await self._send(client, request, stream=True)
            with self._translate_errors():
                async with raw.parse() as chunks:
                    async for chunk in chunks:
                        yield chunk.to_dict(mode="json")

    async def record(self, run: Run) -> None:
        """Post a finished run to the gateway, which has its calls already.

        Do nothing at any other server. Raises StoreError when the gateway refuses the run.
        """
        if not await self._is_gateway():
            return
        path, body = f"/trajectories/{quote(run.id, safe='')}/events", {"events": [run_event(run)]}
        if await self.post_directly(path, body) is not None:
            return
        import openai

        try:
            with self.connections.borrow() as client:
                await client.post(path, cast_to=object, body=body)
        except openai.OpenAIError as error:
            refused = getattr(error, "code", None) == REWARD_REFUSED
            raise StoreError(
                f"run {run.id} ended ({run.stop_reason}) but {self.base_url} did not take its "
                f"record: {error}",
                code=REWARD_REFUSED if refused else None,
            ) from error

    async def post_directly(self, path: str, body: Any, **headers: str) -> bytes | None:
        """Return the answer of a gateway to JSON posted at a path below `base_url`.

        None where the openai client has to ask: it has the retries, and the errors. The request may
        have been carried out all the same. Before that, an overloaded or absent gateway gets a
        moment. Numbers that are not finite have no JSON, and it says so.
        """
        if self._direct is None or not self.gateway:
            return None
        key = self._api_key if isinstance(self._api_key, str) else await self._api_key()
        headers = {"Authorization": f"Bearer {key}", **headers}
        path, timeout, status = urlsplit(self.base_url).path + path, self._timeout or TIMEOUT, 0
        with suppress(OSError, ValueError):
            status, _, content = await self._direct.post(path, dump_json(body), headers, timeout)
            if status == 200:
                return content
        if status in (0, 408, 409, 429) or status >= 500:
            await asyncio.sleep(random.uniform(0.3, 0.5))
        return None

    async def _chat_directly(self, request: dict[str, Any]) -> bytes | None:
        exact = {} if self.exact_tokens is False else _EXACT
        body = {**exact, **request, "stream": False}
        headers = body.pop("extra_headers", None) or {}
        if any(isinstance(value, float) and not math.isfinite(value) for value in body.values()):
            return None
        return await self.post_directly("/chat/completions", body, **headers)

    async def close(self) -> None:
        """Close this event loop's connections; the next request opens new ones."""
        if self._direct is not None:
            self._direct.close()
        await self.connections.close()

    def _new_client(self) -> "AsyncOpenAI":
        import openai

        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._api_key,
            max_retries=self._retries,
            timeout=self._timeout or openai.NOT_GIVEN,
            # The default client closes itself when garbage collected, on the event loop running
            # then. That fails with "Event loop is closed" if its own loop has ended.
            http_client=openai.DefaultAsyncHttpxClient(),
        )

    async def _send(self, client: "AsyncOpenAI", request: dict[str, Any], *, stream: bool) -> Any:
        """Send a request, for exact tokens if possible; return the openai client's raw response."""
        if self.exact_tokens is False:
            return await self._create(client, request, stream=stream)
        try:
            return await self._create(client, {**_EXACT, **request}, stream=stream)
        except EngineError as error:
            if self.exact_tokens or error.status not in _REJECTED:
                raise
            raw = await self._create(client, request, stream=stream)
        log.info("%s takes no %s: no exact tokens", self.base_url, ", ".join(_EXACT))
        self.exact_tokens = False
        return raw

    async def _create(self, client: "AsyncOpenAI", request: dict[str, Any], *, stream: bool) -> Any:
        # The whole body goes through extra_body, which accepts fields unknown to OpenAI (top_k).
        # It also saves the client's walk over all messages, which grows with the conversation.
        body = {key: value for key, value in request.items() if key != "extra_headers"}
        options: dict[str, Any] = {"extra_headers": request.get("extra_headers")}
        create: Any = client.chat.completions.with_raw_response.create
        with self._translate_errors():
            return await create(
                model=body["model"], messages=[], stream=stream, extra_body=body, **options
            )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate the openai client's errors into ours."""
        import openai

        try:
            yield
        except openai.APITimeoutError as error:
            raise EngineTimeout(f"{self.base_url} did not answer in time") from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise EngineUnavailable(
                f"nobody answers at {self.base_url} ({cause}): start a platform with "
                "`cray-agents up --model DIR`, or name another with CRAY_AGENTS_URL"
            ) from error
        except openai.APIStatusError as error:
            raise _engine_error(error, error.status_code) from error
        except openai.APIError as error:  # an error event in mid-stream
            status = int(error.code) if error.code and error.code.isdecimal() else 0
            raise _engine_error(error, status) from error
        except _transport_errors() as error:
            raise EngineUnavailable(
                f"{self.base_url} broke off in mid-answer: {type(error).__name__} {error}"
            ) from error

    def _learn_exact(self, completion: Mapping[str, Any]) -> None:
        if self.exact_tokens is None:
            choices = completion.get("choices") or [{}]
            has_samples = "samples" in completion
            self.exact_tokens = has_samples or isinstance(choices[0].get("token_ids"), list)

    async def _is_gateway(self) -> bool:
        """Find out once, from a route that only a gateway has."""
        import openai

        if self.gateway is None:
            try:
                with self.connections.borrow() as client:
                    once = client.with_options(max_retries=0)  # the chat has retried already
                    await once.get("/platform", cast_to=object)
                self.gateway = True
            except openai.APIStatusError as error:
                if error.status_code < 500:
                    self.gateway = False
            except openai.APIConnectionError as error:
                log.warning(
                    "%s does not answer, so a run is not recorded: %s", self.base_url, error
                )
        return bool(self.gateway)


@functools.cache
def engine_at(base_url: str | None, api_key: str | None) -> OpenAIEngine:
    """Return the engine that all agents without their own engine share, per server and key."""
    return OpenAIEngine(base_url, api_key=api_key)


def _direct_client(base_url: str) -> PlainHttp | None:
    """Return a client without TLS and proxy, where neither is needed."""
    parts = urlsplit(base_url)
    if parts.scheme != "http" or getproxies():
        return None

    async def connect() -> tuple[asyncio.Transport, Connection]:
        loop = asyncio.get_running_loop()
        return await loop.create_connection(Connection, parts.hostname or "", parts.port or 80)

    return PlainHttp(parts.netloc.rpartition("@")[2], connect)


def run_event(run: Run) -> dict[str, Any]:
    """Make an event of the store from a finished run. Its turns name their calls by id only.

    The same run twice gives the same event. A run repeated under its id gives another event.
    """
    turns = [turn.model_copy(update={"call": None}) for turn in run.trajectory.turns]
    trajectory = run.trajectory.model_copy(update={"turns": turns})
    bare = run.model_copy(update={"trajectory": trajectory})
    body = orjson.loads(bare.model_dump_json())  # as text first: JSON has no infinity
    return {"id": f"{run.id}.run.{digest(body)}", "kind": "run", "body": body}


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the transport's errors in mid-stream: httpx's under openai 2, httpx2's under 3."""
    known = (sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    return tuple(module.HTTPError for module in known)


def _engine_error(error: "openai.APIError", status: int) -> EngineError:
    kind = EngineUnavailable if status in (502, 503, 504) else EngineError
    return kind(error.message, status=status, param=error.param, code=error.code)
