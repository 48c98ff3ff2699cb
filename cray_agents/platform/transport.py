"""Transport: send a platform's requests over HTTP, and raise its refusals as typed errors.

It uses the openai client, so that a light install needs no other. That client is imported when
first used, as its import takes longer than all of ours (see engines/openai_engine.py). Called by
client.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from cray_agents.engines.openai_engine import KeySource, OpenAIEngine
from cray_agents.errors import (
    AccessDenied,
    BadInput,
    CrayError,
    Displaces,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    JobError,
    NotFound,
    PoolBusy,
    SwapError,
    TooManyRequests,
)

if TYPE_CHECKING:
    import openai

    Request = Callable[[openai.AsyncOpenAI], Awaitable[object]]

CONNECT_SECONDS = 5.0
#: Seconds between checks that a platform is alive while its answer takes long, and seconds that
#: each try of such a check may take.
ALIVE_SECONDS = 30.0
#: Names of the transport's errors before a request is sent, under httpx and httpx2.
_NOT_SENT = {"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol"}


class Transport:
    """A platform's routes under /v1.

    All raise EngineUnavailable, EngineTimeout, and the errors of `typed_error`.
    """

    def __init__(self, url: str, api_key: KeySource | None) -> None:
        self.url = url
        self.engine = OpenAIEngine(url, api_key=api_key, exact_tokens=True)
        self.engine.gateway = True

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON answer of a GET. A list in the query repeats its name."""
        return await self._json(lambda c: c.get(_with_query(path, query), cast_to=object))

    async def rows(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the rows of all pages of a list."""
        more: dict[str, Any] = {**query}
        answer: dict[str, Any] = {"has_more": True}
        while answer["has_more"]:
            answer = await self.get(path, more)
            for row in answer["data"]:
                yield row
            more["after"] = answer["last_id"]

    async def text(self, path: str, query: Mapping[str, Any] | None = None) -> str:
        """Return the text answer of a GET."""
        return str(await self._send(lambda c: c.get(_with_query(path, query), cast_to=str)))

    async def post(
        self, path: str, body: dict[str, Any], *, patient: bool = False, once: str = ""
    ) -> dict[str, Any]:
        """Return the JSON answer of a POST.

        With `patient` the answer may take any time, as long as the platform answers other requests.
        With `once` the request is not sent again. `once` is then the advice for a user whose answer
        was lost.
        """
        options = _options(patient=patient, once=bool(once))
        sent = self._json(lambda c: c.post(path, cast_to=object, body=body, options=options), once)
        return await (self._while_alive(sent, once) if patient else sent)

    async def delete(
        self, path: str, query: Mapping[str, Any], *, patient: bool = False
    ) -> dict[str, Any]:
        """Return the JSON answer of a DELETE; `patient` as for `post`."""
        options = _options(patient=patient)
        sent = self._json(
            lambda c: c.delete(_with_query(path, query), cast_to=object, options=options)
        )
        return await (self._while_alive(sent) if patient else sent)

    async def events(
        self, path: str, query: Mapping[str, Any] | None = None
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the (id, data) of the server-sent events of a GET, until it ends."""
        import openai

        options: Any = {"timeout": openai.Timeout(None, connect=CONNECT_SECONDS)}
        try:
            with self.engine.connections.borrow() as client:
                stream = await client.get(
                    _with_query(path, query),
                    cast_to=object,
                    options=options,
                    stream=True,
                    stream_cls=openai.AsyncStream[object],
                )
                cursor = ""
                async with stream:
                    async for line in stream.response.aiter_lines():
                        if line.startswith("id: "):
                            cursor = line[4:]
                        elif line.startswith("data: "):
                            yield cursor, json.loads(line[6:])
        except openai.APIStatusError as error:
            raise typed_error(error) from error
        except openai.APIConnectionError as error:
            raise self._connection_error(error, "") from error

    async def _json(self, request: "Request", once: str = "") -> dict[str, Any]:
        return cast("dict[str, Any]", await self._send(request, once))

    async def _send(self, request: "Request", once: str = "") -> object:
        import openai

        try:
            with self.engine.connections.borrow() as client:
                return await request(client)
        except openai.APIStatusError as error:
            raise typed_error(error) from error
        except openai.APIConnectionError as error:
            raise self._connection_error(error, once) from error

    async def _while_alive(
        self, sent: Coroutine[Any, Any, dict[str, Any]], once: str = ""
    ) -> dict[str, Any]:
        """Await a patient request, and check the platform: a lost host closes no connection."""
        import openai

        answer = asyncio.create_task(sent)
        timeout = openai.Timeout(ALIVE_SECONDS, connect=CONNECT_SECONDS)
        try:
            while not (await asyncio.wait({answer}, timeout=ALIVE_SECONDS))[0]:
                with self.engine.connections.borrow() as client, suppress(openai.APIStatusError):
                    await client.get("/platform", cast_to=object, options={"timeout": timeout})
            return await answer
        except openai.APIConnectionError as error:
            then = f": {once}" if once else ""
            raise EngineUnavailable(f"the platform at {self.url} is silent now{then}") from error
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _connection_error(self, error: "openai.APIConnectionError", once: str) -> EngineError:
        """Return the error of a request that was not answered, or whose answer was lost."""
        import openai

        if type(error.__cause__).__name__ in _NOT_SENT:
            return EngineUnavailable(
                f"no platform answers at {self.url}: start one with `cray-agents up --model DIR`, "
                "or name another with CRAY_AGENTS_URL"
            )
        then = f": {once}" if once else ""
        if isinstance(error, openai.APITimeoutError):
            return EngineTimeout(f"the platform at {self.url} did not answer in time{then}")
        return EngineUnavailable(f"the platform at {self.url} broke off before it answered{then}")


def _options(*, patient: bool, once: bool = False) -> "openai.RequestOptions":
    """Return the client's options for one request."""
    import openai

    options: openai.RequestOptions = {}
    if patient:
        options["timeout"] = openai.Timeout(None, connect=CONNECT_SECONDS)
    if once:
        options["max_retries"] = 0
    return options


def _with_query(path: str, query: Mapping[str, Any] | None) -> str:
    """Return the path with its query. The client itself would send a list as `tag[]`."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def typed_error(error: "openai.APIStatusError") -> CrayError:
    """Return the error that the gateway put into its envelope."""
    body: dict[str, Any] = error.body if isinstance(error.body, dict) else {}
    message = str(body.get("message") or error.message)
    code = body.get("code")
    kinds: tuple[type[CrayError], ...] = (PoolBusy, Displaces, SwapError, JobError)
    for kind in kinds:
        if code == kind.code:
            return kind(message)
    if error.status_code in (401, 403):
        return AccessDenied(message, status=error.status_code, code=code, param=body.get("param"))
    if error.status_code == 429:
        wait = float(error.response.headers.get("retry-after-ms", 1000)) / 1000
        return TooManyRequests(message, retry_after=wait)
    if error.status_code == 404:
        return NotFound(message, param=body.get("param"), code=code)
    if error.status_code < 500:
        return BadInput(message, param=body.get("param"), code=code)
    return EngineError(message, status=error.status_code)


MAX_EVENTS = 16  # runs a request, few enough that the platform reads them quickly
LINGER = 0.02  # seconds that a group waits for more; a run's own calls are not delayed

Event = dict[str, Any]


class Recording:
    """A sender of events in groups, one request after the other, for one event loop."""

    def __init__(self, send: Callable[[list[Event]], Awaitable[None]]) -> None:
        self._send = send
        self._group: list[Event] = []  # the group that is being filled
        self._newest: asyncio.Task[None] | None = None  # its request, once it has events

    async def put(self, event: Event) -> None:
        """Store an event, and return when it is durable. Raises the errors of `send`."""
        sent = self._newest
        if sent is None or not self._group or len(self._group) == MAX_EVENTS:
            self._group = []
            sent = self._newest = asyncio.create_task(self._in_turn(self._group, sent))
        group = self._group
        group.append(event)
        try:
            await asyncio.shield(sent)
        except BadInput:
            if len(group) == 1:
                raise
            await self._send([event])  # another event, or their total size, caused the error

    async def _in_turn(self, group: list[Event], before: asyncio.Task[None] | None) -> None:
        """Send a group after the request before has ended in any way; fill the group until then."""
        if before is not None:
            await asyncio.wait({before})
        await asyncio.sleep(LINGER)
        if self._group is group:
            self._group = []
        await self._send(group)
