"""The dashboard: its page and files, and the sign-in of a browser by a one-time token."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.runtime.dashboard.sign_ins import SECONDS
from cray_agents.runtime.dashboard.static_files import HEADERS, NOT_BUILT, StaticFile, asset, page
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import secret_of
from cray_agents.runtime.gateway.http.bodies import field, json_response, read_json
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.http.shapes import BYTES, REAL, TEXT, object_of
from cray_agents.runtime.gateway.services import Services

MOST_BODY = 4096  # bytes of a request with a token

router = Router("Platform")


@router.get("/", "open", media={"text/html": TEXT})
async def dashboard(services: Services, request: Request) -> Response:
    """Return the dashboard's page; without a build of it, a page that tells how to build it."""
    made = await asyncio.to_thread(page, request.headers.get("accept-encoding", ""))
    if made is None:
        return Response(NOT_BUILT, headers=HEADERS, media_type="text/html")
    return _file(request, made)


@router.get(
    "/assets/{asset}",
    "open",
    media=dict.fromkeys(("text/javascript", "text/css", "image/svg+xml", "text/plain"), BYTES),
    fails="404 not_found",
)
async def dashboard_asset(services: Services, request: Request) -> Response:
    """Return a file of the dashboard, named by the hash of its content."""
    name = str(request.path_params["asset"])
    accepted = request.headers.get("accept-encoding", "")
    return _file(request, await asyncio.to_thread(asset, name, accepted))


@router.post("/v1/dashboard/sign_ins", Role.use, answer=object_of({"token": TEXT, "seconds": REAL}))
async def make_sign_in(services: Services, request: Request) -> Response:
    """Return a token for which a browser gets the caller's key, once and soon.

    `cray-agents dashboard` puts it behind the `#` of the URL that it opens.
    """
    token = services.sign_ins.make(secret_of(request.scope))
    return json_response({"token": token, "seconds": SECONDS})


@router.post(
    "/v1/dashboard/sign_ins/exchange",
    "open",
    body=object_of({"token": TEXT}),
    answer=object_of({"api_key": TEXT}),
    fails="401 invalid_token",
)
async def exchange_sign_in(services: Services, request: Request) -> Response:
    """Return the key that a token stands for. It works once; "" where no key is needed."""
    body = await read_json(request, MOST_BODY)
    return json_response({"api_key": services.sign_ins.exchange(field(body, "token", str))})


def _file(request: Request, made: StaticFile) -> Response:
    if request.headers.get("if-none-match") == made.headers["etag"]:
        return Response(status_code=304, headers={**made.headers})
    return Response(made.body, headers=made.headers)
