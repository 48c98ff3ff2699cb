"""Frames: the layout of a sealed segment's file, which is plain zstd with skippable frames.

    (mark, zstd frame)*  facts*  footer  trailer

A zstd frame holds about 64 KiB of whole lines, its content size and a checksum. Everything else is
in skippable frames, which zstd readers ignore. Each has its own checksum:

- a mark precedes each zstd frame, with the frame's size and the place of its lines. If the footer
  is lost or the file is cut off, a search for marks is enough to read the lines;
- facts (see facts.py) of some thousand lines, compressed;
- the footer: sizes of all frames, counts and hashes (Footer);
- the trailer, of fixed size: the place of the footer.

Written by sealed.py; read by reader.py, sealed.py and repair.py.
"""

import os
import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import Corrupt
from cray_agents.runtime.store.segments.facts import Fact
from cray_agents.runtime.store.segments.line_format import LinePlace, Placed

# the 16 magic numbers of skippable frames start at 0x184D2A50
MARK, FACTS_CHUNK, FOOTER, TRAILER = 0x184D2A53, 0x184D2A54, 0x184D2A55, 0x184D2A56
LEVEL = 3
VERSION = b"segment1"
TAIL = 64 * 2**10  # bytes of the first read from the end; most footers fit
WINDOW = 2**20  # bytes searched at once for a mark

_head = struct.Struct("<II")  # magic, bytes of the payload
_mark = struct.Struct("<IIQIII")  # magic, 20, offset, length, size, CRC-32 of all before
_trailer = struct.Struct("<II8sQIII")  # magic, 32, version, footer: at, size, CRC-32; CRC-32
MARK_SIZE = _mark.size
TRAILER_SIZE = _trailer.size
MARK_START = _head.pack(MARK, MARK_SIZE - _head.size)


class Frame(NamedTuple):
    """A zstd frame: `size` bytes from `at` in the file hold `length` bytes of lines from `offset`.

    Its mark ends at `at`.
    """

    at: int
    size: int
    offset: int
    length: int


class Gap(NamedTuple):
    """A damaged or missing end of a file, from byte `at` on.

    `offset` and `length` are the lost bytes of lines; length 0 means none, or unknown.
    """

    at: int
    offset: int
    length: int
    message: str


class Footer(NamedTuple):
    """The footer of a sealed segment.

    frames: [(size in the file, bytes of lines)]; facts: [(size in the file, lines)], in order.
    sha256: of the lines with their newlines, `bytes` in all; crc: CRC-32 of the file up to here.
    torn: (offset, bytes) of a dropped torn last line. bad: (offset, bytes) of lines that were
    damaged before sealing, kept unchanged. replaces: the segments that this one replaces.
    """

    frames: list[tuple[int, int]]
    facts: list[tuple[int, int]]
    facts_version: int
    lines: int
    bytes: int
    sha256: str
    crc: int
    torn: tuple[int, int] | None
    bad: list[tuple[int, int]]
    replaces: list[str]


class Table:
    """The frames of a sealed segment, in order.

    With a footer, `facts_at` is the byte at their end; without, `gap` describes the damaged end.
    """

    def __init__(self) -> None:
        self.footer: Footer | None = None
        self.gap: Gap | None = None
        self.facts_at = -1
        self._at, self._size = array("Q"), array("Q")
        self._offset, self._length = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> Frame:
        return Frame(self._at[index], self._size[index], self._offset[index], self._length[index])

    def add(self, frame: Frame) -> None:
        """Append the next frame."""
        self._at.append(frame.at)
        self._size.append(frame.size)
        self._offset.append(frame.offset)
        self._length.append(frame.length)

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


def encode_mark(frame: Frame) -> bytes:
    """Return the mark that precedes a frame."""
    size = MARK_SIZE - _head.size
    start = _mark.pack(MARK, size, frame.offset, frame.length, frame.size, 0)[:-4]
    return start + zlib.crc32(start).to_bytes(4, "little")


def skippable(magic: int, payload: bytes) -> bytes:
    """Return a skippable frame."""
    return _head.pack(magic, len(payload)) + payload


def encode_facts(offset: int, lengths: list[int], facts: list[bytes]) -> bytes:
    """Return the frame of facts (each as JSON, or null) of consecutive lines."""
    head = orjson.dumps({"offset": offset, "lengths": lengths})
    return skippable(FACTS_CHUNK, compress(b'%b,"facts":[%b]}' % (head[:-1], b",".join(facts))))


def decode_facts(stem: str, chunk: bytes) -> list[Placed]:
    """Decode a frame of facts; lines without a fact are left out. Raises Corrupt."""
    content = _decode_chunk(chunk)
    offset: int = content["offset"]
    placed = []
    for length, fact in zip(content["lengths"], content["facts"], strict=True):
        if fact is not None:
            placed.append(Placed(Fact(*fact), LinePlace(stem, offset, length)))
        offset += length + 1
    return placed


def decode_lengths(chunk: bytes) -> tuple[int, list[int]]:
    """Return the offset of the first line of a frame of facts, and the lengths of all its lines."""
    content = _decode_chunk(chunk)
    return content["offset"], content["lengths"]


def is_after_lines(data: bytes) -> bool:
    """Tell whether a frame, by its first bytes, comes after all lines."""
    return len(data) >= 4 and int.from_bytes(data[:4], "little") in (FACTS_CHUNK, FOOTER)


