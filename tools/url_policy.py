"""URL policy: restrict a tool to the hosts of an allow-list, at public addresses.

A name is looked up once, and the connection goes to that address. A later answer of a name server
does not count. Called by fetch.py.
"""

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from cray_agents.errors import BadInput, ToolError

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
