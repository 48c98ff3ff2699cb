"""Database: the connections to the index's file, which several processes of a host use.

Writers take turns by a lock file, so that none starves. A file that
this or another process made anew has another inode; all connections are then opened again. Used by
index.py; the tables are in schema.py.
"""

import fcntl
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cray_agents.errors import CrayError, DiskFull, StoreError
from cray_agents.runtime.disk.turns import statements_in_pieces
from cray_agents.runtime.store.index import schema

READERS = 8  # idle connections kept
REFRESH_INTERVAL = 0.05  # seconds for which frequent reads do not check for a new file


class Database:
    """Connections to one file. All methods raise StoreError if it cannot be used."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._identity = identity
        self._lock = threading.RLock()
        self._writers: list[sqlite3.Connection] = []  # one, once it is open
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        self._checked = 0.0  # time of the last check for a new file
        self.rollbacks = 0
        with self._translate_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._turn = os.open(self._beside("turn"), os.O_RDWR | os.O_CREAT, 0o600)
            self._close_turn = weakref.finalize(self, os.close, self._turn)
            self._open()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: committed at the end, rolled back by an exception."""
        with self._lock, self._translate_errors():
            self._check_open()
            with _locked(self._turn):
                self._reopen_if_replaced()
                connection = self._writers[0]
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    self.rollbacks += 1
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise

    @contextmanager
    def reading(self, *, often: bool = False) -> Iterator[sqlite3.Connection]:
        """Borrow a reading connection. Read results to their end: a half-read one holds the log.

        With `often` the answer may come from a file replaced less than REFRESH_INTERVAL ago.
        """
        with self._translate_errors():
            self._check_open()
            now = time.monotonic()
            if not often or now - self._checked > REFRESH_INTERVAL:
                self._reopen_if_replaced()
                self._checked = now
            idle = self._idle
            try:
                connection = idle.pop()
            except IndexError:
                with self._opening_lock():
                    connection = schema.connect(self.path)
            try:
                with statements_in_pieces(connection):
                    yield connection
            finally:
                if idle is self._idle and len(idle) < READERS and not self._closed:
                    idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()
                self._close_turn()

    def _open(self) -> None:
        with self._opening_lock():
            self._writers.append(schema.prepare(self.path, self._identity))
            self._inode = self.path.stat().st_ino

    def _renew(self) -> None:
        with _locked(self._turn):
            with self._opening_lock():
                schema.remove(self.path)
            self._close()
            self._open()

    def _close(self) -> None:
        idle, self._idle = self._idle, deque()
        for connections in (self._writers, idle):
            while connections:
                with suppress(IndexError):  # a reader took it, and will close it
                    connections.pop().close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the index {self.path} is closed")

    def _reopen_if_replaced(self) -> None:
        """Open the file again if another has taken its place."""
        if self._is_ours():
            return
        with self._lock:
            if not self._is_ours():
                self._close()
                self._open()

    def _is_ours(self) -> bool:
        try:
            return os.stat(self.path).st_ino == self._inode  # noqa: PTH116 (takes half the time)
        except FileNotFoundError:
            return False

    @contextmanager
    def _opening_lock(self) -> Iterator[None]:
        """Hold the lock for opening and deleting the file, so that an old log is never applied."""
        lock = os.open(self._beside("opening"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with _locked(lock):
                yield
        finally:
            os.close(lock)

    def _beside(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name}")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of SQLite into StoreError, and replace a damaged file."""
        try:
            yield
        except sqlite3.Error as error:
            if not schema.is_damage(error):
                full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
                kind = DiskFull if full else StoreError
                raise kind(f"cannot use the index {self.path}: {error}") from error
            try:
                with self._lock:
                    self._renew()
            except (sqlite3.Error, OSError) as again:
                raise StoreError(f"cannot make the index {self.path} anew: {again}") from error
            raise StoreError(
                f"the index {self.path} was damaged ({error}); it is made anew: ask again"
            ) from error
        except OSError as error:
            if isinstance(error, CrayError):
                raise
            raise StoreError.of(f"cannot use the index {self.path}", error) from error


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
