"""Host copies: folders in this host's cache ($CRAY_AGENTS_CACHE) that its ranks make once.

The first process that asks for one makes it in a draft, which is then renamed; the others wait.
It first deletes the drafts of killed ones, and what no job has asked for in a week. Called by
data/stored_tokens.py and models/transformers_backend/initial_weights.py. `scratch_folder` is where
checkpointing/save.py has resume points on the node's own disk.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import CrayError, StoreError
from cray_agents.paths import CACHE, SCRATCH, host_cache, own_folder
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.trainers.progress import CLOCK

UNUSED_SECONDS = 7 * 86_400.0
POLL_INTERVAL = 0.2  # seconds between two looks at whether another process has made it
SPARE = 256 << 20  # bytes of the disk that are left free


def host_copy(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `kind`/`name` of this host's cache, which `make` fills if there is none.

    The name tells all that decides its contents. Raises StoreError where it cannot be written, and
    what `make` raises.
    """
    folder = host_cache() / kind / name
    lock = HostLock(str(folder))
    try:
        while not lock.take():
            CLOCK.tick()
            time.sleep(POLL_INTERVAL)
        if folder.is_dir():
            os.utime(folder)
        else:
            folder.parent.mkdir(exist_ok=True)
            _sweep(folder)
            draft = durable.draft_directory(folder)
            try:
                make(draft)
                durable.publish_directory(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if isinstance(error, CrayError):
            raise
        hint = f"set {CACHE} to a disk with room"
        raise StoreError(f"cannot write {folder}: {error}: {hint}") from error
    finally:
        lock.close()
    return folder


def check_room(draft: Path, size: int, what: str) -> None:
    """Raise StoreError unless this host's disk has room for so many bytes."""
    free = shutil.disk_usage(draft).free
    if free < size + SPARE:
        raise StoreError(
            f"{what} take {size >> 20} MiB of this host's own disk, and {draft.parent} has"
            f" {free >> 20} MiB left: free some, or set {CACHE} to a disk with room"
        )


def scratch_folder(job: Path) -> Path | None:
    """Return a job's folder on this node's own disk; None without `[job] scratch`.

    `job`: its folder on the shared root. Virtual nodes of one host have each their own.
    """
    if not (scratch := os.environ.get(SCRATCH)):
        return None
    root = hashlib.sha256(os.fsencode(job.parents[1])).hexdigest()[:16]
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return Path(scratch) / f"cray-agents-{os.getuid()}" / root / node / job.name


def check_scratch() -> None:
    """Raise StoreError unless this node has the folder, and a folder of this user's in it."""
    scratch = Path(os.environ[SCRATCH])
    if not scratch.is_dir():  # it is not made: that would be on the system's disk
        raise StoreError(f"this node has no folder {scratch}, which `[job] scratch` names")
    own_folder(scratch, "`[job] scratch`")


def _sweep(folder: Path) -> None:
    """Delete what no job has used for long, and what killed makers of this folder have left.

    Whoever holds the folder's lock calls it: nobody else makes it now.
    """
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # another process deletes it, too
            left = other.name.startswith(f".{folder.name}.draft_")
            if left or time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
