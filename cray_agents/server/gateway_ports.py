"""Ports of the gateways: listen, the URL for clients, and a port that gateways of a root share.

Several gateway processes of one root may listen on one port of a host.

The kernel spreads connections over all sockets that are bound with SO_REUSEPORT. It would do so for
the processes of two roots as well. So each process of a root holds a lock of the root for its port;
a port that is taken, and for which no process of the root has the lock, is another program's.
"""

import socket
from dataclasses import dataclass

from cray_agents.config import Config
from cray_agents.errors import SetupError
from cray_agents.paths import Home
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.runtime.gateway.http.auth import is_loopback

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address -> this host's own address


@dataclass(frozen=True)
class Ports:
    """The sockets of a platform.

    listener: where the gateway listens. seat: the lock for a port that gateways share.
    control: where further gateways of this host reach the controller. None without such gateways.
    """

    listener: socket.socket
    seat: HostLock | None = None
    control: socket.socket | None = None

    @property
    def listeners(self) -> list[socket.socket]:
        """The sockets at which the platform's own gateway answers."""
        return [self.listener, *([self.control] if self.control else [])]

    def close(self) -> None:
        """Close all of them."""
        for each in (self.listener, self.seat, self.control):
            if each is not None:
                each.close()


def open_ports(config: Config) -> Ports:
    """Listen as a configuration says. Raises SetupError if the port is taken."""
    if config.gateways == 1:
        return Ports(listen(config.host, config.port))
    listener, seat = listen_together(config.root, config.host, config.port)
    return Ports(listener, seat, listen("127.0.0.1", 0))


def listen_together(home: Home, host: str, port: int) -> tuple[socket.socket, HostLock]:
    """Return a listening socket, and the seat to keep open as long.

    Raises SetupError if another program has the port.
    """
    seat = _seat(home, port)
    try:
        if port and seat.take():  # no process of the root is there
            listen(host, port).close()  # fails if anybody listens
        elif port:
            seat.share()
        listener = listen(host, port, shared=True)
    except BaseException:
        seat.close()
        raise
    if not port:
        seat.close()
        seat = _seat(home, listener.getsockname()[1])
    seat.share()
    return listener, seat


def _seat(home: Home, port: int) -> HostLock:
    root = home.root.stat()
    return HostLock(f"port {port} of root {root.st_dev} {root.st_ino}")


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises SetupError if the port is taken.

    With `shared`, other processes of this user may listen on the port too.
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
