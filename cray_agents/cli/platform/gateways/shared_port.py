"""Shared port: several gateway processes of one root listen on one port of a host.

The kernel spreads connections over all sockets that are bound with SO_REUSEPORT. It would do so for
the processes of two roots as well. So each process of a root takes one of the root's seats at its
port; a port that is taken, and at which the root has no seat, is another program's.
"""

import os
import socket
from dataclasses import dataclass

from cray_agents.cli.platform.gateways.sockets import listen
from cray_agents.config import Config
from cray_agents.paths import Home

SEATS = 256  # processes of a root at a port, at most


@dataclass(frozen=True)
class Ports:
    """The sockets of a platform.

    listener: where the gateway listens. seat: the root's at a port that gateways share.
    control: where further gateways of this host reach the controller. None without such gateways.
    """

    listener: socket.socket
    seat: socket.socket | None = None
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


def listen_together(home: Home, host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a listening socket, and the seat to keep open as long.

    Raises SetupError if another program has the port.
    """
    seat = _take_seat(home, port) if port and _has_seat(home, port) else None
    if seat is None:
        if port:
            listen(host, port).close()  # fails if anybody listens
        listener = listen(host, port, shared=True)
        return listener, _take_seat(home, listener.getsockname()[1])
    try:
        return listen(host, port, shared=True), seat
    except BaseException:
        seat.close()
        raise


def _has_seat(home: Home, port: int) -> bool:
    for number in range(SEATS):
        seat = _seat(home, port, number)
        if seat is None:
            return True
        seat.close()
    return False


def _take_seat(home: Home, port: int) -> socket.socket:
    for number in range(SEATS):
        seat = _seat(home, port, number)
        if seat is not None:
            return seat
    raise RuntimeError(f"{SEATS} gateways share port {port}")


def _seat(home: Home, port: int, number: int) -> socket.socket | None:
    """Take a seat; None if it is taken. It is a socket in no folder, and ends with its process."""
    root = home.root.stat()
    seat = socket.socket(socket.AF_UNIX)
    try:
        seat.bind(f"\0cray-agents-port-{os.getuid()}-{root.st_dev}-{root.st_ino}-{port}-{number}")
    except OSError:
        seat.close()
        return None
    return seat
