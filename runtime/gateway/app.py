"""The gateway: one HTTP door to the pool, the store, the registry and the trainer.

`cray-agents up` serves it with uvicorn. Handlers take and give plain JSON: a chat request is not
worth two validations. Read next: routes/__init__.py, every route with its JSON; chat.py.
"""

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.routing import Route

from cray_agents.runtime.gateway import answers, openapi, passing
from cray_agents.runtime.gateway.auth import Access, guarded
from cray_agents.runtime.gateway.edge import Edge
from cray_agents.runtime.gateway.errors import HANDLERS
from cray_agents.runtime.gateway.routes import (
    batches,
    datasets,
    files,
    fine_tuning,
    health,
    jobs,
    loops,
    metrics,
    models,
    trajectories,
    uploads,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.keys import Keys

PARTS = (
    answers,
    passing,
    models,
    trajectories,
    datasets,
    jobs,
    fine_tuning,
    loops,
    health,
    metrics,
    batches,
    files,
    uploads,
    openapi,
)


def create_app(services: Services) -> FastAPI:
    """The ASGI application over these parts. It owns none of them: who made them closes them."""
    app = FastAPI(
        title="cray-agents",
        openapi_url=None,
        redirect_slashes=False,  # a redirect is no envelope, and clients drop the body on it
        exception_handlers=HANDLERS,
    )
    app.router.routes[:] = _routes(services)
    app.add_middleware(Edge, services=services)
    return app


def _routes(services: Services) -> Iterable[Route]:
    access = Access(Keys(services.home), services.api_keys, services.token)
    for part in PARTS:
        for route in part.routes(services):
            yield guarded(route, access)
