"""Changes: one resumable stream of what changed, and views that open pages are told to show."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import json_response, parse, read_json
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    BOOL,
    COUNT,
    FLAG,
    TEXT,
    Described,
    list_of,
    object_of,
)
from cray_agents.runtime.gateway.routes.trajectories import one_of
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.reports.citations import CitedThing, target_of, turn_error
from cray_agents.runtime.reports.report_records import View

KEEP_ALIVE = 15.0  # seconds of silence after which a comment line is sent, at most

COMPARED = object_of({"turn": COUNT, "ok": BOOL})

router = Router("Platform")


@router.get(
    "/v1/events",
    Role.train,
    query={
        "after": Described(TEXT, "The `id` of the last event that was read."),
        "page": Described(FLAG, "The reader is a page, which POST /v1/view tells what to show."),
    },
    media={"text/event-stream": TEXT},
    fails="400 invalid_value",
)
async def stream_changes(services: Services, request: Request) -> Response:
    """Stream which runs, jobs, loops, datasets, models, batches, keys and replicas changed.

    Each event is `{"kind", "id", "change"}`; its `id` line is the cursor to go on after. Events
    come four times a second at most, and changes of one thing in between are one. `kind` is run,
    job, loop, dataset, model, batch, pool, key, report or reset; `change` is appended, forgotten or
    changed. An `id` of "" means any of its kind. `reset`: fetch everything anew, as the cursor is
    of before a restart (`restarted`) or too old (`lagged`). Comment lines keep the stream alive.
    """
    params = query(request)
    is_page = one_of(params, "page", ("false", "true")) == "true"
    owner = caller_of(request).key_id if is_page else None
    keep_alive = min(KEEP_ALIVE, services.keep_alive * 5)
    changes = services.changes.read(params.get("after"), keep_alive, owner)
    first = await anext(changes)  # raises for what is no cursor

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(changes):
            yield first
            async for event in changes:
                yield event

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), headers=headers, media_type="text/event-stream")


@router.post(
    "/v1/view",
    Role.train,
    body=View,
    answer=object_of(
        {"pages": COUNT, "highlight": list_of(object_of({"turn": COUNT, "ok": BOOL}))}
    ),
    fails="400 invalid_value",
)
async def show_view(services: Services, request: Request) -> Response:
    """Show something on the dashboard's pages that the caller's key has open now.

    `url` is what stands in a page's address from `#/` on, as `#/run/RUN?t=4`. `highlight` marks
    quotes in turns of that run, each with its reason; the answer says which are there, byte for
    byte. Pages are told by /v1/events, in an event of the name `view`. A hidden page reads nothing.
    """
    body = await read_json(request, services.max_body)
    view = parse(View, body)
    target = target_of(view.url)
    run_id = target.id if isinstance(target, CitedThing) and target.kind == "run" else None
    if view.highlight and run_id is None:
        raise BadInput("highlight marks turns of a run: url must be as #/run/RUN", param="url")

    def compare() -> list[dict[str, Any]]:
        pages = services.run_pages
        return [
            {"turn": one.turn, "ok": not turn_error(pages, run_id or "", one.turn, one.quote)}
            for one in view.highlight
        ]

    compared = await asyncio.to_thread(compare)
    content = {**view.model_dump(mode="json"), "run": run_id}
    pages = services.changes.show(caller_of(request).key_id, dump_json(content))
    return json_response({"pages": pages, "highlight": compared})
