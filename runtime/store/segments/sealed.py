"""Sealed segments: the layout of their files, which are plain zstd with a footer; and sealing.

    (zstd frame)*  footer  trailer

A zstd frame holds about 64 KiB of whole lines, its content size and a checksum. Footer and trailer
are skippable frames, which zstd readers ignore, and have checksums of their own:

- the footer: sizes of all frames, counts and hashes (Footer);
- the trailer, of fixed size: the place of the footer.

If the footer is lost or the file is cut off, the zstd frames themselves tell where the next one
begins. Files of the version "segment1" have more skippable frames: a mark before each zstd frame,
and facts of the lines before the footer. They are passed over.

A process may be killed at any moment, and two may seal the same segment. So a draft is written,
synced, read back and compared before it is published and the open file removed. Damaged lines are
kept unchanged. A torn last line, which was never acknowledged, is dropped and noted. Called by
writer.py and repair.py; `write_sealed` by compaction.py and repair.py. Read by reader.py.
"""

import hashlib
import logging
import os
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from cray_agents.errors import Corrupt, NewerFormat, StoreError, store_errors
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.checksums import check_version, is_whole
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    OPEN,
    SEALED,
    draft_of,
    name_of,
)

log = logging.getLogger(__name__)

# the 16 magic numbers of skippable frames start at 0x184D2A50
SKIPPABLE, FOOTER, TRAILER = 0x184D2A50, 0x184D2A55, 0x184D2A56
MAGIC = b"\x28\xb5\x2f\xfd"  # begins a zstd frame
LEVEL = 3
VERSION, MARKED = b"segment2", b"segment1"
MARK_SIZE = 28  # bytes before each zstd frame of a MARKED file
WINDOW = 2**20  # bytes read at once where the footer is lost
LONGEST = 2**40  # bytes of a frame's lines: a header that tells of more is damaged

_head = struct.Struct("<II")  # magic, bytes of the payload
_trailer = struct.Struct("<II8sQIII")  # magic, 32, version, footer: at, size, CRC-32; CRC-32
TRAILER_SIZE = _trailer.size


class Frame(NamedTuple):
    """A zstd frame: `size` bytes from `at` in the file hold `length` bytes of lines from `offset`.

    `lines`: their number; None where it is unknown.
    """

    at: int
    size: int
    offset: int
    length: int
    lines: int | None


class Gap(NamedTuple):
    """A damaged or missing end of a file, from byte `at` on.

    `lines`: lines from `offset` on are lost; else all stand before it. `newer`: it is whole, and of
    a newer version.
    """

    at: int
    offset: int
    lines: bool
    message: str
    newer: bool = False


class Footer(NamedTuple):
    """The footer of a sealed segment.

    frames: [[size in the file, bytes of lines, lines]] in order; of older files without the last.
    sha256: of the lines with their newlines, `bytes` in all; crc: CRC-32 of the file up to here.
    torn: (offset, bytes) of a dropped torn last line. bad: (offset, bytes) of lines that were
    damaged before sealing, kept unchanged. replaces: the segments that this one replaces.
    """

    frames: list[list[int]]
    lines: int
    bytes: int
    sha256: str
    crc: int
    torn: list[int] | None
    bad: list[list[int]]
    replaces: list[str]


class Table:
    """The frames of a sealed segment, in order.

    With a footer, `end` is the byte at which it begins; without, `gap` describes the damaged end.
    """

    def __init__(self) -> None:
        self.footer: Footer | None = None
        self.gap: Gap | None = None
        self.end = -1
        self._at, self._size = array("Q"), array("Q")
        self._offset, self._length, self._lines = array("Q"), array("Q"), array("q")

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> Frame:
        lines = self._lines[index]
        place = (self._at[index], self._size[index], self._offset[index], self._length[index])
        return Frame(*place, None if lines < 0 else lines)

    def add(self, at: int, size: int, length: int, lines: int = -1) -> None:
        """Append the next frame. `lines`: -1 if unknown."""
        self._offset.append(self._offset[-1] + self._length[-1] if self._at else 0)
        self._at.append(at)
        self._size.append(size)
        self._length.append(length)
        self._lines.append(lines)

    def find(self, offset: int) -> int:
        """Return the index of the last frame that starts at or before an offset; -1 if none."""
        return bisect_right(self._offset, offset) - 1


def compress(data: bytes) -> bytes:
    """Compress data to one zstd frame with its content size and a checksum."""
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)


class Unpacker(threading.local):
    """An unpacker of zstd frames for any thread; each has its own decompressor, costly to make."""

    _zstd: Any = None

    def unpack(self, data: bytes, length: int) -> bytes:
        """Decompress one frame to its `length` bytes. Raises Corrupt."""
        import zstandard

        if self._zstd is None:
            self._zstd = zstandard.ZstdDecompressor()
        try:
            if zstandard.frame_content_size(data) != length:  # checked before the memory is taken
                raise Corrupt("the frame's header is damaged")
            content: bytes = self._zstd.decompress(data)
        except zstandard.ZstdError as error:
            raise Corrupt(f"the frame is damaged ({error})") from error
        return content


def skippable(magic: int, payload: bytes) -> bytes:
    """Return a skippable frame."""
    return _head.pack(magic, len(payload)) + payload


