"""Routing: declare a route once, with its path, role and handler; FastAPI and pydantic do the rest.

A module of `routes/` makes a `Router` and decorates its handlers:

    router = Router("Training")

    @router.get("/v1/jobs/{job_id}", Role.train, answer=JobStatus)
    async def retrieve_job(services: Current, job_id: JobId) -> Response:
        '''Return the state of a job.'''

Three things follow: the route, the role check before the handler (auth.py), and the operation in
/openapi.json. The handler's parameters are the path's, the query's and, as `body`, the JSON body:
their types check and document them. A handler that only reads is no coroutine: a thread calls it
(client_work.py), and the answer is what it returns, as `answer_read` writes it. Its name becomes
the operation's name, the first line of its docstring the summary, the rest the description. The
role has no default, so no route is open by oversight. Routes with `bare=True` skip FastAPI's
handling and its cost: their handlers take the services and the request alone. Read next: fields.py,
types of parameters; routes/; app.py.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, Unpack

from fastapi import Header
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cray_agents.runtime.gateway.http.auth import RequiredRole, RoleCheck
from cray_agents.runtime.gateway.http.bodies import (
    JSON,
    answer_read,
    check_known,
    has_body,
    read_json,
    read_record,
)
from cray_agents.runtime.gateway.http.fields import Error, RunId

IN_RUN = "/runs/{run_id}"  # the base URL of a run, before the paths that are served under it
TAGS = {
    "Models": "Ask a model. Every answer is recorded with the tokens that were sampled.",
    "Files": "Files, uploads in parts, and batches of requests.",
    "Training": "Runs and rewards, datasets, training jobs, loops.",
    "Tinker": "The wire API of Tinker's client, whose scripts train by commands.",
    "Versions": "The versions of a model: staging, promotion, canaries.",
    "Platform": "Health, the replicas, metrics, this document.",
}
ABOUT = (
    "OpenAI's endpoint over a platform that trains its own models. A model is `name`, its promoted "
    "version, or `name@N`. Every answer carries `x-request-id`; every failure is an `Error`. "
    "Where keys are required, a request without a good one is refused with 401 invalid_api_key, "
    "one whose key has too small a role with 403 insufficient_permissions, and one that would "
    "change what another key made with 403 not_the_owner."
)
FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be served; `code` tells why."},
    "5XX": {"model": Error, "description": "The request may be good, and could not be served."},
}
BINARY: dict[str, Any] = {"type": "string", "contentMediaType": "application/octet-stream"}

Method = Literal["GET", "POST", "DELETE"]
Handler: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Handler], Handler]


class RouteOptions(TypedDict, total=False):
    """The optional fields of a route, as keywords of a router's methods.

    answer: the type of the JSON answer. media: JSON schemas of other answers, by media type.
    form: the fields of a multipart body, which the handler reads itself.
    max_body: bytes, or a limit of the Services: `settings`, or `runs` for what holds runs.
    fails: the refusals worth knowing, as "409 swap_failed, 400 invalid_value". A path that names
    something has 404 not_found without saying so.
    in_runs: the route is also served under the base URL of a run.
    rate_limited: answers carry the state of the wait queue (middleware.py).
    audited: False keeps a change out of the audit log: it comes many times a minute and is of the
    platform's own working, or of a training that one audited request began.
    local: a further gateway answers it itself (further_gateway.py), and forwards all others.
    own_query: the handler checks the names of the query's parameters itself.
    long: the handler only reads, and many records.
    bare: see above; `body`, `headers` and `query` then document what the handler reads.
    """

    answer: Any
    media: Mapping[str, Any]
    form: type[BaseModel]
    max_body: int | Literal["settings", "runs"]
    fails: str
    in_runs: bool
    rate_limited: bool
    audited: bool
    local: bool
    own_query: bool
    long: bool
    bare: bool
    body: type[BaseModel]
    headers: type[BaseModel]


class GatewayRoute(APIRoute):
    """A route at one of its paths. The fields beside FastAPI's are those of RouteOptions.

    role: the least role that may call the route; "open" needs no key.
    """

    def __init__(
        self, method: Method, path: str, role: RequiredRole, handler: Handler, tag: str,
        options: RouteOptions,
    ) -> None:  # fmt: skip
        self.role = role
        self.rate_limited = options.get("rate_limited", False)
        self.audited = options.get("audited", True)
        self.local = options.get("local", False)
        self._own_query = options.get("own_query", False)
        self._max_body = options.get("max_body", "settings")
        bare = options.get("bare", False)
        fails = options.get("fails", "")
        if "{" in path and "404 not_found" not in fails:
            fails = ", ".join(filter(None, ("404 not_found", fails)))
        summary, description = _texts(handler, fails)
        extra: dict[str, Any] = {"security": []} if role == "open" else {}
        if "form" in options:
            schema = options["form"].model_json_schema()
            extra["requestBody"] = {"content": {"multipart/form-data": {"schema": schema}}}
        media = {kind: {"schema": schema} for kind, schema in options.get("media", {}).items()}
        answer = options.get("answer")
        if bare:
            endpoint: Handler = _documented(path, options)
        elif inspect.iscoroutinefunction(handler):
            endpoint = handler
        else:
            endpoint = _reading(handler, next(iter(media), JSON), options.get("long", False))
        super().__init__(
            path,
            endpoint,
            methods=[method],
            response_model=answer,
            responses=FAILURES | ({200: {"content": media}} if media else {}),
            response_description="Done.",
            tags=[tag],
            summary=summary,
            operation_id=_name(handler, path),
            openapi_extra=extra,
            response_class=Response if answer is None else JSONResponse,
        )
        self.description = description  # FastAPI takes the docstring where there is none
        app = Bare(handler) if bare else AsyncExitStackMiddleware(self.app)
        self.app = RoleCheck(app, role)
        if method == "GET":
            self.methods.add("HEAD")  # it comes with each GET, as HTTP wants it

    @property
    def method(self) -> str:
        """The method, beside HEAD."""
        return next(iter(self.methods - {"HEAD"}))

    @property
    def is_change(self) -> bool:
        """The route changes something."""
        return "GET" not in self.methods

    def get_route_handler(self) -> Any:
        """Return FastAPI's handler behind the checks that it has not.

        An unknown query parameter is refused: it would have no effect. A body is bounded, read and
        checked before FastAPI looks for it, in a thread if it is large.
        """
        handle, body = super().get_route_handler(), self.body_field
        known = () if self._own_query else _names_of_query(self)

        async def answer(request: Request) -> Response:
            if known:
                check_known(request.query_params, known)
            if body is None or not (body.field_info.is_required() or has_body(request)):
                return await handle(request)
            return await handle(ReadRequest(request, await self._read(request, body)))

        return answer

    async def _read(self, request: Request, body: Any) -> Any:
        services, limit = request.app.state.services, self._max_body
        if isinstance(limit, str):
            limit = int(services.max_settings if limit == "settings" else services.max_body)
        kind = body.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return await read_record(kind, request, limit)
        return await read_json(request, limit)


class Router:
    """The routes of a module; `tag` is their heading in the document."""

    def __init__(self, tag: str) -> None:
        self.routes: list[GatewayRoute] = []
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
            for each in (path, IN_RUN + path) if options.get("in_runs") else (path,):
                self.routes.append(GatewayRoute(method, each, role, handler, self._tag, options))
            return handler

        return declare


class Bare:
    """The ASGI application of a handler that takes the services and the request alone."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await self._handler(scope["app"].state.services, request)
        await response(scope, receive, send)


