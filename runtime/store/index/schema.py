"""Schema: the tables of the index, its place on this host, and the opening of its file.

`runs` has a column for everything that queries select or sort by, with names as numbers. Its column
`told` has the merged facts of a run (run_merge.py). Three SQLite indexes, one for each order, hold
the columns that filters compare, so a page is found by a scan of one of them, without touching a
row. That by id also has all that statistics read.

INDEX_VERSION is in the file's name, so two versions on one host do not undo each other's work.
Raise it with each change of the tables, of run_merge.py or of segments/facts.py. Called by
database.py.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import StoreError, store_errors
from cray_agents.paths import Home, host_cache
from cray_agents.records import new_id
from cray_agents.runtime.disk.durable import create_file

INDEX_VERSION = 3
KEPT_SECONDS = 7 * 86_400.0  # after its last use, for the file of another version
KEPT_FILES = 3  # of other versions, the last used
BOOT = Path("/proc/sys/kernel/random/boot_id")
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
    wanted = {"identity": identity, "boot": _boot()}
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


def _boot() -> str:
    """Return the id of this boot. The file is never synced, so it is void after a crash."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


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
