"""Resources that processes share by number or name, made outside a sandbox for it to attack."""

import ctypes
import errno
import os
import struct
import uuid
from typing import Any

_REMOVE, _VALUE, _NO_WAIT = 0, 12, 0o4000  # IPC_RMID, GETVAL, IPC_NOWAIT

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


class Shared:
    """System V's memory, a semaphore and a message, open to all users, and a message queue."""

    def __init__(self) -> None:
        self.memory = libc.shmget(0, 4096, 0o666)
        self.semaphore = libc.semget(0, 1, 0o666)
        self.messages = libc.msgget(0, 0o666)
        self.queue = f"cray-{uuid.uuid4().hex}"
        self._at = ctypes.c_void_p(libc.shmat(self.memory, None, 0))
        self._queue = libc.mq_open(self._path, os.O_CREAT, 0o600, None)
        assert min(self.memory, self.semaphore, self.messages, self._queue) >= 0
        assert libc.msgsnd(self.messages, struct.pack("@lc", 1, b"m"), 1, 0) == 0

    @property
    def _path(self) -> bytes:
        return b"/" + self.queue.encode()

    def state(self) -> dict[str, Any]:
        libc.msgrcv(self.messages, None, 0, 0, _NO_WAIT)  # no room: it stays where it is
        waiting = ctypes.get_errno() == errno.E2BIG
        again = libc.mq_open(self._path, 0)
        if again >= 0:
            os.close(again)
        return {
            "memory": ctypes.string_at(self._at, 1),
            "semaphore": libc.semctl(self.semaphore, 0, _VALUE),
            "message": waiting,
            "queue": again >= 0,
        }

    def remove(self) -> None:
        """The kernel keeps them for as long as it runs."""
        libc.shmdt(self._at)
        libc.shmctl(self.memory, _REMOVE, None)
        libc.semctl(self.semaphore, 0, _REMOVE)
        libc.msgctl(self.messages, _REMOVE, None)
        os.close(self._queue)
        libc.mq_unlink(self._path)
