"""Weight copies: checkpoints on a host's own disk or in its memory, from where replicas load them.

`replica_scratch` names the place. rolling_swap.py has a copy made while a replica serves its former
version; once the new one is loaded the others are dropped. A copy is verified by its manifest while
it is written. Each process has a folder of its own, which the next one removes if it was killed.
What another process of this user has copied is linked, so that it takes its room once. Without a
copy a replica reads the shared root: slower, and otherwise the same.
"""

import asyncio
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from time import sleep

from cray_agents.errors import Corrupt, CrayError, StoreError
from cray_agents.paths import own_folder
from cray_agents.records import digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.runtime.pool.private_folder import PrivateFolder
from cray_agents.runtime.registry.checkpoints import MANIFEST, is_whole, read_manifest

SETTING = "replica_scratch"
_SPARE = 256 << 20  # bytes of the disk that are left free
_BLOCK = 8 << 20  # bytes copied at a time
_POLL_INTERVAL = 0.2  # seconds between two looks if another process has made the same copy


class WeightCopies:
    """The copies of a process. `place`: the folder to make them in; None: there are none."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._folder: PrivateFolder | None = None
        self._copies: dict[Path, Path] = {}
        self._changing = asyncio.Lock()

    def find(self, checkpoint: Path) -> Path:
        """Return where to read a checkpoint: its copy if there is one, else itself."""
        copy = self._copies.get(checkpoint)
        return copy if copy is not None and copy.is_dir() else checkpoint

    async def make(self, checkpoint: Path) -> tuple[Path, str]:
        """Copy a checkpoint; return the same as `find`, and why there is no copy, or ""."""
        why = ""
        async with self._changing:
            try:
                if self._place is not None:
                    copy = await asyncio.to_thread(self._make, self._place, checkpoint)
                    self._copies[checkpoint] = copy
            except (CrayError, OSError) as error:
                why = str(error)
        return self.find(checkpoint), why

    async def keep(self, *checkpoints: Path) -> None:
        """Drop all other copies."""
        async with self._changing:
            self._copies = {one: self._copies[one] for one in checkpoints if one in self._copies}
            with suppress(OSError):  # the disk is gone, and all copies with it
                for copy in [] if self._folder is None else self._folder.path.iterdir():
                    if copy not in self._copies.values():
                        await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def close(self) -> None:
        """Drop all copies."""
        await self.keep()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _make(self, place: Path, checkpoint: Path) -> Path:
        manifest = read_manifest(checkpoint)
        if manifest.base is not None or not is_whole(checkpoint, manifest):
            return checkpoint  # an adapter, or changes of other weights: there is little to read
        if not place.is_dir():  # it is not made: that would be on the system's disk
            raise StoreError(f"this host has no folder {place}, which {SETTING} names")
        if self._folder is None:
            parent = own_folder(place, SETTING) / "weights"
            parent.mkdir(exist_ok=True)
            self._folder = PrivateFolder(parent)
        target = self._folder.path / digest(manifest.files)
        with closing(HostLock(f"weights {target.name}")) as lock:
            while not lock.take():
                sleep(_POLL_INTERVAL)
            if not target.is_dir():
                draft = durable.draft_directory(target)
                try:
                    _fill(draft, checkpoint, manifest.files, target)
                    draft.rename(target)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
        return target


def _fill(draft: Path, checkpoint: Path, files: dict[str, str], target: Path) -> None:
    """Link the files that another process has, and copy the others. Raises Corrupt, StoreError."""
    missing = []
    for name in files:
        (draft / name).parent.mkdir(exist_ok=True)
        for other in target.parent.parent.glob(f"*/{target.name}/{name}"):
            with suppress(FileNotFoundError):  # it is being dropped
                os.link(other, draft / name)
                break
        else:
            missing.append(name)
    size = sum((checkpoint / name).stat().st_size for name in missing)
    if (free := shutil.disk_usage(draft).free) < size + _SPARE:
        raise StoreError(
            f"{checkpoint.name} takes {size / 2**30:.3g} GiB of {SETTING}, and {target.parent} has"
            f" {free / 2**30:.3g} GiB left, of which {_SPARE >> 20} MiB stay free"
        )
    for name in missing:
        found = checksums.FileHash(files[name])
        with (checkpoint / name).open("rb") as old, (draft / name).open("wb") as new:
            while block := old.read(_BLOCK):
                found.update(block)
                new.write(block)
        if str(found) != files[name]:
            raise Corrupt(f"{checkpoint / name} is damaged: {checksums.describe(str(found))}")
    shutil.copyfile(checkpoint / MANIFEST, draft / MANIFEST)
