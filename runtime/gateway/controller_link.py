"""Controller link: how a further gateway reaches the process that decides for the shared root.

The claim of that process, `platform.json`, has its address and its key. It is read again several
times a second, and whenever the address does not answer: after a takeover another process has
claimed the root. Requests that a further gateway does not answer itself are forwarded as they are,
with the caller's own key. Nothing is sent before the other side of the connection has proved to be
of the platform: runtime/vllm_plugins/proof.py. Read next: further_gateway.py.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

import aiohttp
import orjson
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from cray_agents.errors import NoController, NotFound, NotLoaded
from cray_agents.exact_json import dump_json
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.http.middleware import REQUEST_ID
from cray_agents.runtime.pool.vllm_http import ProvedConnector

POLL_INTERVAL = 0.25  # seconds between two looks at the claim
_ASCII = bytes(range(0x21, 0x7F))
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"),
    )
)
_OWN_HEADERS = frozenset((b"x-request-id", b"openai-processing-ms"))  # the middleware adds them

Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerClaim:
    """The address of the controller, for this host, its key and term, and if it is on this host.

    `replicas`: as `up --replicas` takes it; "" from a platform that did not tell.
    """

    url: str
    token: str
    term: int
    here: bool
    replicas: str = ""


UNKNOWN = ControllerClaim("", "", 0, here=False)


def read_claim(home: Home) -> ControllerClaim | None:
    """Return the claim on a root; None without one. Raises OSError, of which Corrupt is one.

    The address of a controller on another host, that only its own host reaches, is "".
    """
    try:
        info = checksums.read_json(home.platform)
    except FileNotFoundError:
        return None
    here = info["host"] == socket.gethostname()
    url = info.get("control") or info["url"] if here else info["elsewhere"] or ""
    replicas = str(info.get("replicas", ""))
    return ControllerClaim(str(url), str(info["token"]), int(info.get("term", 0)), here, replicas)


class ControllerLink:
    """The way to the controller of a root, by its `claim` as last read. Close it when done."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.claim = UNKNOWN
        self._session: aiohttp.ClientSession | None = None

    async def follow(self) -> None:
        """Read the claim again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_INTERVAL)

    async def look(self) -> bool:
        """Read the claim; return True if the controller is another one now."""
        before = self.claim
        try:
            self.claim = await asyncio.to_thread(read_claim, self._home) or UNKNOWN
        except (OSError, KeyError, TypeError, ValueError) as error:  # the last known may be right
            log.warning("the controller is not known anew: %s", error)
        return self.claim not in (UNKNOWN, before)

    async def ask(
        self, path: str, body: dict[str, Any], seconds: float | None = None
    ) -> dict[str, Any]:
        """POST to the controller as the platform itself. Raises NoController, NotLoaded, NotFound.

        It may take as long as the loading of a version; with `seconds`, no longer than these.
        """
        claim = self._known()
        headers = {"authorization": f"Bearer {claim.token}", "content-type": "application/json"}
        try:
            async with self._http().post(
                URL(claim.url).with_path(path),
                data=dump_json(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            await self.look()
            raise _nobody(error) from error
        if response.status == 200 and isinstance(answer, dict):
            return answer
        match answer:
            case {"error": {"code": code, "message": str(message)}}:
                for kind in (NotLoaded, NotFound):
                    if code in (kind.code, "model_not_found" if kind is NotFound else ""):
                        raise kind(message)
            case _:
                message = f"{response.status}, {str(answer)[:200]}"
        raise NoController(f"the controller refused {path}: {message}")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the controller answer a request, as an ASGI application. Raises NoController.

        The body and the answer pass in pieces. Nothing is sent twice: only a request that did not
        reach the controller is sent to its successor.
        """
        body = _Body(scope, receive)
        while True:
            claim = self._known()
            try:
                response = await self._send(claim, scope, body)
            except aiohttp.ClientConnectorError as error:
                await self.look()
                if not body.begun and self.claim != claim:
                    continue
                raise _nobody(error) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise NoController(
                    "the controller went away while it answered: look whether it has done what was"
                    " asked, and ask again if not"
                ) from error
            break
        try:
            await _pass_on(response, body, send)
        finally:
            response.close()

    async def _send(
        self, claim: ControllerClaim, scope: Scope, body: "_Body"
    ) -> aiohttp.ClientResponse:
        at = URL(claim.url)
        assert at.host is not None
        target = URL.build(  # of parts: no text of a client decides about the host
            scheme=at.scheme,
            host=at.host,
            port=at.port,
            path=quote_from_bytes(scope.get("raw_path") or scope["path"].encode(), _ASCII),
            query_string=quote_from_bytes(scope["query_string"], _ASCII),
            encoded=True,
        )
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP_BY_HOP and name != b"x-request-id"
        ]
        headers.append(("x-request-id", scope[REQUEST_ID].decode()))
        return await self._http().request(
            scope["method"],
            target,
            headers=headers,
            data=body.pieces() if body.expected else None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def _known(self) -> ControllerClaim:
        if not self.claim.url:
            known = self.claim is not UNKNOWN
            raise _nobody("it listens on loopback of another host" if known else "")
        return self.claim

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:  # made late because it belongs to the running loop
            self._session = aiohttp.ClientSession(
                connector=ProvedConnector(lambda: self.claim.token),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()


def _nobody(why: object) -> NoController:
    because = f" ({why})" if why else ""
    return NoController(
        f"no controller answers for this root{because}: models are still asked, and everything else"
        " is to be asked again in a few seconds; `cray-agents status` tells more"
    )


class _Body:
    """The body of a request that is passed on, and the wait for its client to leave."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.expected = bool(names & {b"content-length", b"transfer-encoding"})
        self.begun = False
        self._receive = receive
        self._ended = not self.expected

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        while not self._ended:
            message = await self._receive()
            self.begun = True
            self._ended = not message.get("more_body")
            if message.get("body"):
                yield message["body"]

    async def wait_until_left(self) -> None:
        """Return when the client has left; a body that was not read is dropped."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _pass_on(response: aiohttp.ClientResponse, body: _Body, send: Send) -> None:
    headers: Headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _HOP_BY_HOP | _OWN_HEADERS
    ]
    start: Message = {"type": "http.response.start", "status": response.status, "headers": headers}
    await send(start)
    task = asyncio.current_task()
    assert task is not None
    left = asyncio.create_task(body.wait_until_left())
    left.add_done_callback(lambda done: None if done.cancelled() else response.close())
    try:
        async for piece in response.content.iter_any():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except aiohttp.ClientError:
        if not left.done():
            raise  # the connection to the client is broken off, as the controller's was
        return
    finally:
        left.cancel()
    await send({"type": "http.response.body", "body": b""})
