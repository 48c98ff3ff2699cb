"""Long reads: scans of all runs, a few at a time, that end when their client leaves.

A page asks for them at each changed filter. Left alone, those of a million runs would keep all
threads and cores busy for what nobody looks at any more.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.runtime.gateway.http.bodies import json_response
from cray_agents.runtime.gateway.model_calls.answer import await_or_disconnect
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.store.index.given_up import GIVE_UP


async def answer_long_read(
    services: Services, request: Request, read: Callable[[], dict[str, Any]]
) -> Response:
    """Answer with what `read` returns, which a thread calls when it is its turn.

    Raises ClientDisconnect.
    """
    left = threading.Event()
    GIVE_UP.set(left)  # the thread gets a copy of this context

    async def work() -> dict[str, Any]:
        async with services.scanning:
            return await asyncio.to_thread(read)

    try:
        return json_response(await await_or_disconnect(request, None, work()))
    finally:
        left.set()
