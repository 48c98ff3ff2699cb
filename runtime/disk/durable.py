"""Durable files: publish files and folders whole or not at all, also on NFS, Lustre or Weka.

Everything immutable under the shared root is written here: the registry's versions, checkpoints
and datasets. For files that grow see group_commit.py.
"""

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from cray_agents.records import new_id

BLOCK = 1 << 20  # bytes read at a time
PROBE_BYTES = 64 * 1024  # written to learn if a disk is full


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def sha256(content: bytes) -> str:
    """Return the hex SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder; none where it does not exist.

    To wait for a file of another host, look here before opening it. A host that looked for a name
    itself, and did not find it, may believe for 30 s that it is absent (NFS).
    """
    try:
        return {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        return set()


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write and fsync a file that nobody reads yet: readers could see half of it.

    A new file has `mode`, less the umask, from its first moment.
    """
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file: readers see the old one or the whole new one, which has this mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{new_id('draft')}")
    try:
        write_file(draft, data, mode)
        draft.replace(path)
    except BaseException:  # such as a full disk: leave nothing behind
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Publish a file under an unused name. Return False if the name is taken.

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
        with suppress(OSError):  # on a root that is read-only now the name may stand already
            draft.unlink(missing_ok=True)
    sync(path.parent)
    return True


def check_room(directory: Path) -> None:
    """Prove that a directory's disk still takes data. Raises OSError."""
    probe = directory / f".{new_id('room')}"
    try:
        write_file(probe, bytes(PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def draft_directory(target: Path) -> Path:
    """Create an empty directory beside `target`, to fill and pass to `publish_directory`."""
    draft = target.with_name(f".{target.name}.{new_id('draft')}")
    draft.mkdir(parents=True)
    return draft


def publish_directory(draft: Path, target: Path) -> bool:
    """Rename a filled, fsynced draft to its name. Return False if the name is taken."""
    sync(draft)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    sync(target.parent)
    return True


OLD = ".old_"  # in the name of a folder that is being deleted

log = logging.getLogger(__name__)


def remove(folder: Path) -> int:
    """Delete a folder. Return the bytes freed; 0 if another process was first."""
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
    except FileNotFoundError:  # another process deletes it too
        return 0
    except OSError as error:
        log.warning(
            "%s is not deleted whole: %s; `maintain prune models` tries again", aside, error
        )
    return before - size_of(aside)


#: The beginning of the names of resume points whose files are on the nodes' own disks.
LOCAL = "local-"


def resume_points(megatron: Path) -> list[Path]:
    """Return the published resume points in a job's megatron/ folder, newest first."""
    return sorted(megatron.glob("step-*"), reverse=True)


def kept_state(megatron: Path, number: int) -> Path:
    """Return the folder of the training state that a run by commands kept with a command."""
    return megatron / f"kept-{number:08d}"


def keep_newest(megatron: Path, count: int) -> None:
    """Delete all but the newest `count` resume points of a job."""
    for point in resume_points(megatron)[count:]:
        remove(point)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that vanish meanwhile count 0."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).lstat().st_size
    return total
