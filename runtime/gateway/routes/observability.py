"""Observability: the engines' metrics for Prometheus, and a day of history for pages."""

import asyncio
import math
import time

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.bodies import json_response, number
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    REAL,
    TEXT,
    Described,
    count_up_to,
    list_of,
    object_of,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.observability.engine_metrics import EngineCollector, scrape
from cray_agents.runtime.observability.metrics_history import (
    KEPT,
    MOST_POINTS,
    curve_json,
    known_names,
    read_curves,
)

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


CURVES = object_of(
    {
        "data": list_of(
            object_of({"name": TEXT, "labels": object_of(), "points": list_of(list_of(REAL))})
        ),
        "from": REAL,
        "to": REAL,
    },
    {"names": list_of(TEXT)},
)


@router.get(
    "/v1/metrics/range",
    Role.use,
    answer=CURVES,
    query={
        "names": Described(TEXT, "Names of metrics, with commas; none: the answer lists them."),
        "from": Described(REAL, "Unix seconds; default: an hour before `to`."),
        "to": Described(REAL, "Unix seconds; default: now."),
        "points": Described(count_up_to(MOST_POINTS), "Points of a series, at most."),
    },
    fails="400 invalid_value",
)
async def metrics_range(services: Services, request: Request) -> Response:
    """Return curves of the platform's metrics of the last day.

    The platform samples its metrics every ten seconds and keeps them for a day on its host's disk.
    A point is [Unix seconds, value]; of each interval it is the last sample. Counters are as
    Prometheus has them: they grow, and begin at 0 with each start of the platform.
    """
    params = query(request)
    names = [name for name in params.get("names", "").split(",") if name]
    if len(names) > MOST_NAMES:
        raise BadInput(f"names: at most {MOST_NAMES}, not {len(names)}", param="names")
    now = time.time()
    end = _seconds(params, "to", now)
    begin = _seconds(params, "from", end - HOUR)
    if not begin < end:
        raise BadInput(f"from must be before to, not {begin:g} and {end:g}", param="from")
    points = max(1, number(params, "points", POINTS, MOST_POINTS))
    begin = max(begin, now - KEPT) if end > now - KEPT else begin
    folder = services.history
    span = {"from": begin, "to": end}
    if not names:
        listed = await asyncio.to_thread(known_names, folder, now)
        return json_response({"data": [], **span, "names": listed})
    curves = await asyncio.to_thread(read_curves, folder, names, begin, end, points)
    return json_response({"data": [curve_json(curve) for curve in curves], **span})


def _seconds(params: dict[str, str], name: str, default: float) -> float:
    text = params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e12:
        raise BadInput(f"{name} must be Unix seconds, not {text[:50]!r}", param=name)
    return value
