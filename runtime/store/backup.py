"""Backup: copy a root to another folder, incrementally and verified, and restore it from there.

    blobs/<aa>/<sha256>   contents of files, each stored once (runtime/files/blobs.py)
    <time>.jsonl          a backup: a head, a line for each file and folder of the root, their count
    .<id>.part            the lines of a backup that goes on, or was killed

A file is not read again if its size, time and inode are in an earlier backup or a part. So a killed
backup goes on where it was. Contents that no line names any more, as of a backup that was deleted,
are deleted by the next one.

**While a platform runs.** A file of the root only grows or is replaced as a whole, so each copy is
one that a crash could have left. What names others is copied before what it names (ORDER): a
version in a backup has its checkpoint, and an iteration its runs. So a restored root is one whose
platform was killed; only its newest runs may be of a version that came too late to be in it. Drafts
are not copied, nor what belongs to processes that live (LEFT_OUT).

Called by cray_agents/cli/maintenance.py.
"""

import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import copyfile, disk_usage

from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, DiskFull, NotFound, SetupError, store_errors
from cray_agents.paths import ITERATIONS, Home
from cray_agents.records import Record, new_id
from cray_agents.runtime.disk import checksums, durable, journal
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.runtime.files.blobs import Blobs
from cray_agents.runtime.store.segments.repair import seal_orphans

BACKUP_FORMAT = 1
#: Places of a root in the order of copying, as globs: what names others, before what it names. One
#: within another is copied at its own turn; "*" is all that is not named here.
ORDER = (
    "ledger", f"loops/*/{ITERATIONS}", "loops", "tinker", "fine_tuning", "batches", "uploads",
    "files", "models/*/history", "models", "sessions/*/queue", "jobs", "sessions", "*",
    "segments", "jobs/*/megatron", "datasets", "checkpoints", "blobs",
)  # fmt: skip
LEFT_OUT = ("platform.json", "replicas", "controller/standbys", "exports", "slurm", "logs",
            "blobs/drafts")  # fmt: skip
MOVING = "segments"  # where a file goes on under another name once it is sealed or compacted
THREADS = 8
TOGETHER = 256  # files whose lines are written at once
PART_SECONDS = 86400.0  # age at which a part is deleted
MANIFEST, PART = "*.jsonl", ".*.part"


class BackupEntry(Record):
    """A file of a root, or a folder, which has no `sha256`. `path` is below the root."""

    path: str
    mode: int
    sha256: str = ""
    size: int = 0
    mtime_ns: int = 0
    inode: int = 0


class Backup(Record):
    """A whole backup, whose contents lie beside its file. `copied`: bytes that were not there."""

    path: Path
    root: str
    time: float
    files: int
    bytes: int
    copied: int = 0
    entries: list[BackupEntry] = Field(exclude=True)


def back_up(home: Home, folder: Path) -> Backup:
    """Copy what changed under a root since the last backup in a folder, which may be new.

    Raises BadInput for a folder that cannot hold backups, SetupError without room, NewerFormat for
    a backup of a newer version, Corrupt for a damaged one, StoreError.
    """
    root, folder = home.root.resolve(), folder.resolve()
    if folder.is_relative_to(root) or root.is_relative_to(folder):
        raise BadInput(f"{folder} and the root {root} lie within each other", param="dest")
    for path in folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else ():
        if path.name != "blobs" and not path.match(MANIFEST) and not path.match(PART):
            raise BadInput(f"{path} is no backup: name a folder for backups alone", param="dest")
    with _writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(folder.stat().st_mode & 0o770)
        blobs, begun = Blobs(Home(folder)), time.time()
        known, used = _read_all(folder)
        writer = _Writer(root, blobs, known)
        head = journal.line_of({"backup": BACKUP_FORMAT, "root": str(root), "time": begun})
        part, whole = (folder / f".{new_id('backup')}.part" for _ in range(2))
        with closing(journal.LineFile(part)) as lines:
            entries = [entry for place in ORDER for entry in writer.copy(place, lines)]
        sizes = [entry.size for entry in entries if entry.sha256]
        count = {"files": len(sizes), "bytes": sum(sizes), "lines": len(entries)}
        text = b"\n".join([head, *map(_line, entries), journal.line_of(count), b""])
        durable.write_file(whole, text)
        path = folder / time.strftime("%Y-%m-%dT%H%M%SZ.jsonl", time.gmtime(begun))
        while path.exists():  # of the same second
            path = path.with_stem(f"{path.stem}_")
        whole.rename(path)
        durable.sync(folder)
        part.unlink(missing_ok=True)
        blobs.sweep(lambda: used | {entry.sha256 for entry in entries})
    return Backup(
        path=path, root=str(root), time=begun, files=len(sizes), bytes=sum(sizes),
        copied=writer.copied, entries=entries,
    )  # fmt: skip


