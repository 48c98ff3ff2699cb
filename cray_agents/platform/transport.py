"""Requests to a platform over HTTP, and its refusals as typed errors. Called by platform.py.

It is the openai client's own transport, so that a light install needs nothing more. That client is
imported when first used: it takes longer to import than all of ours (as in openai_engine.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from cray_agents.engines.openai_engine import OpenAIEngine
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
#: How often a platform whose answer may take any time is asked whether it is still there, and how
#: long it may take to say so, each time that the client tries.
ALIVE_SECONDS = 30.0
#: What the client's transport raises, under whatever name it is installed, before a request is out.
_NOT_SENT = {"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol"}


class Transport:
    """A platform's routes under /v1.

    All raise EngineUnavailable, EngineTimeout, and what `typed` makes.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self.engine = OpenAIEngine(url, api_key=api_key, exact_tokens=True)

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON that a GET answers; a query's list is sent as that name several times."""
        return await self._json(lambda c: c.get(_asked(path, query), cast_to=object))

    async def text(self, path: str, query: Mapping[str, Any] | None = None) -> str:
        """The text that a GET answers."""
        return str(await self._sent(lambda c: c.get(_asked(path, query), cast_to=str)))

    async def post(
        self, path: str, body: dict[str, Any], *, patient: bool = False, once: str = ""
    ) -> dict[str, Any]:
        """The JSON that a POST answers.

        patient: the answer may take any time, as long as the platform answers others. once: it is
        not sent again, as done twice would be too much; what to do when its answer is lost.
        """
        options = _options(patient=patient, once=bool(once))
        sent = self._json(lambda c: c.post(path, cast_to=object, body=body, options=options), once)
        return await (self._while_alive(sent, once) if patient else sent)

    async def delete(
        self, path: str, query: Mapping[str, Any], *, patient: bool = False
    ) -> dict[str, Any]:
        """The JSON that a DELETE answers; `patient` as for `post`."""
        options = _options(patient=patient)
        sent = self._json(lambda c: c.delete(_asked(path, query), cast_to=object, options=options))
        return await (self._while_alive(sent) if patient else sent)

    async def _json(self, request: "Request", once: str = "") -> dict[str, Any]:
        return cast("dict[str, Any]", await self._sent(request, once))

    async def _sent(self, request: "Request", once: str = "") -> object:
        import openai

        try:
            with self.engine.connections.one() as client:
                return await request(client)
        except openai.APIStatusError as error:
            raise typed(error) from error
        except openai.APIConnectionError as error:
            raise self._unanswered(error, once) from error

    async def _while_alive(
        self, sent: Coroutine[Any, Any, dict[str, Any]], once: str = ""
    ) -> dict[str, Any]:
        """A patient request's answer; a host that is gone closes no connection, and never says."""
        import openai

        answer = asyncio.create_task(sent)
        asked = openai.Timeout(ALIVE_SECONDS, connect=CONNECT_SECONDS)
        try:
            while not (await asyncio.wait({answer}, timeout=ALIVE_SECONDS))[0]:
                with self.engine.connections.one() as client, suppress(openai.APIStatusError):
                    await client.get("/platform", cast_to=object, options={"timeout": asked})
            return await answer
        except openai.APIConnectionError as error:
            then = f": {once}" if once else ""
            raise EngineUnavailable(f"the platform at {self.url} is silent now{then}") from error
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _unanswered(self, error: "openai.APIConnectionError", once: str) -> EngineError:
        """Nobody was there, or somebody was and the answer was lost."""
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
    """The client's options for one request."""
    import openai

    options: openai.RequestOptions = {}
    if patient:
        options["timeout"] = openai.Timeout(None, connect=CONNECT_SECONDS)
    if once:
        options["max_retries"] = 0
    return options


def _asked(path: str, query: Mapping[str, Any] | None) -> str:
    """The path with its query. The client's own way of sending a list is `tag[]`."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def typed(error: "openai.APIStatusError") -> CrayError:
    """The gateway's envelope as the error it came from."""
    body: dict[str, Any] = error.body if isinstance(error.body, dict) else {}
    message = str(body.get("message") or error.message)
    code = body.get("code")
    if code == PoolBusy.code:
        return PoolBusy(message)
    if code == Displaces.code:
        return Displaces(message)
    if code == SwapError.code:
        return SwapError(message)
    if code == JobError.code:
        return JobError(message)
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


MOST = 16  # runs a request: the platform, which reads them at once, keeps nobody waiting for long

Event = dict[str, Any]


class Recording:
    """Sends events in groups, one request after the other. Belongs to one event loop."""

    def __init__(self, send: Callable[[list[Event]], Awaitable[None]]) -> None:
        self._send = send
        self._group: list[Event] = []  # the one that gathers
        self._newest: asyncio.Task[None] | None = None  # ... and its request, once it has events

    async def put(self, event: Event) -> None:
        """Return when the event is stored. Raises what `send` raises of it."""
        sent = self._newest
        if sent is None or not self._group or len(self._group) == MOST:
            self._group = []
            sent = self._newest = asyncio.create_task(self._in_turn(self._group, sent))
        group = self._group
        group.append(event)
        try:
            await asyncio.shield(sent)
        except BadInput:
            if len(group) == 1:
                raise
            await self._send([event])  # it was for another one, or for their size together

    async def _in_turn(self, group: list[Event], before: asyncio.Task[None] | None) -> None:
        """Send a group after the one before, however that ended; it gathers until then."""
        if before is not None:
            await asyncio.wait({before})
        if self._group is group:
            self._group = []
        await self._send(group)
