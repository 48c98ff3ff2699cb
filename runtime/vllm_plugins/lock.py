"""A replica answers nobody but the platform that started it, for it shares its host with others.

vLLM's server lets whoever reaches its port change weights, and its own keys are for `/v1` alone.
replica.py makes a secret for each process, hands it over in the environment, which unlike a command
line only the same user can read, and has vLLM take `Locked` as its outermost middleware;
vllm_http.py sends the secret along with each request.
"""

import os
import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "CRAY_AGENTS_REPLICA_SECRET"  # of the process
HEADER = "x-cray-secret"  # of each request

_REFUSAL = b'{"error": {"message": "only the platform that started this server may use it"}}'


class Locked:
    """ASGI middleware: 403 to every request, `/health` included, that does not have the secret."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._secret = os.environ[VARIABLE].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_ours(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})  # before it is accepted: that is a 403
        else:
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 403, "headers": kind})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_ours(self, scope: Scope) -> bool:
        told = dict(scope["headers"]).get(HEADER.encode(), b"")
        return secrets.compare_digest(told, self._secret)
