"""Access to the gateway: the API key of a request, its role, and the role that a route needs.

`RoleCheck` stands before the handler of each route. The route's declaration names its role
(routing.py). A path without a route is 404 for everybody: the gateway passes on nothing that it
does not list.

Without keys (on loopback, before the first key is made) everybody on this host is admin, browsers
included. No web page may use a browser behind its user's back. So such a request must name a
loopback host, against DNS rebinding. If it names the page that sent it, that page must be of a
loopback host too. A browser's request without that name (for an image, a script, a link) must not
come from another site. A request with a key needs none of this: no page knows the key.
Read next: api_keys.py; ../ownership.py, changes to runs and files; middleware.py, headers.
"""

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cray_agents.errors import AccessDenied, NoController
from cray_agents.runtime.gateway.http.api_keys import PLATFORM_ID, PLATFORM_PREFIX, Keys, Role
from cray_agents.runtime.gateway.http.error_envelope import BadEncoding

TINKER = "tml-"  # the beginning of keys in Tinker's client, which takes no others
PLAIN = (b"", b"identity")  # encodings that leave a body as it is

Mode = Literal["auto", "required", "off"]
RequiredRole = Role | Literal["open"]

_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1", re.IGNORECASE)


@dataclass(frozen=True)
class Caller:
    """The sender of a request; without a key id, anybody on this host."""

    key_id: str
    name: str
    role: Role

    @property
    def key_name(self) -> str:
        """The name of the key, as the giver of a reward; "" for this host and its platform."""
        return "" if self.key_id in ("", PLATFORM.key_id) else self.name

    def check_role(self, role: Role, act: str) -> None:
        """Raise AccessDenied for a caller below this role. `act` says what needs the role."""
        if self.role < role:
            raise AccessDenied(
                f"the key {self.name!r} has the role {self.role.name!r}; {act} needs {role.name!r}",
                status=403,
                code="insufficient_permissions",
            )


ANYBODY = Caller("", "anybody", Role.admin)
PLATFORM = Caller(PLATFORM_ID, PLATFORM_ID, Role.admin)  # its own commands and batch worker


def caller_of(request: Request) -> Caller:
    """Return the sender of a request that a RoleCheck has let through."""
    caller: Caller = request.state.caller
    return caller


def may_name(request: Request, roots: tuple[Path, ...]) -> tuple[Path, ...] | None:
    """Return the folders whose directories a request may name; None for any folder."""
    return None if caller_of(request).role >= Role.admin else roots


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is of this host alone."""
    return _LOOPBACK.fullmatch(host) is not None


class Access:
    """The keys of a home, and when a request needs one.

    mode: `required` always needs a key, `off` never. `auto` needs one as soon as any was ever made:
    revoking the last key opens nothing. token: the running platform's own key, "" for none; a
    callable where another process runs the platform.
    """

    def __init__(
        self, keys: Keys, mode: Mode = "auto", token: str | Callable[[], str] = ""
    ) -> None:
        self._keys = keys
        self._mode = mode
        self._token = token

    def caller(self, scope: Scope, role: Role) -> Caller:
        """Return the sender of a request, if it has at least this role. Raises AccessDenied."""
        secret = secret_of(scope)
        caller = self._caller_of(secret) if secret else None
        if self._mode == "off" or (self._mode == "auto" and not self._keys.ever):
            if caller is None:
                _check_page(scope)
                return ANYBODY
            return replace(caller, role=Role.admin)  # a key takes no rights away
        if caller is None and callable(self._token) and secret.startswith(PLATFORM_PREFIX):
            raise NoController("this is the key of a controller that is not known here: ask again")
        if caller is None:
            raise AccessDenied(_refusal(secret))
        caller.check_role(role, f"{scope['method']} {scope['path']}")
        return caller

    def _caller_of(self, secret: str) -> Caller | None:
        token = self._token if isinstance(self._token, str) else self._token()
        if token and hmac.compare_digest(secret.encode(), token.encode()):
            return PLATFORM
        record = self._keys.check(secret)
        return Caller(record.id, record.name, record.role) if record else None


class RoleCheck:
    """The ASGI application of a route, for callers whom the app's Access lets through."""

    def __init__(self, app: ASGIApp, role: RequiredRole) -> None:
        self._app = app
        self._role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._role != "open":
            access: Access = scope["app"].state.access
            scope.setdefault("state", {})["caller"] = access.caller(scope, self._role)
        _check_encoding(scope)
        await self._app(scope, receive, send)


def _check_encoding(scope: Scope) -> None:
    """Raise BadEncoding for a compressed body: nothing here unpacks one."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in PLAIN:
            raise BadEncoding(
                f"Content-Encoding {value.decode('latin-1')[:100]!r} is not taken: send the body "
                "as it is",
                param="Content-Encoding",
            )


def secret_of(scope: Scope) -> str:
    """Return the key in a request: OpenAI's clients send a bearer token, others a header."""
    secret = ""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1"))
        if name == b"x-api-key":
            secret = value.strip().decode("latin-1").removeprefix(TINKER)
    return secret


def _refusal(secret: str) -> str:
    hint = "`cray-agents keys create NAME` makes one"
    if not secret:
        return (
            "an API key is needed: send it as 'Authorization: Bearer sk-...' (the clients' "
            f"api_key) or 'x-api-key'; {hint}"
        )
    label = f"{secret[:8]}...{secret[-4:]}" if len(secret) > 24 else "the one given"
    return f"incorrect API key ({label}): it is unknown here or was revoked; {hint}"


def _check_page(scope: Scope) -> None:
    """Raise AccessDenied for a request by a web page of another host."""
    headers = Headers(scope=scope)
    for name, scheme in (("host", "//"), ("origin", "")):
        for value in headers.getlist(name):
            if not is_loopback(_host(scheme + value)):
                raise AccessDenied(
                    f"{name} {value!r} is not this host: without API keys the gateway answers to "
                    "this host alone, and to no web page of another; `cray-agents keys create "
                    "NAME` makes a key, which is then asked for",
                    status=403,
                    code=f"{name}_not_allowed",
                )
    site = headers.get("sec-fetch-site", "").strip().lower()
    if site == "cross-site" and "origin" not in headers:
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
