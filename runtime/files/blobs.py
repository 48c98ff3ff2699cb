"""Blobs: contents of files and upload parts, each stored once under its SHA-256.

A content is written to a draft and hashed on the way. It is linked to its name when it is whole and
on the disk, so a killed writer leaves a draft, never half a blob. Called by files.py and
uploads.py. Everything in here blocks, so the gateway calls it in threads. Read next: uploads.py.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cray_agents.errors import DiskFull, NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.turns import between_pieces

PIECE = 1 << 20  # bytes per read and write
DRAFT_SECONDS = 86400.0  # age at which a draft's writer must be dead
GRACE_SECONDS = 3600.0  # since a content's last use: time in which a record of its use is written
ASIDE = ".aside"
#: What clients' files leave free, so that calls can still be recorded: the lesser of a share of the
#: disk and of bytes.
KEPT_FREE, KEPT_FREE_BYTES = 0.05, 5 * 2**30

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blob:
    """A stored content. `size`: bytes."""

    sha256: str
    size: int


class BlobDraft:
    """A content being written. A context manager: an unpublished draft is removed on exit.

    `sent`: a client sends it, and it may not take the last of the disk.
    """

    def __init__(self, blobs: "Blobs", sent: bool = False) -> None:
        self.size = 0
        self.path = blobs.home.drafts / new_id("draft")
        self._blobs = blobs
        self._sent = sent
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
        """Append and hash. Call it from a thread: it takes 1 to 2 ms per MiB. Raises StoreError."""
        with _disk(self.path):
            self._check_room(len(data))
            self._file.write(data)
        self._hasher.update(data)
        self.size += len(data)

    def publish(self) -> Blob:
        """Sync the content to disk and link it to its name, unless it is stored already."""
        sha256 = self._hasher.hexdigest()
        path = self._blobs.path(sha256)
        with _disk(path):
            self._file.flush()
            os.utime(self._file.fileno())  # the last write may be older than a sweep's grace
            os.fsync(self._file.fileno())
            self._file.close()
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                durable.sync(path.parent.parent)
            while True:
                with contextlib.suppress(FileExistsError):
                    os.link(self.path, path)
                    break
                if self._blobs.keep(sha256) is not None:
                    break
            self.discard()
            durable.sync(path.parent)  # also if another process linked it: it may not have synced
        return Blob(sha256, self.size)

    def discard(self) -> None:
        """Remove the draft. After `publish` this does nothing."""
        with contextlib.suppress(OSError):  # the last bytes may not fit on the disk
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _check_room(self, more: int) -> None:
        """Raise DiskFull for a client's content that leaves too little room."""
        if not self._sent:
            return
        disk = os.statvfs(self._blobs.home.drafts)
        kept = min(KEPT_FREE * disk.f_blocks * disk.f_frsize, KEPT_FREE_BYTES)
        free = disk.f_bavail * disk.f_frsize
        if free - more < kept:
            raise DiskFull(
                f"the platform's disk has {free} bytes free, of which {kept:.0f} are kept for the "
                "records of calls: delete files that are not needed, or ask an administrator"
            )


class Blobs:
    """The contents under one home. Opening it removes drafts older than DRAFT_SECONDS."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._sweep_drafts()

    def path(self, sha256: str) -> Path:
        """Return the path of a content, stored or not."""
        return self.home.blob(sha256)

    def verified_path(self, sha256: str) -> Path:
        """Return the path of a stored content, verified. Raises Corrupt, FileNotFoundError."""
        path = self.path(sha256)
        path.stat()
        return checksums.prove(path, sha256)

    def size(self, sha256: str) -> int | None:
        """Return a content's bytes, or None if it is not stored."""
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def keep(self, sha256: str) -> int | None:
        """Return the size, and protect the content from sweeps for GRACE_SECONDS.

        In that time the caller records its use.
        """
        try:
            os.utime(self.path(sha256))
        except FileNotFoundError:
            return None
        return self.size(sha256)

    def draft(self, sent: bool = False) -> BlobDraft:
        """Begin a new content; see BlobDraft. Raises StoreError."""
        return BlobDraft(self, sent)

    def join(self, contents: Sequence[str]) -> Blob:
        """Concatenate contents in this order to a new one. Raises NotFound, StoreError.

        One content alone is not copied.
        """
        if len(contents) == 1 and (size := self.keep(contents[0])) is not None:
            return Blob(contents[0], size)
        with self.draft(sent=True) as draft:
            for piece in _pieces(self._kept_paths(contents)):
                draft.write(piece)
            return draft.publish()

    def md5(self, contents: Sequence[str]) -> str:
        """Return the MD5, in hex, of concatenated contents. Raises NotFound."""
        hasher = hashlib.md5(usedforsecurity=False)
        for piece in _pieces(self._kept_paths(contents)):
            hasher.update(piece)
        return hasher.hexdigest()

    def sweep(self, used: Callable[[], Collection[str]], grace: float = GRACE_SECONDS) -> int:
        """Remove contents neither `used` nor stored or kept for `grace` seconds; return how many.

        Safe while other processes publish: a content is first set aside, and put back if it was
        kept meanwhile.
        """
        for aside in self.home.blobs.glob(f"??/.*{ASIDE}"):  # of a killed sweep
            _restore(aside)
        before = time.time() - grace
        old = [path for path in self.home.blobs.glob("??/[!.]*") if _modified(path) < before]
        in_use = used() if old else ()
        removed = 0
        for path in old:
            if path.name in in_use:
                continue
            aside = path.with_name(f".{path.name}{ASIDE}")
            with contextlib.suppress(FileNotFoundError):  # another sweep was faster
                path.rename(aside)
                if _modified(aside) < before:
                    aside.unlink()
                    removed += 1
                else:
                    _restore(aside)
        return removed

    def _sweep_drafts(self) -> None:
        before = time.time() - DRAFT_SECONDS
        for draft in self.home.drafts.glob("draft_*"):
            if _modified(draft) < before:
                log.info("removing %s: its writer was killed", draft)
                draft.unlink(missing_ok=True)

    def _kept_paths(self, contents: Sequence[str]) -> list[Path]:
        for sha256 in contents:
            if self.keep(sha256) is None:
                raise NotFound(f"no content {sha256!r}", param="sha256", code="content_unknown")
        return [self.path(sha256) for sha256 in contents]


def _pieces(paths: Sequence[Path]) -> Iterator[memoryview]:
    """Yield the bytes of files, in pieces that the next one overwrites."""
    buffer = memoryview(bytearray(PIECE))
    for path in paths:
        with _disk(path), path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
                between_pieces()


def _modified(path: Path) -> float:
    """Return a file's modification time, or the present time if it vanished."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _restore(aside: Path) -> None:
    """Give a content set aside its own name again, unless it was stored anew meanwhile."""
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        os.link(aside, aside.with_name(aside.name[1 : -len(ASIDE)]))
    aside.unlink(missing_ok=True)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as a StoreError that names the file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError.of(f"cannot use {path}", error) from error
