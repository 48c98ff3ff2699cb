"""Host lock: a lock between this user's processes on one host, which no other user can take.

It is on a byte of one file, in a folder that no other user can enter. The kernel frees it when its
process ends, however that was.
"""

import fcntl
import hashlib
import os
import struct

from cray_agents.paths import host_cache


class HostLock:
    """A lock by name; `close` gives it back. Raises StoreError where this host has no cache."""

    def __init__(self, name: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(host_cache() / "locks", flags, 0o600), "r+b")
        self._at = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")

    def take(self) -> bool:
        """Take it for this holder alone. Return False if others hold it."""
        try:
            self._change(fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Take it together with others; wait for one who holds it alone."""
        self._change(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK)

    def _change(self, how: int, kind: int) -> None:
        fcntl.fcntl(self._file, how, struct.pack("hhqqi4x", kind, os.SEEK_SET, self._at, 1, 0))

    def close(self) -> None:
        """Give it back."""
        self._file.close()
