"""Fetch tool: get web pages from the hosts of an allow-list, as text.

    agent = Agent(name="reader", tools=[fetch_tool(allow=["docs.python.org", "*.example.org"])])

Redirects must follow the same rules. A name is looked up once, and the connection goes to that
address: a later answer of a name server does not count. The environment's proxies are not used.
"""

import codecs
import http.client
import importlib.util
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from urllib.parse import SplitResult, urljoin, urlsplit

from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import BadInput, SetupError, ToolError

MAX_BYTES = 2**20
REDIRECTS = 5
HEADERS = {"User-Agent": "cray-agents", "Accept": "text/*, application/json, */*;q=0.1",
           "Accept-Encoding": "identity", "Connection": "close"}  # fmt: skip
_TEXT = ("text/", "application/json", "application/xml", "application/javascript", "+json", "+xml")
_MOVED = (301, 302, 303, 307, 308)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ENTRY = re.compile(r"(\*\.)?([a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}|\*))?")


@dataclass(frozen=True)
class Target:
    """The target of a request. `host` is as in the URL, lower case, without brackets."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class Reachable:
    """The hosts of an allow-list, at public addresses, or at those of the given networks.

    Args:
        allow: hosts such as 'docs.python.org', '*.example.org' (every name below it, not itself),
            'localhost:8080'. Without a port the scheme's usual one; ':*' is any.
        private: networks that are not public but allowed, such as '127.0.0.0/8'.

    Raises BadInput for an invalid host or network.
    """

    def __init__(self, allow: Sequence[str], private: Sequence[str] = ()) -> None:
        if isinstance(allow, str) or not allow:
            raise BadInput(f"allow={allow!r}: give a list of hosts", param="allow")
        self.allow = tuple(entry.lower() for entry in allow)
        for entry in self.allow:
            if not _ENTRY.fullmatch(entry):
                raise BadInput(
                    f"allow={entry!r}: write a host such as 'docs.python.org' or '*.example.org', "
                    "with :PORT for an unusual one",
                    param="allow",
                )
        try:
            self._private: list[Network] = [ipaddress.ip_network(net) for net in private]
        except ValueError as error:
            raise BadInput(f"private: {error}", param="private") from error

    def target(self, url: str) -> Target:
        """Parse a URL whose host is allowed. Raises ToolError for others."""
        try:
            url_parts = urlsplit(url)
            target = _target(url_parts)
        except ValueError as error:
            raise ToolError(f"{url[:200]!r} is not a URL: {error}") from error
        if not any(_matches(entry, target) for entry in self.allow):
            raise ToolError(
                f"{target.authority} may not be reached; these hosts may: {', '.join(self.allow)}"
            )
        return target

    def addresses(self, target: Target) -> Iterator[tuple[socket.AddressFamily, str]]:
        """Yield the host's addresses. Raises ToolError unless all of them are allowed."""
        try:
            results = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ToolError(f"{target.host} cannot be found: {error}") from error
        for *_, location in results:
            self._check(target.host, ipaddress.ip_address(str(location[0]).partition("%")[0]))
        for family, *_, location in results:
            yield family, str(location[0])

    def _check(self, host: str, address: Address) -> None:
        for one in (address, *_embedded_addresses(address)):
            if any(one in network for network in self._private):
                return
            if not one.is_global or one.is_multicast:
                raise ToolError(
                    f"{host} is at {address}, which is not public: it may not be reached"
                )


def _target(url_parts: SplitResult) -> Target:
    if url_parts.scheme not in PORTS:
        raise ToolError(f"only http and https can be fetched, not {url_parts.scheme or 'that'!r}")
    if url_parts.username is not None or url_parts.password is not None:
        raise ToolError("a URL with a user name in it is not fetched")
    if not url_parts.hostname:
        raise ValueError("it names no host")
    host = url_parts.hostname.rstrip(".")
    if not host.isascii():
        host = host.encode("idna").decode()
    query = f"?{_percent_encode(url_parts.query)}" if url_parts.query else ""
    path = _percent_encode(url_parts.path or "/") + query
    bare = Target("", url_parts.scheme, host, url_parts.port or PORTS[url_parts.scheme], path)
    return Target(f"{bare.scheme}://{bare.authority}{path}", bare.scheme, host, bare.port, path)