def encode_footer(footer: Footer, at: int) -> bytes:
    """Return the footer and the trailer, for a footer that starts at byte `at` of the file."""
    payload = orjson.dumps(footer._asdict())
    start = _trailer.pack(
        TRAILER, TRAILER_SIZE - _head.size, VERSION, at, len(payload), zlib.crc32(payload), 0
    )[:-4]
    return skippable(FOOTER, payload) + start + zlib.crc32(start).to_bytes(4, "little")


def read_table(file: int) -> Table:
    """List the frames of an open file from its footer, or else one after the other.

    The frames themselves may be damaged. Raises OSError.
    """
    size, at = os.fstat(file).st_size, -1
    try:
        at, length, crc, version = _read_trailer(file, size)
        footer = _read_footer(file, at, length, crc, version)
        if at + _head.size + length + TRAILER_SIZE != size:
            raise Corrupt("something stands between the footer and the end of the file")
    except (Corrupt, NewerFormat) as error:
        return _scan(file, size, at, error)
    table, position = Table(), 0
    table.footer, table.end = footer, at
    for size, length, *lines in footer.frames:
        position += MARK_SIZE if version == MARKED else 0
        table.add(position, size, length, *lines)
        position += size
    return table


def _read_trailer(file: int, end: int) -> tuple[int, int, int, bytes]:
    """Return the footer's place, size and CRC-32, and the file's version.

    Raises Corrupt, NewerFormat.
    """
    tail = os.pread(file, TRAILER_SIZE, max(0, end - TRAILER_SIZE))
    if len(tail) < TRAILER_SIZE:
        raise Corrupt("the file is too short for a sealed segment")
    magic, _, version, at, size, payload_crc, crc = _trailer.unpack(tail)
    if zlib.crc32(tail[:-4]) != crc:
        raise Corrupt("the end of the file is damaged or missing")
    number = version.removeprefix(b"segment")
    if magic != TRAILER or number == version or not number.isdigit():
        raise Corrupt(f"the segment is of an unknown version {version!r}")
    check_version(int(number), int(VERSION[-1:]), "the segment")
    return at, size, payload_crc, version


def _read_footer(file: int, at: int, size: int, crc: int, version: bytes) -> Footer:
    data = os.pread(file, _head.size + size, at)
    payload = data[_head.size :]
    if data[: _head.size] != _head.pack(FOOTER, size) or zlib.crc32(payload) != crc:
        raise Corrupt("the footer is damaged")
    if version == MARKED:
        import zstandard

        payload = zstandard.ZstdDecompressor().decompress(payload)
    fields = orjson.loads(payload)
    return Footer(**{name: fields[name] for name in Footer._fields})


def _scan(file: int, end: int, footer: int, why: StoreError) -> Table:
    """List the frames of a file without a usable footer, which would begin at `footer`.

    A damaged frame has the length that its header tells, so that the places of later lines hold.
    If the header is damaged, they are other ones until the segment is repaired.
    """
    table, position, whole = Table(), 0, False
    while position + _head.size <= end and not (whole := position == footer):
        magic, skipped = _head.unpack(os.pread(file, _head.size, position))
        if whole := magic in (FOOTER, TRAILER):
            break
        if magic & 0xFFFFFFF0 == SKIPPABLE:
            position += _head.size + skipped
            continue
        size, length = _measure(file, position, end)
        if size < 0:
            following = _find_frame(file, position + 1, end)
            if following < 0:
                break
            size = following - position
        table.add(position, size, max(0, length))
        position += size
    offset = sum(table[len(table) - 1][2:4]) if len(table) else 0
    table.gap = Gap(position, offset, not whole, str(why), isinstance(why, NewerFormat))
    return table


def _measure(file: int, at: int, end: int) -> tuple[int, int]:
    """Return the bytes of the zstd frame at a place, or -1 for a damaged one, and of its lines."""
    import zstandard

    length = -1
    try:
        length = min(int(zstandard.frame_content_size(os.pread(file, 18, at))), LONGEST)
        one, position = zstandard.ZstdDecompressor().decompressobj(), at
        while position < end and not one.eof:
            data = os.pread(file, WINDOW, position)
            one.decompress(data)
            position += len(data) - len(one.unused_data)
        return (position - at if one.eof else -1), length
    except zstandard.ZstdError:
        return -1, length


def _find_frame(file: int, position: int, end: int) -> int:
    """Return the place of the next whole zstd frame; -1 if there is none."""
    while position < end:
        window = os.pread(file, WINDOW, position)
        found = window.find(MAGIC)
        if found >= 0:
            position += found
            if _measure(file, position, end)[0] >= 0:
                return position
            position += 1
        elif len(window) < len(MAGIC):
            break
        else:
            position += len(window) - len(MAGIC) + 1
    return -1


# ---- sealing
FRAME = 64 * 2**10  # bytes of lines in a frame; a longer line has its own frame


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
        self._file.write(encode_footer(footer, self._at))
        return footer

    def _put_frame(self) -> None:
        data = b"\n".join([*self._lines, b""])
        self._hasher.update(data)
        packed = compress(data)
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
    """Read a sealed segment whole; return its footer. Raises Corrupt, NewerFormat, OSError."""
    with path.open("rb", buffering=0) as file:
        table = read_table(file.fileno())
        footer = table.footer
        if footer is None:
            assert table.gap is not None
            raise (NewerFormat if table.gap.newer else Corrupt)(f"{path}: {table.gap.message}")
        hasher, unpacker = hashlib.sha256(), Unpacker()
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
    Corrupt if it has other lines, NewerFormat if a newer host sealed it: both then stay.
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
