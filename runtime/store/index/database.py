"""Database: the tables of the index, its place on this host, and the connections to its file.

`runs` has a column for everything that queries select or sort by, with names as numbers. Its column
`told` has the merged facts of a run (run_merge.py). Three SQLite indexes, one for each order, hold
the columns that filters compare, so a page is found by a scan of one of them, without touching a
row. That by id also has all that statistics read.

INDEX_VERSION is in the file's name, so two versions on one host do not undo each other's work.
Raise it with each change of the tables, of run_merge.py or of segments/line_format.py.

Several processes of a host use the file. Writers take turns by a lock file, so that none starves. A
file that this or another process made anew has another inode; all connections are then opened
again. Used by index.py.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cray_agents.errors import CrayError, DiskFull, StoreError, store_errors
from cray_agents.paths import Home, host_cache
from cray_agents.processes import boot_id
from cray_agents.records import new_id
from cray_agents.runtime.disk.durable import create_file
from cray_agents.runtime.disk.turns import statements_in_pieces

INDEX_VERSION = 4
KEPT_SECONDS = 7 * 86_400.0  # after its last use, for the file of another version
KEPT_FILES = 3  # of other versions, the last used
MAX_CACHED = 20_000  # codes of names remembered

# kinds of events, as numbers
CALL, RUN, REWARD, FORGET = range(4)
KINDS = {"call": CALL, "run": RUN, "reward": REWARD, "forget": FORGET}

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE segments (
  segment INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  progress INTEGER NOT NULL,
  doubles INTEGER NOT NULL DEFAULT 0  -- its events that are indexed in another segment
);
CREATE TABLE problems (
  segment TEXT, offset INTEGER, at INTEGER, length INTEGER, message TEXT,
  PRIMARY KEY (segment, offset, at)
) WITHOUT ROWID;
CREATE TABLE events (
  event INTEGER PRIMARY KEY,
  key BLOB NOT NULL,
  run INTEGER NOT NULL,
  kind INTEGER NOT NULL,
  segment INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  length INTEGER NOT NULL,
  time REAL NOT NULL,
  dead INTEGER NOT NULL  -- forgotten
);
CREATE INDEX events_dead ON events (segment, kind) WHERE dead = 1;
CREATE TABLE runs (
  run INTEGER PRIMARY KEY,
  id TEXT NOT NULL UNIQUE,
  shown INTEGER NOT NULL,  -- 0: only rewards, forgotten, or stale
  loop INTEGER, iteration INTEGER NOT NULL, agent INTEGER, split INTEGER, stop_reason INTEGER,
  error INTEGER, models TEXT NOT NULL, tags TEXT NOT NULL, reward REAL, started REAL NOT NULL,
  task TEXT NOT NULL, attempt INTEGER NOT NULL,
  description INTEGER,  -- the event that describes it
  model INTEGER, infrastructure INTEGER, seconds REAL, calls INTEGER, prompt INTEGER,
  sampled INTEGER, cached INTEGER, turns INTEGER, owner INTEGER, told BLOB NOT NULL
);
CREATE TABLE stale (run INTEGER PRIMARY KEY);
CREATE TABLE names (code INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE asked (
  time REAL, event INTEGER, run INTEGER, hash TEXT, said BLOB, PRIMARY KEY (time, event)
) WITHOUT ROWID;
"""

_ALL = "loop, iteration, agent, split, stop_reason, error, models, tags, reward"
INDEXES = (
    "CREATE UNIQUE INDEX events_by_key ON events (key)",
    "CREATE INDEX events_by_run ON events (run)",
    "CREATE INDEX asked_by_run ON asked (run)",
    f"CREATE INDEX runs_by_id ON runs (shown, id, {_ALL}, started, task, model, infrastructure,"
    " seconds, calls, prompt, sampled, cached, turns, owner)",
    f"CREATE INDEX runs_by_start ON runs (shown, started, id, {_ALL})",
    "CREATE INDEX runs_by_task ON runs"
    f" (shown, task, iteration, attempt, id, {_ALL.replace('iteration, ', '')}, started)",
)

#: Files that SQLite keeps beside its own.
BESIDE = ("-wal", "-shm", "-journal")


def connect(path: Path, *, writer: bool = False) -> sqlite3.Connection:
    """Open a connection for use by one thread at a time; read-only without `writer`."""
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = OFF")
    if writer:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA cache_size = -16384")  # KiB, negated
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    else:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA cache_size = -2048")
    return connection


def prepare(path: Path, identity: str) -> sqlite3.Connection:
    """Open the writing connection of a file; replace a file that is damaged or of another root.

    Only one process may call this at a time. Raises sqlite3.Error on an error of the disk.
    """
    # the file is never synced, so it is void after a crash
    wanted = {"identity": identity, "boot": boot_id()}
    if path.exists() and not _is_usable(path, wanted):
        remove(path)
    connection = connect(path, writer=True)
    os.utime(path)  # it is in use
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.execute("BEGIN IMMEDIATE")
        for statement in (*TABLES.split(";\n"), *INDEXES):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(wanted.items()))
        connection.execute("COMMIT")
    return connection


