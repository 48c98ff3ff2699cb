"""Who calls, and whether they may: an API key, its role, and which role each route needs.

The table below is an allow-list by method and path template; a route in no row needs `admin`, so
that a forgotten one is closed. It is asked once per route, when the application is made: `Gate`
stands before each route's handler. What is no route at all is 404 for everybody: the gateway passes
nothing on that it does not list.

Without keys (on loopback, before the first one is made) everybody on this host is admin, browsers
included. So that no web page uses one behind its user's back, such a request must name a loopback
host (against DNS rebinding) and, if it says which page sent it, one from loopback; a browser's
request that does not (an image's, a script's, a link's) must not come from another site. A request
with a key needs none of it: no page knows it. Read next: keys.py; ownership.py, who may change
what; edge.py, what every answer carries.
"""

import hmac
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cray_agents.errors import AccessDenied
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.http.error_envelope import BadEncoding

PLAIN = (b"", b"identity")  # encodings of a body that are none

Mode = Literal["auto", "required", "off"]
Need = Role | Literal["open"]
Handler = Callable[[Request], Awaitable[Response]]

_MODELS = "/v1/(chat/completions|completions|responses|messages|embeddings)"
_RUN = r"(/runs/[^/]+)?"
_ANY = r"(/.*)?"
_ROWS: tuple[tuple[str, str, Need], ...] = (
    ("GET", f"/health{_ANY}", "open"),
    ("GET", "/", Role.use),
    ("GET", "/(openapi.json|metrics|v1/whoami)", Role.use),
    ("GET", "/v1/platform", Role.use),  # agents ask what this is
    ("POST", f"{_RUN}{_MODELS}", Role.use),
    ("POST", f"{_RUN}(/v1)?/(tokenize|detokenize)", Role.use),
    ("POST", f"{_RUN}/v1/messages/count_tokens", Role.use),
    ("GET|POST|DELETE", f"{_RUN}/v1/(chat/completions|responses)/[^/]+{_ANY}", Role.use),
    ("GET", f"{_RUN}/v1/models{_ANY}", Role.use),
    ("POST", "/v1/models/[^/]+/versions", Role.train),
    ("POST", "/v1/models/[^/]+/versions/[^/]+/stage", Role.train),
    ("POST|DELETE", "/v1/models/[^/]+/(promote|rollback|reject|canary)", Role.admin),
    ("GET|POST|DELETE", f"/v1/(files|uploads|batches){_ANY}", Role.use),
    ("POST", "/v1/trajectories/([^/]+/)?events", Role.use),
    ("POST", "/v1/trajectories/[^/]+/rewards", Role.use),
    ("GET", "/v1/trajectories/export", Role.train),
    ("GET", "/v1/trajectories/[^/]+", Role.use),  # of which one knows the id
    ("DELETE", "/v1/trajectories/[^/]+", Role.admin),
    ("GET", "/v1/trajectories", Role.train),  # everybody's
    ("GET|POST|DELETE", f"/v1/(datasets|jobs|fine_tuning|loops){_ANY}", Role.train),
    ("GET|POST|DELETE", f"/v1/(pool|keys){_ANY}", Role.admin),
)
_TABLE = tuple((re.compile(methods), re.compile(paths), need) for methods, paths, need in _ROWS)
_MODEL_CALL = re.compile(_RUN + _MODELS)
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1", re.IGNORECASE)


@dataclass(frozen=True)
class Caller:
    """Who sent a request; without a key id: anybody on this host."""

    key_id: str
    name: str
    role: Role

    @property
    def key_name(self) -> str:
        """Who gives a reward: the name of the key; "" is this host, its platform and commands."""
        return "" if self.key_id in ("", PLATFORM.key_id) else self.name


ANYBODY = Caller("", "anybody", Role.admin)
PLATFORM = Caller("platform", "platform", Role.admin)  # its own commands and batch worker


def caller_of(request: Request) -> Caller:
    """Who sent this request, which a Gate has let through."""
    caller: Caller = request.state.caller
    return caller


def may_name(request: Request, roots: tuple[Path, ...]) -> tuple[Path, ...] | None:
    """Within which folders a request may name directories of this host; None: within any."""
    return None if caller_of(request).role >= Role.admin else roots


def row(method: str, template: str) -> Need | None:
    """What the table says of a route, by its path template; None: nothing."""
    for methods, paths, need in _TABLE:
        if methods.fullmatch(method) and paths.fullmatch(template):
            return need
    return None


def needed(method: str, template: str) -> Need:
    """What a route needs."""
    return row("GET" if method == "HEAD" else method, template) or Role.admin


