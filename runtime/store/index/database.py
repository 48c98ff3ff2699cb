"""The index's file: one connection that writes, some that read, and other processes beside us.

Writers take turns by a lock file, so that none starves while another fills the index. When the
file was made anew, by us or by another process, its inode is another: all connections are opened
again. Used by index.py; the tables are in schema.py.
"""

import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cray_agents.errors import CrayError, DiskFull, StoreError
from cray_agents.runtime.store.index import schema

if TYPE_CHECKING:
    from cray_agents.runtime.store.index.key_filter import KeyFilter

READERS = 8  # idle connections kept
FRESH = 0.05  # seconds for which a reader does not look whether the file is another


class Database:
    """Connections to one file. Raises StoreError where it cannot be used."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._identity = identity
        self._lock = threading.RLock()
        self._writers: list[sqlite3.Connection] = []  # one, once it is open
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        self._looked = 0.0
        self._draft: sqlite3.Connection | None = None
        self._filler = 0  # the thread that fills it
        self.seen: KeyFilter | None = None  # the keys in the draft
        self.undone = 0  # transactions
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._turn = os.open(self._beside("turn"), os.O_RDWR | os.O_CREAT, 0o600)
            self._open()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed at the end, rolled back by an exception."""
        with self._lock, self._told():
            self._check_open()
            if self._draft is not None:
                with self._drafting(self._draft) as connection:
                    yield connection
                return
            with _locked(self._turn):
                self._look()
                connection = self._writers[0]
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    self.undone += 1
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise

    @contextmanager
    def reading(self, *, often: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection that reads. Read results to their end: a half-read one holds the log.

        `often`: what is asked for each request may be answered by a file that was made anew since.
        """
        with self._told():
            self._check_open()
            if self._filler == threading.get_ident() and self._draft is not None:
                with self._lock:
                    yield self._draft
                return
            now = time.monotonic()
            if not often or now - self._looked > FRESH:
                self._look()
                self._looked = now
            idle = self._idle
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._reader()
            try:
                yield connection
            finally:
                if idle is self._idle and len(idle) < READERS and not self._closed:
                    idle.append(connection)
                else:
                    connection.close()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """If the file is empty, what is written goes to a draft that takes its place at the end.

        The draft has no log and is sorted last. One process at a time; others go on with the file
        that is there, and what they write to it meanwhile is lost: their next transaction finds
        that the file is another.
        """
        with _lock_file(self._beside("filling")) as lock, _locked(lock):
            with self._told():
                started = self._start_draft()
            try:
                yield
            finally:
                if started:
                    with self._lock, self._told():
                        self._publish_draft()

    def start_again(self) -> None:
        """Throw the file away and begin with an empty one."""
        with self._lock, self._told():
            self._check_open()
            self._renew()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()
                os.close(self._turn)

    def _open(self) -> None:
        with self._locked_opening():
            self._writers.append(schema.prepare(self.path, self._identity))
            self._inode = self.path.stat().st_ino

    @contextmanager
    def _drafting(self, draft: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        """A part of the draft's one transaction: without a log nothing of it can be undone."""
        try:
            yield draft
        except BaseException:
            self._draft = self.seen = None
            draft.close()
            raise

    def _start_draft(self) -> bool:
        with self.reading() as connection:
            empty = connection.execute("SELECT 1 FROM segments LIMIT 1").fetchone() is None
        with self._lock:
            if not empty or self._draft is not None:
                return False
            self._draft = schema.draft(self._beside("draft"), self._identity)
            self._filler = threading.get_ident()
            try:
                from cray_agents.runtime.store.index.key_filter import KeyFilter
            except ModuleNotFoundError:  # a light install: keys are sorted as they come
                self._draft.execute(schema.KEYS)
            else:
                self.seen = KeyFilter()
        return True

    def _publish_draft(self) -> None:
        """Put the draft into the file's place, if it was not given up."""
        draft, self._draft, self._filler, self.seen = self._draft, None, 0, None
        path = self._beside("draft")
        try:
            if draft is not None and not self._closed:
                schema.finish(draft)
                with _locked(self._turn), self._locked_opening():
                    schema.remove(self.path)
                    path.rename(self.path)
                self._look()
        finally:
            if draft is not None:
                draft.close()
            schema.remove(path)

    def _renew(self) -> None:
        with _locked(self._turn):
            with self._locked_opening():
                schema.remove(self.path)
            self._close()
            self._open()

    def _close(self) -> None:
        idle, self._idle = self._idle, deque()
        for connections in (self._writers, idle):
            while connections:
                with suppress(IndexError):  # a reader was faster, and closes it
                    connections.pop().close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the index {self.path} is closed")

    def _look(self) -> None:
        """Open the file that is there now."""
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

    def _reader(self) -> sqlite3.Connection:
        with self._locked_opening():
            return schema.connect(self.path)

    @contextmanager
    def _locked_opening(self) -> Iterator[None]:
        """Nobody opens the file while another deletes it: its log would be taken for ours."""
        with _lock_file(self._beside("opening")) as lock, _locked(lock):
            yield

    def _beside(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as ours; a damaged file is thrown away."""
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
def _lock_file(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