def _percent_encode(text: str) -> str:
    """Percent-encode characters that are invalid in a request line; encoded ones stay."""
    return "".join(
        char if "!" <= char <= "~" else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in text
    )


def _matches(entry: str, target: Target) -> bool:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return False
    below, name, port = match.groups()
    if port != "*" and target.port != (int(port) if port else PORTS[target.scheme]):
        return False
    name = name.strip("[]").rstrip(".")
    return target.host.endswith(f".{name}") if below else target.host == name


def _embedded_addresses(address: Address) -> Iterator[Address]:
    """Yield the IPv4 addresses that an IPv6 one contains."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = (address.ipv4_mapped, address.sixtofour, (address.teredo or (None, None))[1])
        yield from (one for one in embedded if one is not None)
        if address in _NAT64:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


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


# ---- HTML text: extract the text of an HTML page, for a model
# It uses lxml, whose parser takes linear time. The standard library's takes minutes for some pages
# of 100 KB (CPython 3.11).
_SILENT = {"script", "style", "template", "noscript", "svg", "iframe", "object"}
_BLOCKS = frozenset(
    ["address", "article", "aside", "blockquote", "body", "dd", "details", "dialog", "div", "dl",
     "dt", "fieldset", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header",
     "hr", "html", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "title",
     "tr", "ul"]
)  # fmt: skip


def check_installed() -> None:
    """Raise SetupError if lxml is missing."""
    if importlib.util.find_spec("lxml") is None:
        raise SetupError("HTML is read with lxml: pip install 'cray-agents[tools]'")


def html_text(body: bytes, charset: str | None = None, url: str = "") -> str:
    """Return a line for each block; headings as `# text`, links as `text <address>`.

    `charset` is the server's; without it, UTF-8 if the page is valid UTF-8, else the page's own.
    `url` makes links absolute. Raises SetupError if lxml is missing.
    """
    check_installed()
    from lxml import etree, html

    parser = html.HTMLParser(encoding=_encoding(body, charset), remove_comments=True)
    try:
        tree = html.document_fromstring(body, parser=parser)
    except etree.ParserError:  # the page is empty
        return ""
    pieces: list[str] = []
    silent = 0
    for event, element in etree.iterwalk(tree, events=("start", "end")):
        tag = element.tag if isinstance(element.tag, str) else ""
        if event == "start":
            silent += tag in _SILENT
            if not silent:
                pieces += [_before(tag), _collapse_spaces(element.text)]
        else:
            if not silent:
                pieces.append(_after(tag, element, url))
            silent -= tag in _SILENT
            if not silent:
                pieces.append(_collapse_spaces(element.tail))
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _before(tag: str) -> str:
    if re.fullmatch("h[1-6]", tag):
        return f"\n\n{'#' * int(tag[1])} "
    if tag in ("br", "li"):
        return "\n- " if tag == "li" else "\n"
    return "\n" if tag in _BLOCKS else ""


def _after(tag: str, element: object, url: str) -> str:
    if tag == "a" and (link := getattr(element, "get")("href")):  # noqa: B009 - lxml has no types
        try:
            address = urljoin(url, link)
        except ValueError:  # such as http://[your-host]/
            return ""
        return f" <{address}>" if address.startswith(("http://", "https://")) else ""
    if tag in ("td", "th"):
        return " | "
    return "\n" if tag in _BLOCKS else ""


def _collapse_spaces(text: str | None) -> str:
    return re.sub(r"\s+", " ", text) if text else ""


def _encoding(body: bytes, charset: str | None) -> str | None:
    try:
        if charset is not None:
            return codecs.lookup(charset).name
        codecs.getincrementaldecoder("utf-8")().decode(body)  # may end within a character
    except (LookupError, UnicodeDecodeError):
        return None
    return "utf-8"
