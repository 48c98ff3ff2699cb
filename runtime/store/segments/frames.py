"""Frames: the layout of a sealed segment's file, which is plain zstd with a footer.

    (zstd frame)*  footer  trailer

A zstd frame holds about 64 KiB of whole lines, its content size and a checksum. Footer and trailer
are skippable frames, which zstd readers ignore, and have checksums of their own:

- the footer: sizes of all frames, counts and hashes (Footer);
- the trailer, of fixed size: the place of the footer.

If the footer is lost or the file is cut off, the zstd frames themselves tell where the next one
begins. Files of the version "segment1" have more skippable frames: a mark before each zstd frame,
and facts of the lines before the footer. They are passed over.

Written by sealed.py; read by reader.py, sealed.py and repair.py.
"""

import os
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import Corrupt

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

    `lines`: lines from `offset` on are lost; else all stand before it.
    """

    at: int
    offset: int
    lines: bool
    message: str


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
        return Frame(
            self._at[index],
            self._size[index],
            self._offset[index],
            self._length[index],
            None if lines < 0 else lines,
        )

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
    except Corrupt as error:
        return _scan(file, size, at, str(error))
    table, position = Table(), 0
    table.footer, table.end = footer, at
    for size, length, *lines in footer.frames:
        position += MARK_SIZE if version == MARKED else 0
        table.add(position, size, length, *lines)
        position += size
    return table


def _read_trailer(file: int, end: int) -> tuple[int, int, int, bytes]:
    """Return the footer's place, size and CRC-32, and the file's version. Raises Corrupt."""
    tail = os.pread(file, TRAILER_SIZE, max(0, end - TRAILER_SIZE))
    if len(tail) < TRAILER_SIZE:
        raise Corrupt("the file is too short for a sealed segment")
    magic, _, version, at, size, payload_crc, crc = _trailer.unpack(tail)
    if zlib.crc32(tail[:-4]) != crc:
        raise Corrupt("the end of the file is damaged or missing")
    if magic != TRAILER or version not in (VERSION, MARKED):
        raise Corrupt(f"the segment is of an unknown version {version!r}")
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


def _scan(file: int, end: int, footer: int, why: str) -> Table:
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
    table.gap = Gap(position, offset, not whole, why)
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
