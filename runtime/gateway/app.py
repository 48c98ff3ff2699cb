"""The gateway: an ASGI application over the pool, the store, the registry and the trainer.

`cray-agents up` serves it with uvicorn. Read next: routes/, the routes; http/routing.py, how they
are declared; model_calls/answer.py, the calls to models.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.http.auth import Access
from cray_agents.runtime.gateway.http.error_envelope import HANDLERS
from cray_agents.runtime.gateway.http.middleware import Middleware
from cray_agents.runtime.gateway.http.routing import GatewayRoute, Router, document
from cray_agents.runtime.gateway.routes import (
    batches,
    dashboard,
    datasets,
    exports,
    files,
    fine_tuning,
    jobs,
    keys,
    loops,
    models,
    platform,
    run_views,
    sampling,
    tinker,
    tinker_models,
    trajectories,
)
from cray_agents.runtime.gateway.services import CallServices, Services
from cray_agents.runtime.telemetry.audit_log import AuditLog

router = Router("Platform")
#: Exports and views of runs stand before trajectories: the first route that matches serves it.
ROUTERS = (
    sampling.router,
    models.models_router,
    models.router,
    exports.router,
    run_views.router,
    trajectories.router,
    datasets.router,
    jobs.router,
    tinker.router,
    tinker_models.router,
    fine_tuning.router,
    loops.router,
    platform.router,
    keys.router,
    batches.router,
    files.router,
    dashboard.router,
    router,
)


def create_app(services: Services) -> Starlette:
    """Return the ASGI application over these services, which stay their maker's to close."""
    access = Access(Keys(services.home), services.api_keys, services.token)
    return enclose(routes(), services, access, services.audit)


def enclose(
    routes: Sequence[BaseRoute],
    services: CallServices,
    access: Access,
    audit: AuditLog | None = None,
) -> Starlette:
    """Return the ASGI application of these routes, with what every answer has.

    `audit`: the log of changes; None for a gateway that makes none itself.
    """
    app = Starlette(routes=routes)
    app.state.services = services
    app.state.access = access
    app.state.work = services.work
    # a redirect is no error envelope, and clients drop the body on it
    app.router.redirect_slashes = False
    # only the layers that a request needs, without Starlette's own: each costs on every call
    app.middleware_stack = Middleware(
        ExceptionMiddleware(app.router, HANDLERS),
        services.admission,
        services.metrics,
        services.body_timeout,
        audit,
    )
    return app


def routes() -> Sequence[GatewayRoute]:
    """Return every route of the gateway."""
    return [route for router in ROUTERS for route in router.routes]


@router.get("/openapi.json", Role.use, answer=dict[str, Any], bare=True)
async def openapi(services: Services, request: Request) -> Response:
    """Return this document."""
    return Response(_openapi_json(), media_type="application/json")


@cache
def _openapi_json() -> bytes:
    return orjson.dumps(document(routes()))
