"""The gateway: one HTTP door to the pool, the store, the registry and the trainer.

`cray-agents up` serves it with uvicorn. Handlers take and give plain JSON: a chat request is not
worth two validations. Read next: routes/__init__.py, every route with its JSON;
answers.py, those that ask a model.
"""

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from cray_agents.runtime.gateway import openapi
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import Access, guarded
from cray_agents.runtime.gateway.http.error_envelope import HANDLERS
from cray_agents.runtime.gateway.http.middleware import Middleware
from cray_agents.runtime.gateway.model_calls import answer, passthrough
from cray_agents.runtime.gateway.routes import (
    batches,
    datasets,
    exports,
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

PARTS = (
    answer,
    passthrough,
    models,
    exports,
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


def create_app(services: Services) -> Starlette:
    """The ASGI application over these parts. It owns none of them: who made them closes them."""
    app = Starlette(routes=[*_routes(services)])
    app.router.redirect_slashes = (
        False  # a redirect is no envelope, and clients drop the body on it
    )
    # the layers that a request needs, and none of Starlette's own: each costs on every call
    app.middleware_stack = Middleware(ExceptionMiddleware(app.router, HANDLERS), services)
    return app


def _routes(services: Services) -> Iterable[Route]:
    access = Access(Keys(services.home), services.api_keys, services.token)
    for part in PARTS:
        for route in part.routes(services):
            yield guarded(route, access)
