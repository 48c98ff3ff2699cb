"""Is it there, can it answer and record, and what is it made of."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import StoreError
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer, field, read_json
from cray_agents.runtime.gateway.http.error_envelope import envelope
from cray_agents.runtime.gateway.replica_lease import lease_seconds
from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """Health, and what `up` said of itself."""

    async def live(request: Request) -> Response:
        return answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        missing, why = services.promoting.missing(), None
        if missing or not services.pool.ready:
            told = f"no replica can answer with {', '.join(missing)}"
            why = told if missing else "no replica is up"
            lease = services.promoting.lending.lease
            if lease is not None and services.pool.ready:
                why += f": {lease.holder!r} has {lease.version} in its place, for a while"
            why += "; GET /v1/pool tells more"
        try:
            await asyncio.to_thread(services.store.check_room)
        except StoreError as error:
            why = f"{error}: no call is answered that cannot be recorded"
        if why is None:
            return answer({"status": "ready"})
        body = envelope(503, why, "not_ready")
        return Response(body, 503, {"retry-after": "1"}, "application/json")

    async def platform(request: Request) -> Response:
        return answer(services.platform)

    async def whoami(request: Request) -> Response:
        caller = caller_of(request)
        key = caller.key_id if caller.key_name else None
        return answer({"key": key, "name": caller.name, "role": caller.role.name})

    async def pool(request: Request) -> Response:
        lease = services.promoting.lending.lease
        return answer(
            {
                "data": services.pool.status(),
                "spares": services.pool.spares(),
                "lease": lease.status() if lease else None,
            }
        )

    async def renew(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        holder, seconds = field(body, "holder", str), lease_seconds(body)
        return answer(services.promoting.lending.renew(holder, seconds).status())

    return [
        Route("/health", live),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/v1/platform", platform),
        Route("/v1/whoami", whoami),
        Route("/v1/pool", pool),
        Route("/v1/pool/lease", renew, methods=["POST"]),
    ]