class _Writer:
    """Copies files of a root to blobs, but for those that are `known` from earlier backups."""

    def __init__(self, root: Path, blobs: Blobs, known: dict[str, BackupEntry]) -> None:
        self.copied = 0  # bytes
        self._root, self._blobs, self._known = root, blobs, known

    def copy(self, place: str, lines: journal.LineFile) -> list[BackupEntry]:
        """Copy what is at a place of ORDER, and append it to `lines`. Return what is still there.

        So of a folder that is deleted meanwhile nothing is in the backup.
        """
        done: dict[Path, BackupEntry] = {}
        names = self._list(place)
        with ThreadPoolExecutor(THREADS) as threads:
            while todo := [path for path in names if path not in done]:
                for first in range(0, len(todo), TOGETHER):
                    some = todo[first : first + TOGETHER]
                    copied = zip(some, threads.map(self._copy, some), strict=True)
                    new = {path: entry for path, entry in copied if entry is not None}
                    lines.append([_line(entry) for entry in new.values()])
                    self.copied += sum(e.size for e in new.values() if e != self._known.get(e.path))
                    done |= new
                if any(path not in done for path in todo):
                    before, now = set(names), self._list(place)
                    names = [path for path in now if place == MOVING or path in before]
        return [done[path] for path in names]

    def _list(self, place: str) -> list[Path]:
        """Return the files and folders at a place, each folder before what is in it."""
        own = {path for path in self._root.glob(place) if path.name[0] != "."}
        others = {path for other in ORDER if other != "*" for path in self._root.glob(other)}
        unread = {self._root / name for name in LEFT_OUT}
        unread |= others if place == "*" else others - own

        def look() -> list[Path]:
            return [path for top in sorted(own - unread) for path in _walk(top, unread)]

        names = look()
        while place == MOVING and names != (again := look()):
            names = again  # what was renamed during a look may be missing in it
        return names

    def _copy(self, path: Path) -> BackupEntry | None:
        """Copy a file, unless it is known; None if it is gone."""
        name = path.relative_to(self._root).as_posix()
        with store_errors(f"cannot copy {path}"), suppress(FileNotFoundError):
            found, known = path.stat(), self._known.get(name)
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISDIR(found.st_mode):
                return BackupEntry(path=name, mode=mode)
            if known is not None and self._blobs.size(known.sha256) == known.size:
                before = (known.size, known.mtime_ns, known.inode)
                if before == (found.st_size, found.st_mtime_ns, found.st_ino):
                    return known.model_copy(update={"mode": mode})
            with path.open("rb") as file, self._blobs.draft() as draft:
                found = os.fstat(file.fileno())
                while piece := file.read(min(durable.BLOCK, found.st_size - draft.size)):
                    draft.write(piece)
                blob = draft.publish()
            times = {"mtime_ns": found.st_mtime_ns, "inode": found.st_ino}
            return BackupEntry(path=name, mode=mode, sha256=blob.sha256, size=blob.size, **times)
        return None


def _walk(top: Path, unread: set[Path]) -> Iterator[Path]:
    """Yield a file, or a folder and all below, but for drafts and what is `unread`.

    Folders of later names come first: of a job's resume points, the newest stays longest.
    """
    if top.is_file():
        yield top
    for folder, inner, files in os.walk(top):
        names = (name for name in inner if name[0] != "." and Path(folder, name) not in unread)
        inner[:] = sorted(names, reverse=True)
        yield Path(folder)
        found = (Path(folder, name) for name in sorted(files) if name[0] != ".")
        yield from (path for path in found if path.is_file())


def _line(entry: BackupEntry) -> bytes:
    return journal.line_of(entry.model_dump())


def _read_all(folder: Path) -> tuple[dict[str, BackupEntry], set[str]]:
    """Return the newest entry of each path, and the hashes of all contents that are needed.

    Raises Corrupt, NewerFormat: else contents could be deleted that a backup needs.
    """
    known: dict[str, BackupEntry] = {}
    used: set[str] = set()
    for path in sorted(folder.glob(MANIFEST)):
        known = {entry.path: entry for entry in open_backup(path).entries if entry.sha256}
        used |= {entry.sha256 for entry in known.values()}
    for path in sorted(folder.glob(PART)):
        if time.time() - path.stat().st_mtime > PART_SECONDS:
            path.unlink()
            continue
        rows = [row for row in journal.read(path, damaged="skip") if row.get("sha256")]
        known |= {row["path"]: BackupEntry.model_validate(row) for row in rows}
    return known, used | {entry.sha256 for entry in known.values()}


