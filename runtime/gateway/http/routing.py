"""Routing: declare a route once, with its path, role, shapes and handler.

A module of `routes/` makes a `Router` and decorates its handlers:

    router = Router("Training")

    @router.get("/v1/jobs/{job_id}", Role.train, answer=JobStatus)
    async def retrieve_job(services: Services, request: Request) -> Response:
        '''Return the state of a job.'''

Three things follow from a declaration: the Starlette route, the role check before the handler
(auth.py), and the operation in /openapi.json (openapi.py). The handler's name becomes the
operation's name, the first line of its docstring the summary, the rest the description. The role
has no default, so no route is open by oversight. Handlers check their own bodies and parameters
(bodies.py). Read next: routes/, the declarations; app.py, which mounts them.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.runtime.gateway.http import bodies
from cray_agents.runtime.gateway.http.auth import Access, RequiredRole, RoleCheck
from cray_agents.runtime.gateway.http.shapes import Described, Shape

IN_RUN = "/runs/{run_id}"  # the base URL of a run, before the paths that are served under it

Method = Literal["GET", "POST", "DELETE"]
#: Takes the Services, which this folder knows nothing about, and the request.
Handler: TypeAlias = Callable[[Any, Request], Awaitable[Response]]
Decorator: TypeAlias = Callable[[Handler], Handler]


class RouteOptions(TypedDict, total=False):
    """The optional fields of a declaration, as keywords of a router's methods.

    answer: the shape of the JSON answer. media: the shapes of other answers, by media type.
    body, form: the shape of a JSON or multipart body. body_optional: the body may be left out.
    query, headers: the parameters that may be given, by name.
    fails: the refusals worth knowing, as "404 not_found, 400 invalid_value".
    in_runs: the route is also served under the base URL of a run.
    rate_limited: answers carry the state of the wait queue (middleware.py).
    """

    answer: Shape
    media: Mapping[str, Shape]
    body: Shape
    form: Shape
    body_optional: bool
    query: Mapping[str, Shape | Described]
    headers: Mapping[str, Described]
    fails: str
    in_runs: bool
    rate_limited: bool


@dataclass(frozen=True)
class Declaration:
    """A declared route. Below the handler stand the fields of RouteOptions.

    role: the least role that may call the route; "open" needs no key.
    """

    method: Method
    path: str
    role: RequiredRole
    tag: str
    handler: Handler
    answer: Shape | None = None
    media: Mapping[str, Shape] | None = None
    body: Shape | None = None
    form: Shape | None = None
    body_optional: bool = False
    query: Mapping[str, Shape | Described] | None = None
    headers: Mapping[str, Described] | None = None
    fails: str = ""
    in_runs: bool = False
    rate_limited: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The path templates of the route."""
        return (self.path, IN_RUN + self.path) if self.in_runs else (self.path,)


class Router:
    """The routes of a module; `tag` is their heading in the document."""

    def __init__(self, tag: str) -> None:
        self.declarations: list[Declaration] = []
        self._tag = tag

    def get(self, path: str, role: RequiredRole, **options: Unpack[RouteOptions]) -> Decorator:
        """Declare the decorated handler for GET."""
        return self._declare("GET", path, role, options)

    def post(self, path: str, role: RequiredRole, **options: Unpack[RouteOptions]) -> Decorator:
        """Declare the decorated handler for POST."""
        return self._declare("POST", path, role, options)

    def delete(self, path: str, role: RequiredRole, **options: Unpack[RouteOptions]) -> Decorator:
        """Declare the decorated handler for DELETE."""
        return self._declare("DELETE", path, role, options)

    def _declare(
        self, method: Method, path: str, role: RequiredRole, options: RouteOptions
    ) -> Decorator:
        def declare(handler: Handler) -> Handler:
            self.declarations.append(Declaration(method, path, role, self._tag, handler, **options))
            return handler

        return declare


class DeclaredRoute(Route):
    """The Starlette route of a declaration, at one of its paths."""

    def __init__(self, declaration: Declaration, path: str, services: Any, access: Access) -> None:
        super().__init__(path, declaration.handler, methods=[declaration.method])
        handler = partial(declaration.handler, services)
        self.declaration = declaration
        self.app = RoleCheck(handler, declaration.role, access)


def mount(
    declarations: Iterable[Declaration], services: Any, access: Access
) -> Iterator[DeclaredRoute]:
    """Yield a Starlette route for each path of the declarations, in their order."""
    for declaration in declarations:
        for path in declaration.paths:
            yield DeclaredRoute(declaration, path, services, access)


def query(request: Request) -> dict[str, str]:
    """Return the query parameters. Raises BadInput for one that the route does not declare."""
    return bodies.query(request, declaration_of(request).query or ())


def declaration_of(request: Request) -> Declaration:
    """Return the declaration of the route that a request came by."""
    route = request.scope["route"]
    assert isinstance(route, DeclaredRoute)
    return route.declaration
