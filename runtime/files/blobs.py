"""Contents by their SHA-256, each stored once: what files and the parts of uploads hold.

A content is written to a draft, hashed on the way, and linked to its name when it is whole and on
the disk: a killed writer leaves a draft, never half a blob. Called by files.py and uploads.py;
everything here blocks, so the gateway calls it in threads. Read next: sweeping.py, what is removed.
"""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cray_agents.errors import NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable

PIECE = 1 << 20  # bytes that are read, or gathered before they are written
STRETCH = 64 << 20  # bytes that the kernel is asked to copy at once
DRAFT_SECONDS = 86400.0  # an older draft is a killed writer's
GRACE_SECONDS = 3600.0  # a content stored or asked for this recently may be about to be referred to
ASIDE = ".aside"
NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blob:
    """A stored content. `size`: bytes."""

    sha256: str
    size: int


class BlobDraft:
    """A content that is being written. A context manager: what was not published is removed."""

    def __init__(self, blobs: "Blobs") -> None:
        self.size = 0
        self.path = blobs.home.drafts / new_id("draft")
        self._blobs = blobs
        self._hasher = hashlib.sha256()
        with _disk(self.path):
            blobs.home.drafts.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=PIECE)

    def __enter__(self) -> "BlobDraft":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append and hash. From a thread: a large piece takes a millisecond or two per MiB.

        Raises StoreError.
        """
        with _disk(self.path):
            self._file.write(data)
        self._hasher.update(data)
        self.size += len(data)

    def publish(self) -> Blob:
        """Put what was written on the disk under its name, unless that is there already."""
        return self._publish(self._hasher.hexdigest())

    def discard(self) -> None:
        """Remove the draft; nothing happens after `publish`."""
        with contextlib.suppress(OSError):  # its last bytes may not fit on the disk
            self._file.close()
        self.path.unlink(missing_ok=True)

    def copy(self, sources: Sequence[Path]) -> None:
        """Append whole files without hashing them, in the kernel if it can."""
        with _disk(self.path):
            for source in sources:
                with source.open("rb") as file:
                    self.size += _copy(file, self._file)

    def _publish(self, sha256: str) -> Blob:
        path = self._blobs.path(sha256)
        with _disk(path):
            self._file.flush()
            os.utime(self._file.fileno())  # its last write may be longer ago than a sweep's grace
            os.fsync(self._file.fileno())
            self._file.close()
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                durable.sync(path.parent.parent)
            while not self._link(path):
                if self._blobs.keep(sha256) is not None:
                    break
            self.discard()
            durable.sync(path.parent)  # also if another linked it, who may not have come this far
        return Blob(sha256, self.size)

    def _link(self, path: Path) -> bool:
        try:
            os.link(self.path, path)
        except FileExistsError:
            return False
        return True


class Blobs:
    """The contents under one home. Opening removes the drafts of writers killed a day ago."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._sweep_drafts()

    def path(self, sha256: str) -> Path:
        """Where a content lies, or would."""
        return self.home.blob(sha256)

    def proven(self, sha256: str) -> Path:
        """The same of one that is there and whole. Raises Corrupt, FileNotFoundError."""
        path = self.path(sha256)
        path.stat()
        return checksums.prove(path, sha256)

    def size(self, sha256: str) -> int | None:
        """The bytes of a content; None if it is not there."""
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def keep(self, sha256: str) -> int | None:
        """As `size`, and it is not swept for GRACE_SECONDS: time to write down who refers to it."""
        try:
            os.utime(self.path(sha256))
        except FileNotFoundError:
            return None
        return self.size(sha256)

    def draft(self) -> BlobDraft:
        """A new content, to be written and published. Raises StoreError."""
        return BlobDraft(self)

    def join(self, parts: Sequence[str]) -> Blob:
        """The content made of other contents in this order. Raises NotFound, StoreError.

        The kernel copies while a thread hashes. One part alone is the content itself.
        """
        if len(parts) == 1 and (size := self.keep(parts[0])) is not None:
            return Blob(parts[0], size)
        with self.draft() as draft, ThreadPoolExecutor(1, "join") as copier:
            paths = self._paths(parts)
            copying = copier.submit(draft.copy, paths)
            sha256 = _digest(paths, "sha256")
            copying.result()
            return draft._publish(sha256)

    def md5(self, parts: Sequence[str]) -> str:
        """The MD5, in hex, of contents in this order: OpenAI's checksum. Raises NotFound."""
        return _digest(self._paths(parts), "md5")

    def sweep(self, used: Callable[[], Collection[str]], grace: float = GRACE_SECONDS) -> int:
        """Remove contents that are not `used` and that nobody stored or kept for `grace` seconds.

        Safe beside publishers in other processes: a content is set aside, looked at once more,
        and put back if it was kept meanwhile. Returns how many were removed.
        """
        self._put_back()
        before = time.time() - grace
        old = [path for path in self.home.blobs.glob("??/[!.]*") if _modified(path) < before]
        wanted = used() if old else ()
        removed = 0
        for path in old:
            if path.name in wanted:
                continue
            aside = path.with_name(f".{path.name}{ASIDE}")
            with contextlib.suppress(FileNotFoundError):  # another's sweep was faster
                path.rename(aside)
                if _modified(aside) < before:
                    aside.unlink()
                    removed += 1
                else:
                    _restore(aside)
        return removed

    def _put_back(self) -> None:
        """What a killed sweep left aside."""
        for aside in self.home.blobs.glob(f"??/.*{ASIDE}"):
            _restore(aside)

    def _sweep_drafts(self) -> None:
        before = time.time() - DRAFT_SECONDS
        for draft in self.home.drafts.glob("draft_*"):
            if _modified(draft) < before:
                log.info("removing %s: its writer was killed", draft)
                draft.unlink(missing_ok=True)

    def _paths(self, parts: Sequence[str]) -> list[Path]:
        for part in parts:
            if self.keep(part) is None:
                raise NotFound(f"no content {part!r}", param="sha256", code="content_unknown")
        return [self.path(part) for part in parts]


def _digest(paths: Sequence[Path], algorithm: str) -> str:
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    buffer = memoryview(bytearray(PIECE))
    for path in paths:
        with _disk(path), path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
    return hasher.hexdigest()


def _copy(source: BinaryIO, target: BinaryIO) -> int:
    """Append a file to another; returns its bytes."""
    target.flush()
    total = 0
    try:
        while count := os.copy_file_range(source.fileno(), target.fileno(), STRETCH):
            total += count
    except OSError as error:
        if error.errno not in NO_KERNEL_COPY:
            raise
        source.seek(total)
        shutil.copyfileobj(source, target, PIECE)
        total = source.tell()
    return total


def _modified(path: Path) -> float:
    """The time of a file that may vanish; then it is not old."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _restore(aside: Path) -> None:
    """Give a content that was set aside its name again."""
    with contextlib.suppress(FileNotFoundError):
        aside.rename(aside.with_name(aside.name[1 : -len(ASIDE)]))


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """A full or broken disk is a StoreError, which names the file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError.of(f"cannot use {path}", error) from error
