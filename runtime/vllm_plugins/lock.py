"""Lock: let a vLLM server answer only the platform that started it.

vLLM's server lets everyone who reaches its port change weights; its own API keys protect `/v1`
alone. runtime/pool/vllm_replica.py makes a secret per process and passes it in the environment,
which only the same user can read. It starts vLLM with `Locked` as the outermost middleware, and
runtime/pool/vllm_http.py sends the secret with each request.
"""

import os
import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "CRAY_AGENTS_REPLICA_SECRET"  # in the server's environment
HEADER = "x-cray-secret"  # in each request

_REFUSAL = b'{"error": {"message": "only the platform that started this server may use it"}}'


class Locked:
    """ASGI middleware that answers 403 to requests without the secret, also on `/health`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._secret = os.environ[VARIABLE].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_ours(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})  # becomes a 403: it was not accepted yet
        else:
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 403, "headers": kind})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_ours(self, scope: Scope) -> bool:
        secret = dict(scope["headers"]).get(HEADER.encode(), b"")
        return secrets.compare_digest(secret, self._secret)