@cache
def is_model_call(template: str) -> bool:
    """Whether a route of this template asks the engines, and so stands under admission."""
    return _MODEL_CALL.fullmatch(template) is not None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this host alone."""
    return _LOOPBACK.fullmatch(host) is not None


class Access:
    """The keys of a home, and when one is needed.

    mode: `auto` needs one as soon as one was ever made, so that revoking the last opens nothing;
    `required` always; `off` never. token: the running platform's own, "" for none.
    """

    def __init__(self, keys: Keys, mode: Mode = "auto", token: str = "") -> None:
        self._keys = keys
        self._mode = mode
        self._token = token.encode()

    def caller(self, scope: Scope, role: Role) -> Caller:
        """Who sent the request, if they may do what needs this role. Raises AccessDenied."""
        secret = _secret(scope)
        found = self._named(secret) if secret else None
        if self._mode == "off" or (self._mode == "auto" and not self._keys.ever):
            if found is None:
                _check_page(scope)
                return ANYBODY
            return replace(found, role=Role.admin)  # as without a key: who has one loses nothing
        if found is None:
            raise AccessDenied(_refusal(secret))
        if found.role < role:
            raise AccessDenied(
                f"the key {found.name!r} has the role {found.role.name!r}; "
                f"{scope['method']} {scope['path']} needs {role.name!r}",
                status=403,
                code="insufficient_permissions",
            )
        return found

    def _named(self, secret: str) -> Caller | None:
        if self._token and hmac.compare_digest(secret.encode(), self._token):
            return PLATFORM
        record = self._keys.check(secret)
        return Caller(record.id, record.name, record.role) if record else None


class RoleCheck:
    """The ASGI application of a route: its handler, for whom Access lets through."""

    def __init__(self, handler: Handler, template: str, access: Access) -> None:
        self._handler = handler
        self._access = access
        self._needed: Callable[[str], Need] = cache(lambda method: needed(method, template))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        need = self._needed(scope["method"])  # one that the route has: others are 405 before this
        if need != "open":
            caller = self._access.caller(scope, need)
            scope.setdefault("state", {})["caller"] = caller
        _check_encoding(scope)
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


def guarded(route: Route, access: Access) -> Route:
    """The route, with a Gate before its handler."""
    route.app = RoleCheck(route.endpoint, route.path_format, access)
    return route


def _check_encoding(scope: Scope) -> None:
    """Raises BadEncoding for a body that is compressed: it would be read as what it is not."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in PLAIN:
            raise BadEncoding(
                f"Content-Encoding {value.decode('latin-1')[:100]!r} is not taken: send the body "
                "as it is",
                param="Content-Encoding",
            )


def _secret(scope: Scope) -> str:
    """The key in the request: OpenAI's clients send it as a bearer token, Anthropic's by name."""
    given = ""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1"))
        if name == b"x-api-key":
            given = value.strip().decode("latin-1")
    return given


def _refusal(secret: str) -> str:
    hint = "`cray-agents keys create NAME` makes one"
    if not secret:
        return (
            "an API key is needed: send it as 'Authorization: Bearer sk-...' (the clients' "
            f"api_key) or 'x-api-key'; {hint}"
        )
    shown = f"{secret[:8]}...{secret[-4:]}" if len(secret) > 24 else "the one given"
    return f"incorrect API key ({shown}): it is unknown here or was revoked; {hint}"


def _check_page(scope: Scope) -> None:
    """Let no web page in that is not of this host. Raises AccessDenied."""
    site = b""
    for name, value in scope["headers"]:
        if name == b"sec-fetch-site":
            site = value.strip().lower()
            continue
        if name == b"host":
            host = _host("//" + value.decode("latin-1"))
        elif name == b"origin":
            host = _host(value.decode("latin-1"))
        else:
            continue
        if not is_loopback(host):
            raise AccessDenied(
                f"{name.decode()} {value.decode('latin-1')!r} is not this host: without API keys "
                "the gateway answers to this host alone, and to no web page of another; "
                "`cray-agents keys create NAME` makes a key, which is then asked for",
                status=403,
                code=f"{name.decode()}_not_allowed",
            )
    if site == b"cross-site" and not any(name == b"origin" for name, _ in scope["headers"]):
        raise AccessDenied(
            "a web page of another site has a browser ask for this: without API keys the gateway "
            "answers to no such page; type the address, or make a key with "
            "`cray-agents keys create NAME`, which is then asked for",
            status=403,
            code="origin_not_allowed",
        )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
