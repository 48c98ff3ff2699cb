"""Reports: Markdown about the platform, whose citations are verified whenever it is read."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    field,
    json_response,
    number,
    page,
    path_id,
    read_json,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.server_paths import without_paths
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    DELETED,
    TEXT,
    count_up_to,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.long_reads import answer_long_read
from cray_agents.runtime.gateway.services import Services, vocabulary_of
from cray_agents.runtime.reports.citations import CitationChecker, CitedThing
from cray_agents.runtime.reports.markdown_nodes import links_in, nodes_of
from cray_agents.runtime.reports.report_records import Report, ReportSummary, StoredReport
from cray_agents.runtime.reports.verified_report import verified
from cray_agents.runtime.views.generation_evidence import generation_detail, pairs_page

MOST_TEXT = 2**20  # bytes of a report
MOST_LINKS = 1000  # of a report: each may be verified whenever it is read
PAGE_LIMIT = 1000  # reports in a page

router = Router("Platform")


@router.get(
    "/v1/reports",
    Role.train,
    query={"limit": count_up_to(PAGE_LIMIT), "after": AFTER},
    answer=page_of(ReportSummary),
)
async def list_reports(services: Services, request: Request) -> Response:
    """List the reports, the last written first."""
    params = query(request)
    limit, after = number(params, "limit", 20, PAGE_LIMIT), params.get("after")

    def read() -> dict[str, Any]:
        reports, more = services.reports.list(after, limit)
        return page([one.model_dump() for one in reports], more)

    return json_response(await asyncio.to_thread(read))


@router.get("/v1/reports/{report}", Role.train, answer=Report, fails="404 not_found")
async def read_report(services: Services, request: Request) -> Response:
    """Return a report with its citations, each compared with what is recorded now.

    A citation is a link to a screen of the dashboard, as `#/run/RUN?t=4`, whose title is the quote.
    `broken` counts those that do not hold, each with its `error`.
    """
    report_id = path_id(request, "report", "report")
    return await _answer(services, request, lambda: services.reports.get(report_id))


@router.put(
    "/v1/reports/{report}",
    Role.train,
    body=object_of({"text": TEXT}),
    answer=Report,
    fails="400 invalid_value",
)
async def write_report(services: Services, request: Request) -> Response:
    """Write a report, or replace it; the answer is that of GET, with every citation verified.

    A report with broken citations is stored, too: its readers see which they are.
    """
    report_id = path_id(request, "report", "report")
    text = field(await read_json(request, services.max_body), "text", str)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MOST_TEXT:
        raise BadInput(f"text has {size} bytes, and may have {MOST_TEXT}", param="text")
    author = caller_of(request).key_name

    def put() -> StoredReport:
        if (links := sum(1 for _ in links_in(nodes_of(text)))) > MOST_LINKS:
            raise BadInput(f"text has {links} links, and may have {MOST_LINKS}", param="text")
        return services.reports.put(report_id, text, author)

    stored = await asyncio.to_thread(put)
    return await _answer(services, request, lambda: stored)


@router.delete(
    "/v1/reports/{report}",
    Role.train,
    answer=object_of({"id": TEXT, "deleted": DELETED}),
    fails="404 not_found",
)
async def delete_report(services: Services, request: Request) -> Response:
    """Delete a report for good."""
    report_id = path_id(request, "report", "report")
    await asyncio.to_thread(services.reports.delete, report_id)
    return json_response({"id": report_id, "deleted": True})


async def _answer(
    services: Services, request: Request, read: Callable[[], StoredReport]
) -> Response:
    checker = CitationChecker(
        services.run_pages,
        partial(vocabulary_of, services),
        partial(_facts, services),
    )

    def verify() -> dict[str, Any]:
        made = verified(read(), checker)
        report = made.model_dump(mode="json", exclude={"nodes"})
        report["nodes"] = [part.model_dump(exclude_defaults=True) for part in made.nodes]
        for one in report["citations"]:
            one["error"] = without_paths(one["error"])
        return report

    return await answer_long_read(services, request, verify)


def _facts(services: Services, target: CitedThing) -> dict[str, Any]:
    """Return the record of what a citation names, as its route has it. Raises NotFound, Corrupt."""
    match target.kind:
        case "dataset":
            return reader.read_dataset(services.home, target.id)
        case "job":
            return services.trainer.status(target.id).model_dump(mode="json")
        case "model":
            return _version(services, target.id)
        case "generation":
            return generation_detail(services.home, services.registry, target.id, target.generation)
        case "pair":
            return _pair(services, target)
        case "run":
            return dict(services.run_pages.outline(target.id, 0, 0)["run"])


def _version(services: Services, version: str) -> dict[str, Any]:
    name, at, number = version.rpartition("@")
    if not (name and at and number.isdecimal()):
        raise NotFound(f"{version!r} names no version: write it as name@3", param="at")
    record = services.registry.resolve(version)
    return {**record.model_dump(mode="json"), "id": record.id}


def _pair(services: Services, target: CitedThing) -> dict[str, Any]:
    assert target.at is not None
    pairs = pairs_page(services.home, target.id, target.generation, None, target.at - 1, 1)
    if not 1 <= target.at <= pairs["total"]:
        raise NotFound(f"the decision has {pairs['total']} pairs, from 1 on", param="pair")
    return dict(pairs["data"][0])
