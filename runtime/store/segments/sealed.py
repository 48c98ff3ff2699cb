"""Sealing: turn a finished segment into a compressed, checksummed file.

A process may be killed at any moment, and two may seal the same segment. So a draft is written,
synced, read back and compared before it is published and the open file removed. Damaged lines are
kept unchanged. A torn last line, which was never acknowledged, is dropped and noted. Called by
writer.py and orphans.py; `write_sealed` by compaction.py and salvage.py. For the file's layout see
drafts.py and frames.py.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from cray_agents.errors import Corrupt, StoreError
from cray_agents.runtime.disk import durable
from cray_agents.runtime.store.segments import drafts
from cray_agents.runtime.store.segments.frames import Footer
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    OPEN,
    SEALED,
    draft_of,
    name_of,
)

__all__ = ["COMPACTED", "seal", "write_sealed"]

log = logging.getLogger(__name__)


def seal(path: Path) -> Path:
    """Seal an open segment (`X.jsonl` or `X.left.jsonl`) as `X.jsonl.zst`.

    Nobody may append to it any more. Repeated and simultaneous calls are safe. Raises StoreError,
    and Corrupt if the draft does not read back as written; the open file then stays.
    """
    named = name_of(path.name)
    if named is None:
        raise ValueError(f"{path.name} is not a segment")
    stem = named.stem
    target = path.with_name(stem + SEALED)
    try:
        source = _open_either(path.parent, stem)
        if source is None:
            if target.exists():
                return target
            raise StoreError(f"cannot seal {path}: it is gone")
        with source:
            _publish(source, _Source(source), target)
            _remove(source, path.parent, stem)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot seal {path}: {error.strerror or error}") from error
    return target


def write_sealed(
    directory: Path, stem: str, lines: Iterable[bytes], replaces: Sequence[str] = ()
) -> Path:
    """Write lines (without newlines) as a sealed segment that replaces the segments `replaces`.

    Once it is published, `Segments.list` leaves out `replaces`, and these may be removed. With
    `replaces` the stem must begin with COMPACTED, so that a listing opens no other segments. Raises
    StoreError if it cannot be written or the stem is taken, Corrupt if it does not read back, and
    the errors of `lines`.
    """
    if replaces and not stem.startswith(COMPACTED):
        raise ValueError(f"the stem {stem!r} of a segment that replaces others: not {COMPACTED}...")
    target = directory / f"{stem}{SEALED}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft = draft_of(target)
        try:
            drafts.write(draft, lines, replaces)
            os.link(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        durable.sync(directory)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
    return target


class _Source:
    """An iterator over the whole lines of an open segment; then `torn` is the torn last one."""

    def __init__(self, file: BinaryIO) -> None:
        self.torn: tuple[int, int] | None = None
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        offset = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                self.torn = (offset, len(line))
                return
            yield line[:-1]
            offset += len(line)


def _publish(file: BinaryIO, source: _Source, target: Path) -> None:
    draft = draft_of(target)
    try:
        footer = drafts.write(draft, source, torn=lambda: source.torn)
        if not _is_still_open(file, target.parent, target.name.removesuffix(SEALED)):
            return  # sealed by another process, maybe even compacted: it must not come back
        try:
            os.link(draft, target)
        except FileExistsError:
            if _should_replace(footer, file, target):
                draft.replace(target)
        durable.sync(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def _should_replace(footer: Footer, file: BinaryIO, target: Path) -> bool:
    """Tell whether a new draft should replace an existing sealed segment.

    That one may be damaged, or lack lines that a writer taken for dead still appended. Raises
    Corrupt if it has other lines.
    """
    try:
        existing = drafts.verify(target)
    except Corrupt as error:
        log.warning("sealed again, from the open file that is still there: %s", error)
        return True
    hasher, rest = hashlib.sha256(), existing.bytes
    file.seek(0)
    while rest and (block := file.read(min(rest, durable.BLOCK))):
        hasher.update(block)
        rest -= len(block)
    if hasher.hexdigest() != existing.sha256:
        raise Corrupt(f"{target} is there already, and is not what the open file holds: keep both")
    return existing.bytes < footer.bytes


def _open_either(directory: Path, stem: str) -> BinaryIO | None:
    for form in (OPEN, LEFT, OPEN):  # it may be renamed meanwhile
        try:
            return (directory / f"{stem}{form}").open("rb", buffering=durable.BLOCK)
        except FileNotFoundError:
            continue
    return None


def _is_still_open(file: BinaryIO, directory: Path, stem: str) -> bool:
    """Tell whether an open segment's file still has one of its names."""
    return any(_is_same_file(file, directory / f"{stem}{form}") for form in (OPEN, LEFT))


def _remove(file: BinaryIO, directory: Path, stem: str) -> None:
    for form in (OPEN, LEFT):
        path = directory / f"{stem}{form}"
        if _is_same_file(file, path):
            path.unlink(missing_ok=True)


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
