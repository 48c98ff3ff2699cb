"""Schema: the tables of the index, its place on this host, and the opening of its file.

`runs` has a column for everything that queries select or sort by, with names as numbers (codes.py).
Its column `told` has the merged facts of a run (run_merge.py). Three SQLite indexes, one for each
order, hold the same columns. A page is thus found by a scan of one index, without touching a row.
A fourth has all that statistics read.
Each version of this code has a file of its own, so no version number needs care, and two versions
on one host do not undo each other's work. Called by database.py.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import time
import zlib
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import StoreError
from cray_agents.paths import Home, host_cache
from cray_agents.records import new_id
from cray_agents.runtime.disk.durable import create_file
from cray_agents.runtime.store.segments import facts


def _version() -> int:
    """Return a hash of the code of the index and of its facts."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(facts.__file__)]
    return zlib.crc32(b"".join(path.read_bytes() for path in sources)) & 0x7FFF_FFFF


DRAFT_CACHE = 192 * 1024  # KiB of memory for a draft
VERSION = _version()  # in the file's name, and its user_version
KEPT_SECONDS = 7 * 86_400.0  # after its last use, for the file of another version
KEPT_FILES = 3  # of other versions, the last used
BOOT = Path("/proc/sys/kernel/random/boot_id")

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
  loop INTEGER, generation INTEGER NOT NULL, agent INTEGER, split INTEGER, stop_reason INTEGER,
  error INTEGER, models INTEGER, tags INTEGER, reward REAL, started REAL NOT NULL,
  task TEXT NOT NULL, attempt INTEGER NOT NULL,
  description INTEGER,  -- the event that describes it
  model INTEGER, infrastructure INTEGER, seconds REAL, calls INTEGER, prompt INTEGER,
  sampled INTEGER, turns INTEGER, owner INTEGER, told BLOB NOT NULL
);
CREATE TABLE stale (run INTEGER PRIMARY KEY);
CREATE TABLE names (code INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE sets (code INTEGER PRIMARY KEY, kind INTEGER NOT NULL, members TEXT NOT NULL,
  UNIQUE (kind, members));
CREATE TABLE members (kind INTEGER, name TEXT, code INTEGER, PRIMARY KEY (kind, name, code))
  WITHOUT ROWID;
CREATE TABLE asked (
  time REAL, event INTEGER, run INTEGER, hash TEXT, said BLOB, PRIMARY KEY (time, event)
) WITHOUT ROWID;
"""

_ALL = "loop, generation, agent, split, stop_reason, error, models, tags, reward"
# SQLite indexes that a draft lacks until they are used or it is finished
KEYS = "CREATE UNIQUE INDEX IF NOT EXISTS events_by_key ON events (key)"
BY_RUN = (
    "CREATE INDEX IF NOT EXISTS events_by_run ON events (run)",
    "CREATE INDEX IF NOT EXISTS asked_by_run ON asked (run)",
)
ORDERS = (
    f"CREATE INDEX runs_by_id ON runs (shown, id, {_ALL}, started)",
    f"CREATE INDEX runs_by_start ON runs (shown, started, id, {_ALL})",
    "CREATE INDEX runs_by_task ON runs"
    f" (shown, task, generation, attempt, id, {_ALL.replace('generation, ', '')}, started)",
    # all that statistics.py reads: a twentieth of the table
    f"CREATE INDEX runs_figures ON runs (shown, {_ALL}, started, task, model, infrastructure,"
    " seconds, calls, prompt, sampled, turns, owner)",
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
        _create_tables(connection, wanted)
        for statement in (KEYS, *BY_RUN, *ORDERS):
            connection.execute(statement)
        connection.execute("COMMIT")
    return connection


def draft(path: Path, identity: str) -> sqlite3.Connection:
    """Create a new file that nobody else reads, in one transaction that `finish` ends."""
    remove(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute(f"PRAGMA cache_size = -{DRAFT_CACHE}")
    connection.execute("BEGIN IMMEDIATE")
    _create_tables(connection, {"identity": identity, "boot": _boot()})
    return connection


def finish(connection: sqlite3.Connection) -> None:
    """Create a draft's SQLite indexes, commit it for others to open, and close it."""
    for statement in (KEYS, *BY_RUN, *ORDERS):
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.execute("PRAGMA locking_mode = NORMAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


def _create_tables(connection: sqlite3.Connection, meta: dict[str, str]) -> None:
    """Create the tables, without KEYS, BY_RUN and ORDERS."""
    for statement in TABLES.split(";\n"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))


def remove(path: Path) -> None:
    """Delete the file. Processes that have it open keep its contents until they check again."""
    for beside in BESIDE:
        path.with_name(path.name + beside).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _is_usable(path: Path, wanted: dict[str, str]) -> bool:
    """Check the version and root of a file, and that the ends of its tables are readable."""
    connection = sqlite3.connect(path, timeout=60)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            return False
        if dict(connection.execute("SELECT name, value FROM meta")) != wanted:
            return False
        tables = ("segments", "events", "runs", "stale", "names", "sets")
        for table in tables:
            for way in ("", " DESC"):
                connection.execute(f"SELECT * FROM {table} ORDER BY rowid{way} LIMIT 1").fetchall()
        connection.execute("SELECT key FROM events ORDER BY key LIMIT 1").fetchall()
        connection.execute("SELECT * FROM asked ORDER BY time LIMIT 1").fetchall()
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return False
        raise
    finally:
        connection.close()
    return True


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
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "root").write_bytes(os.fsencode(root))
        _remove_old(directory, path := directory / f"index-{VERSION:08x}.sqlite")
    except OSError as error:
        raise StoreError(f"cannot write the index in {directory}: {error.strerror}") from error
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