class ReadRequest(Request):
    """A request whose body was read and checked. Its media type, which clients forget, is none."""

    def __init__(self, request: Request, value: Any) -> None:
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        kind = (b"content-type", b"application/json")
        super().__init__({**request.scope, "headers": [*headers, kind]}, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return what is no empty body."""
        return b"{}"

    async def json(self) -> Any:
        """Return the body as it was checked."""
        return self._value


def document(routes: Sequence[GatewayRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    made = get_openapi(
        title="cray-agents",
        version="1",
        description=ABOUT,
        routes=[_without_head(route) for route in routes],
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        separate_input_output_schemas=False,
    )
    made["security"] = [{"bearer": []}, {"key": []}, {}]
    made["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return made


def _without_head(route: GatewayRoute) -> GatewayRoute:
    visible: GatewayRoute = copy(route)
    visible.methods = route.methods - {"HEAD"}
    return visible


def _reading(read: Handler, media_type: str, long: bool) -> Handler:
    """Return the coroutine that answers with what `read` returns."""
    signature, keyword = inspect.signature(read), inspect.Parameter.KEYWORD_ONLY
    takes = inspect.Parameter("request", keyword, annotation=Request)
    own = "request" in signature.parameters

    async def handle(request: Request, **given: Any) -> Response:
        given |= {"request": request} if own else {}
        return await answer_read(request, partial(read, **given), long=long, media_type=media_type)

    parameters = [*signature.parameters.values(), *(() if own else (takes,))]
    handle.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return handle


def _documented(path: str, options: RouteOptions) -> Callable[..., None]:
    """Return a function whose parameters are those of a bare route, for the document alone."""
    kinds: dict[str, Any] = {"run_id": RunId} if path.startswith(IN_RUN) else {}
    if "body" in options:
        kinds["body"] = options["body"]
    if "headers" in options:
        model = options["headers"]
        kinds["headers"] = Annotated[model, Header()]

    def takes(**given: Any) -> None:
        """Take them."""

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, annotation=kind) for name, kind in kinds.items()]
    takes.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return takes


def _names_of_query(route: GatewayRoute) -> list[str]:
    """Return the names of a route's query parameters: its own, or those of its one record."""
    named = {field.alias: field.field_info for field in route.dependant.query_params}
    for info in list(named.values()):
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            fields = info.annotation.model_fields.items()
            named = {field.alias or name: field for name, field in fields}
    return [name for name, info in named.items() if getattr(info, "include_in_schema", True)]


def _name(handler: Handler, path: str) -> str:
    """Return the handler's name in camel case."""
    first, *words = handler.__name__.split("_")
    in_run = "InRun" if path.startswith(IN_RUN) else ""
    return first + "".join(word.capitalize() for word in words) + in_run


def _texts(handler: Handler, fails: str) -> tuple[str, str]:
    """Return the summary and the description: the handler's docstring, and the refusals."""
    summary, _, rest = (inspect.getdoc(handler) or "").partition("\n")
    refusals = f"Refuses with {fails}." if fails else ""
    return summary.rstrip("."), " ".join([*rest.split(), refusals]).strip()
