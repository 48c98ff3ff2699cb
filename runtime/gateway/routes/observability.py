"""Observability: the engines' metrics for Prometheus."""

import asyncio

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.telemetry.replica_metrics import EngineCollector, scrape

POINTS = 600  # of a series, unless the request says otherwise
MOST_NAMES = 50  # of metrics in a request
HOUR = 3600.0

router = Router("Platform")


@router.get(
    "/metrics/engines", Role.use, media={"text/plain": {}, "application/openmetrics-text": {}}
)
async def engine_metrics(services: Services, request: Request) -> Response:
    """Return the metrics of every replica's vLLM for Prometheus.

    Each sample has the labels replica, host and version. `cray_engine_up` is 0 for a replica that
    did not answer.
    """
    texts = await scrape(services.pool.engines())
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    text = await asyncio.to_thread(encode, EngineCollector(texts))
    return Response(text, headers={"content-type": kind})
