"""Sealing: turn a finished segment into a compressed, checksummed file.

A process may be killed at any moment, and two may seal the same segment. So a draft is written,
synced, read back and compared before it is published and the open file removed. Damaged lines are
kept unchanged. A torn last line, which was never acknowledged, is dropped and noted. Called by
writer.py and repair.py; `write_sealed` by compaction.py and repair.py. For the file's layout see
frames.py.
"""

import hashlib
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from cray_agents.errors import Corrupt, StoreError, store_errors
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.checksums import is_whole
from cray_agents.runtime.store.segments import frames
from cray_agents.runtime.store.segments.frames import Footer
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    OPEN,
    SEALED,
    draft_of,
    name_of,
)

FRAME = 64 * 2**10  # bytes of lines in a frame; a longer line has its own frame

log = logging.getLogger(__name__)


def _write_draft(
    path: Path, lines: Iterable[bytes], replaces: Sequence[str] = (), torn: Sequence[int] = ()
) -> Footer:
    """Write lines (without newlines) to a new file, sync it, and read it back.

    `torn`: the place and length of a torn last line, known once `lines` are read. Raises OSError,
    Corrupt.
    """
    with path.open("xb") as file:
        draft = _Draft(file)
        for line in lines:
            draft.add(line)
        footer = draft.end(torn, replaces)
        file.flush()
        os.fsync(file.fileno())
    if verify(path) != footer:
        raise Corrupt(f"{path} does not read back as it was written")
    return footer


class _Draft:
    """A sealed segment that is being written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._crc = 0
        self._offset = 0  # bytes of the lines already in frames
        self._lines: list[bytes] = []  # of the next frame
        self._size = 0
        self._hasher = hashlib.sha256()
        self._frames: list[list[int]] = []
        self._count = 0
        self._bad: list[list[int]] = []

    def add(self, line: bytes) -> None:
        """Append a line."""
        if self._lines and self._size + len(line) >= FRAME:
            self._put_frame()
        if not is_whole(line):
            self._bad.append([self._offset + self._size, len(line)])
        self._lines.append(line)
        self._size += len(line) + 1
        self._count += 1

    def end(self, torn: Sequence[int], replaces: Sequence[str]) -> Footer:
        """Write the remaining frame, then the footer."""
        if self._lines:
            self._put_frame()
        footer = Footer(
            frames=self._frames,
            lines=self._count,
            bytes=self._offset,
            sha256=self._hasher.hexdigest(),
            crc=self._crc,
            torn=list(torn) or None,
            bad=self._bad,
            replaces=list(replaces),
        )
        self._file.write(frames.encode_footer(footer, self._at))
        return footer

    def _put_frame(self) -> None:
        data = b"\n".join([*self._lines, b""])
        self._hasher.update(data)
        packed = frames.compress(data)
        self._file.write(packed)
        self._crc = zlib.crc32(packed, self._crc)
        self._at += len(packed)
        self._frames.append([len(packed), len(data), len(self._lines)])
        self._offset += len(data)
        self._lines, self._size = [], 0


def crc_of(file: int, end: int) -> int:
    """Return the CRC-32 of an open file's first `end` bytes."""
    crc = position = 0
    while position < end:
        data = os.pread(file, min(durable.BLOCK, end - position), position)
        if not data:
            return -1
        crc = zlib.crc32(data, crc)
        position += len(data)
    return crc


def verify(path: Path) -> Footer:
    """Read a sealed segment whole and return its footer. Raises Corrupt, OSError."""
    with path.open("rb", buffering=0) as file:
        table = frames.read_table(file.fileno())
        footer = table.footer
        if footer is None:
            assert table.gap is not None
            raise Corrupt(f"{path}: {table.gap.message}")
        hasher, unpacker = hashlib.sha256(), frames.Unpacker()
        for index in range(len(table)):
            frame = table[index]
            data = os.pread(file.fileno(), frame.size, frame.at)
            hasher.update(unpacker.unpack(data, frame.length))
        intact = crc_of(file.fileno(), table.end) == footer.crc
    if hasher.hexdigest() != footer.sha256 or not intact:
        raise Corrupt(f"{path} is not what its footer says")
    return footer


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
    with store_errors(f"cannot seal {path}"):
        source = _open_either(path.parent, stem)
        if source is None:
            if target.exists():
                return target
            raise StoreError(f"cannot seal {path}: it is gone")
        with source:
            _publish(source, target)
            for form in (OPEN, LEFT):
                opened = path.with_name(stem + form)
                if _is_same_file(source, opened):
                    opened.unlink(missing_ok=True)
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
    with store_errors(f"cannot write {target}"):
        directory.mkdir(parents=True, exist_ok=True)
        draft = draft_of(target)
        try:
            _write_draft(draft, lines, replaces)
            os.link(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        durable.sync(directory)
    return target


def _whole_lines(file: BinaryIO, torn: list[int]) -> Iterator[bytes]:
    """Yield the whole lines of an open segment; `torn` gets place and length of a torn last one."""
    offset = 0
    file.seek(0)
    for line in file:
        if not line.endswith(b"\n"):
            torn += [offset, len(line)]
            return
        yield line[:-1]
        offset += len(line)


def _publish(file: BinaryIO, target: Path) -> None:
    draft, torn = draft_of(target), list[int]()
    try:
        footer = _write_draft(draft, _whole_lines(file, torn), torn=torn)
        stem = target.name.removesuffix(SEALED)
        if not any(_is_same_file(file, target.with_name(stem + form)) for form in (OPEN, LEFT)):
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
        existing = verify(target)
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


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
