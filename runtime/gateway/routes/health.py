"""Is it there, can it answer, and what is it made of."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.runtime.gateway.bodies import answer
from cray_agents.runtime.gateway.errors import envelope
from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """Health, and what `up` said of itself."""

    async def live(request: Request) -> Response:
        return answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        if services.pool.ready:
            return answer({"status": "ready"})
        body = envelope(503, "no replica can answer yet; GET /v1/pool tells why", "not_ready")
        return Response(body, 503, {"retry-after": "1"}, "application/json")

    async def platform(request: Request) -> Response:
        return answer(services.platform)

    async def pool(request: Request) -> Response:
        return answer({"data": services.pool.status()})

    return [
        Route("/health", live),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/v1/platform", platform),
        Route("/v1/pool", pool),
    ]
