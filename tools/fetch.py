"""Fetch tool: get web pages from the hosts of an allow-list, as text.

    agent = Agent(name="reader", tools=[fetch_tool(allow=["docs.python.org", "*.example.org"])])

Redirects must follow the same rules (url_policy.py). The environment's proxies are not used.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urljoin

from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import BadInput, ToolError
from cray_agents.tools.html_text import check_installed, html_text
from cray_agents.tools.url_policy import Reachable, Target

MAX_BYTES = 2**20
REDIRECTS = 5
HEADERS = {"User-Agent": "cray-agents", "Accept": "text/*, application/json, */*;q=0.1",
           "Accept-Encoding": "identity", "Connection": "close"}  # fmt: skip
_TEXT = ("text/", "application/json", "application/xml", "application/javascript", "+json", "+xml")
_MOVED = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Page:
    """A server's answer; `cut` is true if `body` is not all of it."""

    url: str
    status: int
    headers: Message
    body: bytes
    cut: bool


def fetch_tool(
    *,
    allow: Sequence[str],
    private: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    timeout: float = 20.0,
    name: str = "fetch",
) -> Tool:
    """Make a tool that fetches URLs of the allowed hosts.

    Args:
        allow: hosts such as 'docs.python.org', '*.example.org' (every name below it), or
            'localhost:8080'; without a port, http's 80 and https's 443.
        private: networks beyond the public ones that may be reached, such as '127.0.0.0/8'.
        max_bytes: bytes of an answer to read.
        timeout: seconds for a whole call, redirects included.
        name: the tool's name for models.

    Raises BadInput for an invalid allow-list or network, SetupError without lxml.
    """
    check_installed()
    if max_bytes < 1:
        raise BadInput(f"max_bytes={max_bytes!r}: must be above 0", param="max_bytes")
    reachable = Reachable(allow, private)

    def fetch(url: str, start: int = 0) -> str:
        """Fetch a web page or file over HTTP, as text.

        Args:
            url: such as 'https://docs.python.org/3/'.
            start: the character of the text to begin with, to read on in a long one.
        """
        page = get(url, reachable, max_bytes=max_bytes, timeout=timeout)
        text = read_text(page)
        if page.status >= 400:
            raise ToolError(f"{page.url} answered {page.status}: {text[:500].strip()}")
        cut = f"\n[cut after {max_bytes} bytes]" if page.cut else ""
        return f"{page.url}\n\n{text[max(0, start) :]}{cut}"

    # The function's own deadline ends it before the tool's timeout, which would leave its thread.
    return as_tool(tool(name=name, timeout=timeout + 5)(fetch))


def get(url: str, reachable: Reachable, *, max_bytes: int, timeout: float) -> Page:
    """GET a URL, following redirects. Raises ToolError, in words for a model."""
    deadline = time.monotonic() + timeout
    for _ in range(REDIRECTS + 1):
        target = reachable.target(url)
        page = _request(target, reachable, max_bytes, deadline)
        location = page.headers.get("Location")
        if page.status not in _MOVED or location is None:
            return page
        try:
            url = urljoin(page.url, location)
        except ValueError as error:
            raise ToolError(f"{page.url} redirects to {location[:200]!r}: {error}") from error
    raise ToolError(f"more than {REDIRECTS} redirects, the last to {url[:200]}")


def _request(target: Target, reachable: Reachable, max_bytes: int, deadline: float) -> Page:
    try:
        with _connect(target, reachable, deadline) as connection:
            connection.request("GET", target.path, headers={"Host": target.authority, **HEADERS})
            answer = connection.getresponse()
            body = answer.read(max_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() < deadline:
            raise ToolError(f"{target.url} failed: {type(error).__name__}: {error}") from error
        body = b""
    if time.monotonic() >= deadline:  # an answer cut off can look like a complete one
        raise ToolError(f"{target.authority} did not answer in time")
    return Page(target.url, answer.status, answer.headers, body[:max_bytes], len(body) > max_bytes)


@contextmanager
def _connect(
    target: Target, reachable: Reachable, deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """Connect to a checked address, and cut the connection at the deadline in any case.

    A socket's own timeout is per read: a server could send a byte now and then for ever.
    """
    connection_socket = _dial(target, reachable, deadline)
    if target.scheme == "https":
        connection_socket = ssl.create_default_context().wrap_socket(
            connection_socket, server_hostname=target.host, do_handshake_on_connect=False
        )
    cutter = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [connection_socket])
    cutter.daemon = True
    cutter.start()
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = connection_socket
    try:
        if isinstance(connection_socket, ssl.SSLSocket):
            connection_socket.do_handshake()
        yield connection
    finally:
        cutter.cancel()
        connection.close()
        connection_socket.close()


def _dial(target: Target, reachable: Reachable, deadline: float) -> socket.socket:
    failure: OSError = TimeoutError("no time left")
    for family, address in reachable.addresses(target):
        if (left := deadline - time.monotonic()) <= 0:
            break
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect((address, target.port))
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _shut_down(connection: socket.socket) -> None:
    """End a connection's reads in another thread. SSLSocket's own shutdown would confuse them."""
    with suppress(OSError):  # the connection has ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def read_text(page: Page) -> str:
    """Return a page as text, HTML without its markup. Raises ToolError if it is not text."""
    kind = page.headers.get_content_type() if page.headers.get("Content-Type") else ""
    if page.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ToolError(f"{page.url} is compressed, though that was not asked for")
    if kind and not any(kind.startswith(one) or kind.endswith(one) for one in _TEXT):
        raise ToolError(f"{page.url} is {kind}, not text")
    charset = page.headers.get_content_charset()
    if kind in ("text/html", "application/xhtml+xml"):
        return html_text(page.body, charset, page.url)
    if not kind and b"\0" in page.body:
        raise ToolError(f"{page.url} is not text")
    try:
        return page.body.decode(charset or "utf-8", "replace")
    except LookupError:  # an unknown charset
        return page.body.decode("utf-8", "replace")