def remove(path: Path) -> None:
    """Delete the file. Processes that have it open keep its contents until they check again."""
    for beside in BESIDE:
        path.with_name(path.name + beside).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _is_usable(path: Path, wanted: dict[str, str]) -> bool:
    """Check the version and root of a file. Other damage is met when it is read."""
    connection = sqlite3.connect(path, timeout=60)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] != INDEX_VERSION:
            return False
        return dict(connection.execute("SELECT name, value FROM meta")) == wanted
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return False
        raise
    finally:
        connection.close()


def is_damage(error: sqlite3.Error) -> bool:
    """Tell whether an error means a broken file rather than a failing disk."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    missing = code == sqlite3.SQLITE_ERROR and "no such" in str(error)
    return missing or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def cache_of(home: Home) -> Path:
    """Return this version's index for this root, and make its directory. Raises StoreError.

    The files of other versions go when their time is over. A process that still has one makes it
    anew.
    """
    root = os.path.realpath(home.root)
    directory = host_cache() / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    path = directory / f"index-{INDEX_VERSION}.sqlite"
    with store_errors(f"cannot write the index in {directory}"):
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "root").write_bytes(os.fsencode(root))
        _remove_old(directory, path)
    return path


def _remove_old(directory: Path, ours: Path) -> None:
    """Remove the files of other versions that were not used of late, or are too many."""
    used: dict[Path, float] = {}
    for path in directory.glob("index*.sqlite"):
        for end in ("", *BESIDE):
            with suppress(FileNotFoundError):
                at = path.with_name(path.name + end).stat().st_mtime
                used[path] = max(at, used.get(path, 0.0))
    used.pop(ours, None)
    for rank, path in enumerate(sorted(used, key=used.__getitem__, reverse=True)):
        if rank >= KEPT_FILES or used[path] < time.time() - KEPT_SECONDS:
            for file in directory.glob(f"{path.name}*"):
                file.unlink(missing_ok=True)


def identity_of(home: Home) -> str:
    """Return the random name of this root, made on first use. Raises StoreError.

    A reader without write access to a root without a name gets its inode instead.
    """
    try:
        if not home.root_id.exists():
            create_file(home.root_id, new_id("root").encode())
        return home.root_id.read_text()
    except OSError as error:
        if error.errno in READ_ONLY and home.root.is_dir():
            stat = home.root.stat()
            return f"inode {stat.st_dev}.{stat.st_ino}"
        raise StoreError(f"cannot write {home.root_id}: {error.strerror or error}") from error


def sweep_caches() -> list[str]:
    """Delete the indexes of roots that no longer exist. Return the paths of these roots."""
    swept = []
    for file in sorted(host_cache().glob("*/root")):
        with suppress(FileNotFoundError):  # another process does the same
            root = os.fsdecode(file.read_bytes())
            if root and not Path(root).is_dir():
                shutil.rmtree(file.parent, ignore_errors=True)
                swept.append(root)
    return swept


class Codes:
    """A cache of the codes of names for one connection's transactions; void once one is undone.

    Most runs share their agent, loop, models and tags, so codes are few, and queries compare
    numbers. Several names are stored as a text of their codes, "|3|7|"; see `codes_of`.
    """

    def __init__(self) -> None:
        self.names: dict[str | None, int | None] = {None: None}  # codes already given

    def name(self, connection: sqlite3.Connection, name: str | None) -> int | None:
        """Return the code of a name, a new one if needed; None has no code."""
        if name not in self.names:
            if len(self.names) >= MAX_CACHED:
                self.names = {None: None}
            connection.execute("INSERT OR IGNORE INTO names (name) VALUES (?)", (name,))
            self.names[name] = name_code(connection, name or "")
        return self.names[name]

    def several(self, connection: sqlite3.Connection, names: Iterable[str]) -> str:
        """Return the text that stands for some names; "" for none."""
        text = "|".join(str(self.name(connection, name)) for name in names)
        return f"|{text}|" if text else ""


def name_code(connection: sqlite3.Connection, name: str) -> int | None:
    """Return the code of a name, if it has one."""
    row = connection.execute("SELECT code FROM names WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def codes_of(text: str) -> list[int]:
    """Return the codes in a text of `Codes.several`."""
    return [int(code) for code in text.split("|") if code]


def any_version(model: str) -> str:
    """Return the name under which a run is also found by its model without the version."""
    return f"{model.partition('@')[0]}@"


_LARGEST = 2**62


def to_rank(number: int | None) -> int:
    """Return an iteration or attempt as its column value: never NULL, and None sorts before 0."""
    if number is None:
        return 0
    return max(-_LARGEST, min(_LARGEST, number + (number >= 0)))


def from_rank(number: int) -> int | None:
    """Return the iteration or attempt of a column value."""
    return None if number == 0 else number - (number > 0)


# ---- connections
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
                    connection = connect(self.path)
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
            self._writers.append(prepare(self.path, self._identity))
            self._inode = self.path.stat().st_ino

    def _renew(self) -> None:
        with _locked(self._turn):
            with self._opening_lock():
                remove(self.path)
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
            if not is_damage(error):
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
