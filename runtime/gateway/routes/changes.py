"""Changes: one resumable stream of what changed, by which pages and scripts stay current."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import TEXT, Described
from cray_agents.runtime.gateway.services import Services

KEEP_ALIVE = 15.0  # seconds of silence after which a comment line is sent, at most

router = Router("Platform")


@router.get(
    "/v1/events",
    Role.train,
    query={"after": Described(TEXT, "The `id` of the last event that was read.")},
    media={"text/event-stream": TEXT},
    fails="400 invalid_value",
)
async def stream_changes(services: Services, request: Request) -> Response:
    """Stream which runs, jobs, loops, datasets, models, batches, keys and replicas changed.

    Each event is `{"kind", "id", "change"}`; its `id` line is the cursor to go on after. Events
    come four times a second at most, and changes of one thing in between are one. `kind` is run,
    job, loop, dataset, model, batch, pool, key or reset; `change` is appended, forgotten or
    changed. An `id` of "" means any of its kind. `reset`: fetch everything anew, as the cursor is
    of before a restart (`restarted`) or too old (`lagged`). Comment lines keep the stream alive.
    """
    after = query(request).get("after")
    changes = services.changes.read(after, min(KEEP_ALIVE, services.keep_alive * 5))
    first = await anext(changes)  # raises for what is no cursor

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(changes):
            yield first
            async for event in changes:
                yield event

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), headers=headers, media_type="text/event-stream")
