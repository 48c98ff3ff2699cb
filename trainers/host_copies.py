"""Host copies: folders in this host's cache ($CRAY_AGENTS_CACHE) that its ranks make once.

The first process that asks for one makes it in a draft, which is then renamed; the others wait.
It first deletes the drafts of killed ones, and what no job has asked for in a week. Called by
data/stored_tokens.py and models/transformers_backend/initial_weights.py.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import CrayError, StoreError
from cray_agents.paths import CACHE, host_cache
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


def _sweep(folder: Path) -> None:
    """Delete what no job has used for long, and what killed makers of this folder have left.

    Whoever holds the folder's lock calls it: nobody else makes it now.
    """
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # another process deletes it, too
            left = other.name.startswith(f".{folder.name}.draft_")
            if left or time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