# ---- restore
def open_backup(source: Path) -> Backup:
    """Read a backup by its file, or the newest one of a folder.

    Raises NotFound without one, Corrupt, NewerFormat.
    """
    found = sorted(source.glob(MANIFEST)) if source.is_dir() else [source]
    if not found or not found[-1].is_file():
        raise NotFound(f"there is no backup at {source}", param="src")
    path = found[-1]
    try:
        rows = iter([*journal.read(path)])
        head = next(rows)
        checksums.check_version(head["backup"], BACKUP_FORMAT, path)
        *entries, count = rows
        backup = Backup(path=path, root=head["root"], time=head["time"], **count, entries=entries)
    except (StopIteration, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{path} is no backup, or is cut off") from error
    names = [Path(entry.path) for entry in backup.entries]
    safe = not any(name.is_absolute() or ".." in name.parts for name in names)
    if not safe or count.get("lines") != len(names):
        raise Corrupt(f"{path} is damaged: lines are missing, or lead out of the root")
    return backup


def restore(backup: Backup, root: Path, *, dry_run: bool = False) -> list[dict[str, str]]:
    """Make a root of a backup, and seal what its writers left; it appears when it is whole.

    First all contents are read: with damaged or missing ones, nothing is written, and `path`,
    `content` and `reason` of each file are returned. A killed restore is gone on with. Raises
    BadInput for a root that is not empty, SetupError without room, StoreError.
    """
    root, folder = root.resolve(), backup.path.resolve().parent
    draft = root.with_name(f".{root.name}.of-{backup.path.stem}")
    if not dry_run:
        _check_target(root, folder, backup.bytes - durable.size_of(draft))
    contents = {e: Home(folder).blob(e.sha256) for e in backup.entries if e.sha256}
    with ThreadPoolExecutor(THREADS) as threads:
        reasons = threads.map(_why_unusable, contents, contents.values())
        flaws = [
            {"path": entry.path, "content": str(content), "reason": reason}
            for (entry, content), reason in zip(contents.items(), reasons, strict=True)
            if reason
        ]
        if flaws or dry_run:
            return flaws
        with _writing(root):
            folders = [(draft / e.path, e.mode) for e in backup.entries if not e.sha256]
            for path in (draft, *(path for path, _ in folders)):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            list(threads.map(partial(_write, draft), contents, contents.values()))
            if (segments := Home(draft).segments).is_dir():
                seal_orphans(segments, lambda stem: False, older_than=0)
            for path, mode in reversed(folders):
                path.chmod(mode)
                durable.sync(path)
            if not durable.publish_directory(draft, root):
                raise BadInput(f"{root} is not empty any more", param="home")
    return []


def _check_target(root: Path, folder: Path, need: int) -> None:
    if root.is_relative_to(folder):
        raise BadInput(f"{root} lies within the backup: name another root by --home", param="home")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise BadInput(f"{root} is not empty: name a new root by --home", param="home")
    place = next(path for path in root.parents if path.exists())
    if (free := disk_usage(place).free) < need:
        raise SetupError(f"the backup needs {need} more bytes, and {place} has {free} free")


def _why_unusable(entry: BackupEntry, content: Path) -> str:
    try:
        checksums.prove(content, entry.sha256)
    except OSError as error:
        return str(error)
    return ""


def _write(draft: Path, entry: BackupEntry, content: Path) -> None:
    """Write a file, unless a killed restore has written it. Raises Corrupt, OSError."""
    path = draft / entry.path
    if not path.exists() or checksums.hash_of(path) != entry.sha256:
        copyfile(content, path)
        checksums.prove(path, entry.sha256)
    path.chmod(entry.mode)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
    durable.sync(path)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Let one process of this host write at a place. Raises BadInput, SetupError, StoreError."""
    with closing(HostLock(f"backup {place}")) as lock:
        if not lock.take():
            raise BadInput(f"another process writes to {place}: wait until it has ended")
        try:
            with store_errors(f"{place} cannot be written"):
                yield
        except DiskFull as error:
            raise SetupError(f"{error}: make room and repeat the command; it goes on") from error
