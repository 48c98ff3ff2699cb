"""The dashboard: its page and files, and the sign-in of a browser by a one-time token."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.records import Record
from cray_agents.runtime.dashboard import static_files
from cray_agents.runtime.dashboard.static_files import HEADERS, NOT_BUILT, SECONDS, StaticFile, page
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import secret_of
from cray_agents.runtime.gateway.http.bodies import json_response
from cray_agents.runtime.gateway.http.fields import Fields
from cray_agents.runtime.gateway.http.routing import BINARY, Router
from cray_agents.runtime.gateway.services import Current

MOST_BODY = 4096  # bytes of a request with a token

router = Router("Platform")


class SignedIn(Record):
    """The key that a browser got."""

    api_key: str


class SignIn(Fields):
    """A token of a browser that signs in."""

    token: str


@router.get("/", "open", media={"text/html": {"type": "string"}})
async def dashboard(request: Request) -> Response:
    """Return the dashboard's page; without a build of it, a page that tells how to build it."""
    made = await asyncio.to_thread(page, request.headers.get("accept-encoding", ""))
    if made is None:
        return Response(NOT_BUILT, headers=HEADERS, media_type="text/html")
    return _file(request, made)


@router.get(
    "/assets/{asset}",
    "open",
    media=dict.fromkeys(("text/javascript", "text/css", "image/svg+xml", "text/plain"), BINARY),
)
async def dashboard_asset(request: Request, asset: str) -> Response:
    """Return a file of the dashboard, named by the hash of its content."""
    accepted = request.headers.get("accept-encoding", "")
    return _file(request, await asyncio.to_thread(static_files.asset, asset, accepted))


@router.post("/v1/dashboard/sign_ins", Role.use, answer=dict[str, str | float])
async def make_sign_in(services: Current, request: Request) -> Response:
    """Return a token for which a browser gets the caller's key, once and soon.

    `cray-agents dashboard` puts it behind the `#` of the URL that it opens.
    """
    token = services.sign_ins.make(secret_of(request.scope))
    return json_response({"token": token, "seconds": SECONDS})


@router.post(
    "/v1/dashboard/sign_ins/exchange",
    "open",
    answer=SignedIn,
    fails="401 invalid_token",
    max_body=MOST_BODY,
)
async def exchange_sign_in(services: Current, body: SignIn) -> Response:
    """Return the key that a token stands for. It works once; "" where no key is needed."""
    return json_response({"api_key": services.sign_ins.exchange(body.token)})


def _file(request: Request, made: StaticFile) -> Response:
    if request.headers.get("if-none-match") == made.headers["etag"]:
        return Response(status_code=304, headers={**made.headers})
    return Response(made.body, headers=made.headers)
