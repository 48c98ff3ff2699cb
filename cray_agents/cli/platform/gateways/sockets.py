"""Sockets of the gateway: listen, and tell the URL by which clients reach it."""

import socket

from cray_agents.errors import SetupError
from cray_agents.runtime.gateway.http.auth import is_loopback

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> this host's own address


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises SetupError if the port is taken.

    With `shared`, other processes of this user may listen on the port too: see shared_port.py.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port with --port "
            "(0 picks a free one), or end what uses it"
        ) from error
    listener.listen(2048)
    return listener


def address(listener: socket.socket) -> str:
    """Return the gateway's URL for clients on this host."""
    host, port = listener.getsockname()[:2]
    return _url(ANYWHERE.get(host, host), port)


def address_elsewhere(listener: socket.socket) -> str | None:
    """Return the gateway's URL for clients on other hosts; None if it is on loopback only."""
    host, port = listener.getsockname()[:2]
    if is_loopback(host):
        return None
    return _url(socket.gethostname() if host in ANYWHERE else host, port)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
