"""GET /metrics: what happened is counted once, and no client makes series at will."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.runtime.gateway.http.metrics import GONE, MOST_CODES, Metrics
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.telemetry.call_metrics import OTHER
from tests.support.gateway_with_keys import Site, site_at


async def broken(request: Request) -> Response:
    raise ZeroDivisionError


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path, Route("/v1/broken", broken)) as site:
        yield site


async def scrape(site: Site, **headers: str) -> dict[tuple[str, ...], float]:
    """The samples, by name and label values in the order of the labels' names."""
    async with site.http.get(f"{site.url}/metrics", headers=headers) as response:
        assert response.status == 200
        return samples(await response.text())


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_requests_by_route_method_and_status(site: Site) -> None:
    for path in ("/v1/models", "/v1/models", "/v1/models/a", "/v1/models/b", "/no/1", "/no/2"):
        await site.call("GET", path)
    await site.call("PUT", "/v1/models")
    await site.call("PROPFIND", "/v1/models")
    await site.call("GET", "/v1/broken")
    found = await scrape(site)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "cray_requests_total"}
    assert counted == {
        ("GET", "/v1/models", "2xx"): 2,
        ("GET", "/v1/models/{model}", "4xx"): 2,
        (OTHER, OTHER, "4xx"): 2,
        (OTHER, "/v1/models", "4xx"): 2,  # anybody may invent methods
        ("GET", "/v1/broken", "5xx"): 1,
    }
    errors = {key[1]: value for key, value in found.items() if key[0] == "cray_errors_total"}
    assert errors == {
        "model_not_found": 2, "unknown_url": 2, "method_not_allowed": 2, "internal_error": 1,
    }  # fmt: skip
    for name in ("cray_request_seconds", "cray_first_byte_seconds"):
        assert found[(f"{name}_count", "/v1/models")] == 4
        assert 0 < found[(f"{name}_sum", "/v1/models")] < 60
    assert found[("cray_requests_in_flight",)] == 1  # the scrape itself
    assert (await scrape(site))[("cray_requests_total", "GET", "/metrics", "2xx")] == 1


async def test_many_paths_make_no_series(site: Site) -> None:
    for number in range(50):
        await site.call("GET", f"/v1/models/{number}")
        await site.call("GET", f"/{number}")
    first = await scrape(site)
    for number in range(50):
        await site.call("GET", f"/v1/models/more-{number}")
        await site.call("GET", f"/more/{number}")
    series = {key for key in await scrape(site) if "/metrics" not in key}
    assert {key for key in first if "/metrics" not in key} == series


async def test_how_things_stand(tmp_path: Path) -> None:
    admission = Admission(3, 5)
    async with site_at(tmp_path, admission=admission) as site:
        tickets = [admission.enter(str(number)) for number in range(5)]
        tickets += [admission.enter(batch=True) for _ in range(4)]
        found = await scrape(site)
        places = {
            (kind, place): found[("cray_admission_requests", kind, place)]
            for kind in ("interactive", "batch")
            for place in ("inside", "waiting")
        }
        assert places == {
            ("interactive", "inside"): 3, ("interactive", "waiting"): 2,
            ("batch", "inside"): 0, ("batch", "waiting"): 4,
        }  # fmt: skip
        assert found[("cray_admission_capacity",)] == 3
        assert found[("cray_replicas", "serving")] == 1
        assert found[("cray_replicas", "down")] == 0
        for ticket in tickets:
            ticket.release()
        assert (await scrape(site))[("cray_admission_requests", "batch", "waiting")] == 0


async def test_error_codes_are_bounded() -> None:
    metrics = Metrics()
    for number in range(3 * MOST_CODES):
        metrics.error(f"code-{number}")
    metrics.error("code-0")
    (family,) = [family for family in metrics.registry.collect() if family.name == "cray_errors"]
    totals = {s.labels["code"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert len(totals) == MOST_CODES + 1
    assert totals["code-0"] == 2 and totals[OTHER] == 2 * MOST_CODES


async def test_formats(site: Site) -> None:
    for accept, kind in (
        ("*/*", "text/plain"),
        ("application/openmetrics-text; version=1.0.0",) * 2,
    ):
        async with site.http.get(f"{site.url}/metrics", headers={"accept": accept}) as response:
            assert response.headers["content-type"].startswith(kind.partition(";")[0])
            assert ("# EOF" in await response.text()) is ("openmetrics" in kind)


async def test_a_client_that_leaves_is_counted(tmp_path: Path) -> None:
    async def read(request: Request) -> Response:
        await request.body()
        raise AssertionError("the body never comes")

    async with site_at(tmp_path, Route("/v1/read", read, methods=["POST"])) as site:
        _, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rpartition(":")[2]))
        head = b"POST /v1/read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        writer.write(head)
        await writer.drain()
        writer.close()
        key, found = ("cray_requests_total", "POST", "/v1/read", GONE), await scrape(site)
        async with asyncio.timeout(120):
            while key not in found:
                found = await scrape(site)
        assert found[("cray_requests_in_flight",)] == 1
