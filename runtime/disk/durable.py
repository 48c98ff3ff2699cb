"""Files that are either whole or absent, on a laptop's disk and on NFS, Lustre or Weka alike.

Everything immutable under the shared root goes through here: the registry's versions, checkpoints
and datasets. Growing files are another matter: see appending.py.
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path

from cray_agents.records import new_id

BLOCK = 1 << 20  # bytes read at a time
ROOM = 64 * 1024  # bytes that a disk which is not full has room for


def sha256_file(path: Path) -> str:
    """The hex SHA-256 of a file's bytes."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def sha256(content: bytes) -> str:
    """The hex SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a directory's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write and fsync a file that nobody reads yet: half of it may be seen meanwhile.

    `mode`, less the umask, is what a new file has from its first moment.
    """
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put `data` at `path`: readers see the old file or the whole new one, which has this mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{new_id('draft')}")
    try:
        write_file(draft, data, mode)
        draft.replace(path)
    except BaseException:  # such as a full disk: nothing of it stays
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Publish a file under a name nobody has; False if somebody was first.

    The link is exclusive like O_EXCL, but the name never stands for a half-written file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{new_id('draft')}")
    try:
        write_file(draft, data)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)
    return True


def check_room(directory: Path) -> None:
    """Prove that a directory's disk takes data. Raises OSError."""
    probe = directory / f".{new_id('room')}"
    try:
        write_file(probe, bytes(ROOM))
    finally:
        probe.unlink(missing_ok=True)


def draft_directory(target: Path) -> Path:
    """An empty directory beside `target`, to be filled and then published as it."""
    draft = target.with_name(f".{target.name}.{new_id('draft')}")
    draft.mkdir(parents=True)
    return draft


def publish_directory(draft: Path, target: Path) -> bool:
    """Rename a filled, fsynced draft to its name; False if the name is taken already."""
    sync(draft)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    sync(target.parent)
    return True


OLD = ".old_"  # in the name of what is being deleted

log = logging.getLogger(__name__)


def remove(folder: Path) -> int:
    """Delete a folder; returns the bytes that this gave back. 0 if somebody else was first."""
    aside = folder
    if OLD not in folder.name:
        aside = folder.with_name(f".{folder.name.removeprefix('.')}.{new_id('old')}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return 0
    before = size_of(aside)
    try:
        shutil.rmtree(aside)
    except FileNotFoundError:  # somebody else deletes it, too
        return 0
    except OSError as error:
        log.warning("%s is not deleted whole: %s; `models prune` tries again", aside, error)
    return before - size_of(aside)


def resume_points(megatron: Path) -> list[Path]:
    """The published resume points in a job's megatron/ folder, newest first."""
    return sorted(megatron.glob("step-*"), reverse=True)


def keep_newest(megatron: Path, count: int) -> None:
    """Delete all resume points of a job but the newest `count`."""
    for point in resume_points(megatron)[count:]:
        remove(point)


def size_of(folder: Path) -> int:
    """The bytes of the files in a folder and below; of what vanishes meanwhile none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except FileNotFoundError:
            continue
    return total
