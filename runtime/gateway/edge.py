"""The gateway's outermost layer: a request id on every answer, an envelope for every failure."""

import logging
import re

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cray_agents.records import new_id
from cray_agents.runtime.gateway.errors import envelope

SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger(__name__)


class Edge:
    """ASGI middleware. The caller's `x-request-id` is kept if it is a plain one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except ClientDisconnect:
            log.info("%s: the client went away", request_id.decode())
        except Exception as error:
            log.exception("%s: %s failed", request_id.decode(), scope["path"])
            if started:
                raise
            await _answer_500(tagged, error)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and SANE_ID.fullmatch(value):
            return bytes(value)
    return new_id("req").encode()


async def _answer_500(send: Send, error: Exception) -> None:
    body = envelope(500, f"the gateway failed: {type(error).__name__}", "internal_error")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
