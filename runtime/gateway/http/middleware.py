"""Middleware: headers of every answer, and an envelope for every failure.

    x-request-id            the caller's, if it is a plain one, else a new one
    openai-processing-ms    from the request's head to the answer's
    x-ratelimit-*-requests  on model calls: requests admitted at once, how many more now, and the
                            time until all have ended (admission.py)

It counts the requests (metrics.py), and limits the wait for a body. The role check is one layer
further in, where the route is known: auth.py.
"""

import asyncio
import logging
import re
import time
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cray_agents.records import new_id
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.error_envelope import ERROR_CODE, BodyTimeout, envelope
from cray_agents.runtime.gateway.http.metrics import Metrics
from cray_agents.runtime.gateway.http.routing import GatewayRoute
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.telemetry.audit_log import AuditLog
from cray_agents.runtime.telemetry.call_metrics import OTHER

SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
INTERNAL = "internal_error"
MOST_REASON = 1000  # characters of a reason that the audit log keeps
REQUEST_ID = "cray_agents.request_id"  # in the scope: the request's id, as the answer has it

HeaderPairs = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class Middleware:
    """ASGI middleware around all routes."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        metrics: Metrics,
        body_timeout: float,
        audit: AuditLog | None = None,
    ) -> None:
        """Wrap `app`. `audit`: the log of changes; None where no route makes any."""
        self.app = app
        self._admission = admission
        self._metrics = metrics
        self._body_timeout = body_timeout
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = scope[REQUEST_ID] = _request_id(scope)
        status, first = 0, 0.0

        async def send_with_headers(message: Message) -> None:
            nonlocal status, first
            if message["type"] == "http.response.start":
                status = message["status"]
                first = time.perf_counter() - start
                headers: HeaderPairs = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id),
                    (b"openai-processing-ms", b"%d" % (first * 1000)),
                ]
                if getattr(scope.get("route"), "rate_limited", False):
                    headers += _rate_limit(self._admission)
                message["headers"] = headers
                if self._audit is not None and _is_audited(scope):
                    fields = _audit_fields(scope, status, request_id)
                    await asyncio.to_thread(self._audit.note, **fields)
            await send(message)

        self._metrics.in_flight += 1
        try:
            timed = _with_timeout(receive, self._body_timeout)
            await self.app(scope, timed, send_with_headers)
        except ClientDisconnect:
            log.info("%s: the client went away", request_id.decode())
        except Exception as error:
            log.exception("%s: %s failed", request_id.decode(), scope["path"])
            scope[ERROR_CODE] = INTERNAL
            if status:
                raise
            message = f"the gateway failed: {type(error).__name__}"
            body = envelope(500, message, INTERNAL, scope=scope)
            failed = Response(body, 500, media_type="application/json")
            await failed(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight -= 1
            self._count(scope, status, first, time.perf_counter() - start)

    def _count(self, scope: Scope, status: int, first: float, total: float) -> None:
        route = scope.get("route")
        known = isinstance(route, Route) and scope["method"] in (route.methods or ())
        method = scope["method"] if known else OTHER  # anybody may invent methods
        self._metrics.request(_template(scope), method, status, first, total)
        if (code := scope.get(ERROR_CODE)) is not None:
            self._metrics.error(code)


def _template(scope: Scope) -> str:
    """Return the path template of the request's route, once that is known."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else OTHER


def _is_audited(scope: Scope) -> bool:
    """Tell whether a request asks for a change of what keys of role `use` may not change."""
    route = scope.get("route")
    if not isinstance(route, GatewayRoute):
        return False
    changes = route.is_change and scope["method"] in (route.methods or ())
    return changes and route.audited and route.role in (Role.train, Role.admin)


def _audit_fields(scope: Scope, status: int, request_id: bytes) -> dict[str, Any]:
    caller = scope.get("state", {}).get("caller")
    who = {"who": "", "key": "", "role": ""}  # of a refused one nothing is known
    if caller is not None:
        who = {"who": caller.name, "key": caller.key_id, "role": caller.role.name}
    return {
        **who,
        "action": f"{scope['method']} {_template(scope)}",
        "path": scope["path"],
        "status": status,
        "request": request_id.decode(),
        # of the caller, for the change: UTF-8 as in a URL
        "reason": unquote(Headers(scope=scope).get("x-reason", ""))[:MOST_REASON],
    }


def _with_timeout(receive: Receive, seconds: float) -> Receive:
    """Return `receive` that raises BodyTimeout for a body that stands still so long."""
    more = True

    async def timed() -> Message:
        nonlocal more
        if not more:  # only a disconnect can follow
            return await receive()
        try:
            async with asyncio.timeout(seconds):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout(
                f"nothing came of the request's body for {seconds:g} s, and it is not whole"
            ) from None
        more = bool(message.get("more_body"))
        return message

    return timed


def _rate_limit(admission: Admission) -> HeaderPairs:
    room = admission.room()
    return [
        (b"x-ratelimit-limit-requests", b"%d" % room.limit),
        (b"x-ratelimit-remaining-requests", b"%d" % room.remaining),
        (b"x-ratelimit-reset-requests", duration(room.reset).encode()),
    ]


def duration(seconds: float) -> str:
    """Return seconds in the format of OpenAI's headers: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60}s"


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and SANE_ID.fullmatch(value):
            return bytes(value)
    return new_id("req").encode()