def _decode_chunk(chunk: bytes) -> Any:
    magic, size = _head.unpack_from(chunk) if len(chunk) >= _head.size else (0, 0)
    if magic != FACTS_CHUNK or size != len(chunk) - _head.size:
        raise Corrupt("a frame of facts is damaged")
    return orjson.loads(_decompress(chunk[_head.size :]))


def encode_footer(footer: Footer, at: int) -> bytes:
    """Return the footer and the trailer, for a footer that starts at byte `at` of the file."""
    payload = compress(orjson.dumps(footer._asdict()))
    start = _trailer.pack(
        TRAILER, TRAILER_SIZE - _head.size, VERSION, at, len(payload), zlib.crc32(payload), 0
    )[:-4]
    return skippable(FOOTER, payload) + start + zlib.crc32(start).to_bytes(4, "little")


def read_table(file: int) -> Table:
    """List the frames of an open file from its footer, or else by a search for marks.

    The frames themselves may be damaged. Raises OSError.
    """
    end = os.fstat(file).st_size
    try:
        footer = _read_footer(file, end)
    except Corrupt as error:
        return _scan(file, end, str(error))
    table = Table()
    table.footer = footer
    position = offset = 0
    for size, length in footer.frames:
        table.add(Frame(position + MARK_SIZE, size, offset, length))
        position += MARK_SIZE + size
        offset += length
    table.facts_at = position
    return table


def _read_footer(file: int, end: int) -> Footer:
    tail_at = max(0, end - TAIL)
    tail = os.pread(file, TAIL, tail_at)
    if len(tail) < TRAILER_SIZE:
        raise Corrupt("the file is too short for a sealed segment")
    start, crc = tail[-TRAILER_SIZE:-4], int.from_bytes(tail[-4:], "little")
    if zlib.crc32(start) != crc:
        raise Corrupt("the end of the file is damaged or missing")
    magic, _, version, at, size, payload_crc, _ = _trailer.unpack(tail[-TRAILER_SIZE:])
    if magic != TRAILER or version != VERSION:
        raise Corrupt(f"the segment is of an unknown version {version!r}")
    whole = _head.size + size
    data = tail[at - tail_at :][:whole] if at >= tail_at else os.pread(file, whole, at)
    payload = data[_head.size :]
    if data[: _head.size] != _head.pack(FOOTER, size) or zlib.crc32(payload) != payload_crc:
        raise Corrupt("the footer is damaged")
    if at + whole + TRAILER_SIZE != end:
        raise Corrupt("something stands between the footer and the end of the file")
    return _parse_footer(orjson.loads(_decompress(payload)))


def _parse_footer(footer: dict[str, Any]) -> Footer:
    torn = footer["torn"]
    footer["torn"] = tuple(torn) if torn else None
    for key in ("frames", "facts", "bad"):
        footer[key] = [tuple(pair) for pair in footer[key]]
    return Footer(**footer)


def _decompress(payload: bytes) -> bytes:
    """Decompress a frame of unknown length, which its own or an outer checksum verifies."""
    import zstandard

    try:
        length = zstandard.frame_content_size(payload)
        if length > 1000 * len(payload) + 2**20:
            raise Corrupt("the frame's header is damaged")
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise Corrupt(f"the frame is damaged ({error})") from error


def _scan(file: int, end: int, why: str) -> Table:
    """List the frames of a file without a usable footer."""
    table = Table()
    position = offset = 0
    for frame in _marked_frames(file, end):
        between = frame.at - MARK_SIZE - position
        if frame.offset > offset and between > MARK_SIZE:
            # a readable frame with a damaged mark, or several frames, which count as one unreadable
            lost = frame.offset - offset
            table.add(Frame(position + MARK_SIZE, between - MARK_SIZE, offset, lost))
        table.add(frame)
        position, offset = frame.at + frame.size, frame.offset + frame.length
    cut = decode_mark(os.pread(file, MARK_SIZE, position), position)
    table.gap = Gap(position, offset, cut.length if cut else 0, why)
    return table


def _marked_frames(file: int, end: int) -> Iterator[Frame]:
    """Yield every frame that has its mark and lies wholly in the file."""
    position = 0
    while True:
        frame = decode_mark(os.pread(file, MARK_SIZE, position), position)
        if frame is None:
            position = _search(file, position + 1)
            if position < 0:
                return
        elif frame.at + frame.size > end:
            position += 1
        else:
            yield frame
            position = frame.at + frame.size


def decode_mark(data: bytes, position: int) -> Frame | None:
    """Decode a mark at byte `position` of the file; None if the data is no mark."""
    if len(data) < MARK_SIZE or not data.startswith(MARK_START):
        return None
    _, _, offset, length, size, crc = _mark.unpack(data)
    if zlib.crc32(data[:-4]) != crc:
        return None
    return Frame(position + MARK_SIZE, size, offset, length)


def _search(file: int, position: int) -> int:
    """Return the position of the next possible mark; -1 if there is none."""
    while window := os.pread(file, WINDOW, position):
        index = window.find(MARK_START)
        if index >= 0:
            return position + index
        if len(window) < len(MARK_START):
            return -1
        position += len(window) - len(MARK_START) + 1
    return -1
