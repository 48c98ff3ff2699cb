"""GET /metrics: what metrics.py counted, in the format the scraper asks for."""

import asyncio

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """The one route."""

    async def metrics(request: Request) -> Response:
        states = [str(replica.get("state")) for replica in services.pool.status()]
        services.metrics.look(services.admission, states)
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        # in a thread: a thousand series take some milliseconds
        text = await asyncio.to_thread(encode, services.metrics.registry)
        return Response(text, headers={"content-type": kind})

    return [Route("/metrics", metrics)]
