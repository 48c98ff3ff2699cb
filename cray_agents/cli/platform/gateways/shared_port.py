"""Shared port: several gateway processes of one root listen on one port of a host.

The kernel spreads connections over all sockets that are bound with SO_REUSEPORT. It would do so for
the processes of two roots as well. So each process of a root holds a lock of the root for its port;
a port that is taken, and for which no process of the root has the lock, is another program's. The
locks are on bytes of one file, in a folder that no other user can enter.
"""

import fcntl
import hashlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import BinaryIO

from cray_agents.cli.platform.gateways.sockets import listen
from cray_agents.config import Config
from cray_agents.paths import Home, host_cache


@dataclass(frozen=True)
class Ports:
    """The sockets of a platform.

    listener: where the gateway listens. seat: the lock for a port that gateways share.
    control: where further gateways of this host reach the controller. None without such gateways.
    """

    listener: socket.socket
    seat: BinaryIO | None = None
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


def listen_together(home: Home, host: str, port: int) -> tuple[socket.socket, BinaryIO]:
    """Return a listening socket, and the seat to keep open as long.

    Raises SetupError if another program has the port.
    """
    seat = (host_cache() / "ports.lock").open("a+b")
    try:
        if port and _lock(seat, home, port, fcntl.F_WRLCK):  # no process of the root is there
            listen(host, port).close()  # fails if anybody listens
        elif port:
            _lock(seat, home, port, fcntl.F_RDLCK)
        listener = listen(host, port, shared=True)
    except BaseException:
        seat.close()
        raise
    _lock(seat, home, listener.getsockname()[1], fcntl.F_RDLCK)
    return listener, seat


def _lock(seat: BinaryIO, home: Home, port: int, kind: int) -> bool:
    """Lock a root's port: for this seat alone if no other one has it, or together with others."""
    root = home.root.stat()
    name = hashlib.sha256(f"{root.st_dev} {root.st_ino} {port}".encode()).digest()
    lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, int.from_bytes(name[:7], "big"), 1, 0)
    together = kind == fcntl.F_RDLCK  # then one that just begins to listen is waited for
    try:
        fcntl.fcntl(seat, fcntl.F_OFD_SETLKW if together else fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        return False
    return True
