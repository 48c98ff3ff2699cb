"""Lock and guard: who may use a vLLM server, and which versions it answers with now.

vLLM's server lets everyone who reaches its port change weights; its own API keys protect `/v1`
alone. runtime/pool/vllm_process.py makes a secret per process and passes it in the
environment, which only the same user can read. It starts vLLM with `Locked` as the outermost
middleware, and runtime/pool/vllm_http.py sends the secret with each request. At a port the
server first proves that it knows the secret (proof.py), for who else may have taken it.

Several gateways may send requests to one server, and one controller changes its weights. A gateway
may be late to hear of a change. So each sampling request names the version that it expects, and the
server refuses those whose version it was not told to admit: the gateway then looks again. The
server also counts what it answers, for the controller waits for the requests of all gateways.
runtime/pool/replica.py gives the orders.
"""

import json
import os
import secrets
import time
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cray_agents.runtime.vllm_plugins import proof, wire
from cray_agents.runtime.vllm_plugins.wire import CLOSED, EXPECT, GUARD, HEADER, VARIABLE

_REFUSAL = {"error": {"message": "only the platform that started this server may use it"}}


class VersionGuard:
    """The versions that a server answers with, and the requests that it answers, by version.

    An order may name the term of the controller that gives it. Orders of a lower term than the
    highest one so far are not carried out: their controller was followed by another one.
    """

    def __init__(self) -> None:
        self.term = 0
        self.admitted: set[str] = set()
        self.in_flight: Counter[str] = Counter()

    def follow(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry an order out, and return the requests in flight by version.

        `admit`: a version to answer with. `refuse`: one to answer with no more, "" for all.
        Of an order that is not carried out the answer is `superseded`, the highest term.
        """
        term = int(order.get("term", 0))
        if term < self.term:
            return {"superseded": self.term}
        self.term = term
        if "admit" in order:
            self.admitted.add(str(order["admit"]))
        if "refuse" in order:
            version = str(order["refuse"])
            self.admitted -= {version} if version else set(self.admitted)
        return {"in_flight": dict(self.in_flight)}

    def enter(self, version: str) -> bool:
        """Count a request that expects this version; return False if it is not admitted."""
        if version not in self.admitted:
            return False
        self.in_flight[version] += 1
        return True

    def leave(self, version: str) -> None:
        """Count a request as ended."""
        self.in_flight[version] -= 1
        if not self.in_flight[version]:
            del self.in_flight[version]


def refusal_of(version: str) -> dict[str, Any]:
    """Return the body of the refusal of a version that is not admitted; its status is 409."""
    message = f"this server does not answer with {version} now: ask which one does"
    return {"error": {"message": message, "type": CLOSED, "code": 409}}


class Locked:
    """ASGI middleware that answers 403 to requests without the secret, also on `/health`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._secret = os.environ[VARIABLE].encode()
        self._guard = VersionGuard()
        # seconds of the host's monotonic clock; the engine is ready when its server is built
        marks = json.loads(os.environ.get(wire.MARKS, "{}"))
        self._marks: dict[str, float] = {**marks, "built": time.monotonic()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (answer := self._prove(scope)) is not None:
            await _answer(send, 200, {"proof": answer})
        elif not secrets.compare_digest(headers.get(HEADER.encode(), b""), self._secret):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close"})  # becomes a 403: it was not accepted yet
            else:
                await _answer(send, 403, _REFUSAL)
        elif scope["type"] == "http" and scope["path"] == GUARD:
            await _answer(send, 200, self._guard.follow(json.loads(await _body(receive))))
        elif scope["type"] == "http" and scope["path"] == wire.START:
            await _answer(send, 200, self._marks)
        elif (expected := headers.get(EXPECT.encode())) is None:
            await self.app(scope, receive, send)
        else:
            await self._answer_with(expected.decode(), scope, receive, send)

    def _prove(self, scope: Scope) -> str | None:
        """Return the proof that this server knows the secret; None for what does not ask for it."""
        if scope["type"] != "http" or scope["path"] != proof.PATH or scope["server"][1] is None:
            return None
        (host, port), query = scope["server"], scope["query_string"].decode("latin-1")
        return proof.proof_of(self._secret.decode(), query.removeprefix("nonce="), host, port)

    async def _answer_with(self, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._guard.enter(version):
            await _body(receive)  # else the connection cannot be used again
            await _answer(send, 409, refusal_of(version))
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self._guard.leave(version)


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = bool(message.get("more_body"))
    return body


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content, separators=(",", ":")).encode()
    # with its length, as proof.py reads it
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
