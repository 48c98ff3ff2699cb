"""The journal of loops: a record of each finished generation, and other entries, written once."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import NotFound
from cray_agents.exact_json import dump_json
from cray_agents.queries import RunQuery
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    damage_told,
    json_response,
    number,
    page,
    path_id,
    path_number,
    read_json,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    AFTER,
    ANY,
    BOOL,
    COUNT,
    TRACE,
    Described,
    count_up_to,
    data_of,
    object_of,
    page_of,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.telemetry.timeline import MOST_RUNS, generation_timeline
from cray_agents.runtime.views.generation_evidence import (
    generation_detail,
    outcome_named,
    pairs_page,
)
from cray_agents.runtime.views.job_series import job_events
from cray_agents.runtime.views.loop_summaries import generation_names, loops_page
from cray_agents.runtime.views.view_records import GenerationDetail, LoopSummary, PairPage

PAGE_LIMIT = 1000  # loops or pairs in a page
CREATED = object_of({"created": BOOL})

router = Router("Training")


@router.get(
    "/v1/loops",
    Role.train,
    query={"limit": count_up_to(PAGE_LIMIT), "after": AFTER},
    answer=page_of(LoopSummary),
)
async def list_loops(services: Services, request: Request) -> Response:
    """List the loops with their last generation and held-out success, newest change first."""
    params = query(request)
    limit = number(params, "limit", 20, PAGE_LIMIT)

    def read() -> dict[str, Any]:
        listing = loops_page(services.home, params.get("after"), limit)
        return page(listing.rows, listing.has_more, damaged=listing.damaged)

    return await answer_read(request, read, long=True)


@router.get(
    "/v1/loops/{loop}/generations/{number}/timeline",
    Role.train,
    answer=TRACE,
    fails="404 not_found",
)
async def read_generation_timeline(services: Services, request: Request) -> Response:
    """Return the phases, job and runs of a finished generation in Chrome's trace format.

    Perfetto (ui.perfetto.dev) opens it. `ts` and `dur` are microseconds since `otherData.begin`.
    """
    loop, folder = path_id(request, "loop", "loop"), _folder(services, request)
    path = folder / f"{path_number(request, 'number', 'generation')}.json"

    def read() -> bytes:
        try:
            record, ended = checksums.read_json(path), path.stat().st_mtime
        except FileNotFoundError:
            raise NotFound(f"loop {loop!r} has no generation {path.stem}", param="number") from None
        events = job_events(services.home, str(record.get("job_id") or ""))
        which = RunQuery(loop=loop, generation=int(path.stem), order="oldest", limit=MOST_RUNS)
        runs = services.store.stream(which)
        return dump_json(generation_timeline(loop, record, ended, job_events=events, runs=runs))

    return await answer_read(request, read)


@router.get(
    "/v1/loops/{loop}/generations/{number}",
    Role.train,
    answer=GenerationDetail,
    fails="404 not_found",
)
async def read_generation(services: Services, request: Request) -> Response:
    """Return a finished generation with the decision on its candidate, and the wealth behind it."""
    loop, count = path_id(request, "loop", "loop"), path_number(request, "number", "generation")
    detail = partial(generation_detail, services.home, services.registry, loop, count)
    return await answer_read(request, detail)


@router.get(
    "/v1/loops/{loop}/generations/{number}/pairs",
    Role.train,
    query={
        "outcome": {"enum": ["won", "lost", "even"]},
        "at": Described(COUNT, "The first pair, from 0."),
        "limit": count_up_to(PAGE_LIMIT),
    },
    answer=PairPage,
    fails="404 not_found",
)
async def list_pairs(services: Services, request: Request) -> Response:
    """List the held-out tasks that a decision compared, with both runs, in their order."""
    loop, count = path_id(request, "loop", "loop"), path_number(request, "number", "generation")
    params = query(request)
    outcome = outcome_named(params.get("outcome"))
    at, limit = number(params, "at", 0), number(params, "limit", 100, PAGE_LIMIT)
    read = partial(pairs_page, services.home, loop, count, outcome, at, limit)
    return await answer_read(request, read)


@router.get("/v1/loops/{loop}/journal/{entry}", Role.train, answer=ANY, fails="404 not_found")
async def recall_entry(services: Services, request: Request) -> Response:
    """Return an entry of a loop's journal."""
    return await answer_read(request, partial(_recall, _entry(services, request)))


@router.post("/v1/loops/{loop}/journal/{entry}", Role.train, body=ANY, answer=CREATED)
async def note_entry(services: Services, request: Request) -> Response:
    """Note a decision of a loop; the first note stays."""
    record = await read_json(request, services.max_body)
    path = _entry(services, request)
    created = await asyncio.to_thread(lambda: durable.create_file(path, _text(record)))
    return json_response({"created": created})


@router.get("/v1/loops/{loop}/generations", Role.train, answer=data_of(ANY))
async def list_generations(services: Services, request: Request) -> Response:
    """List a loop's finished generations, in the order of their numbers."""
    folder = _folder(services, request)

    def read_one(name: str) -> Any:
        return checksums.read_json(folder / f"{name}.json")

    def read() -> dict[str, Any]:
        listing = checksums.list_whole(generation_names(folder.parent), read_one)
        return {"data": listing.rows, **damage_told(listing.damaged)}

    return await answer_read(request, read)


@router.post("/v1/loops/{loop}/generations/{number}", Role.train, body=ANY, answer=CREATED)
async def finish_generation(services: Services, request: Request) -> Response:
    """Record a generation; the first record stays."""
    record = await read_json(request, services.max_body)
    path = _folder(services, request) / f"{path_number(request, 'number', 'generation')}.json"
    created = await asyncio.to_thread(lambda: durable.create_file(path, _text(record)))
    return json_response({"created": created})


def _folder(services: Services, request: Request) -> Path:
    return services.home.loop(path_id(request, "loop", "loop")) / "generations"


def _entry(services: Services, request: Request) -> Path:
    journal = services.home.loop(path_id(request, "loop", "loop")) / "journal"
    return journal / f"{path_id(request, 'entry', 'entry')}.json"


def _recall(path: Path) -> Any:
    try:
        return checksums.read_json(path)
    except FileNotFoundError:
        loop = path.parent.parent.name
        raise NotFound(f"loop {loop!r} has no entry {path.stem!r}", param="entry") from None


def _text(record: Any) -> bytes:
    return checksums.with_crc(dump_json(record))
