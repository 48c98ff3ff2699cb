"""Writes the file of a sealed segment, line by line, and reads one whole to see that it is right.

Memory holds one frame of lines, and the compressed facts of all. How the file lies: frames.py.
Called by sealed.py, which publishes it.
"""

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from cray_agents.errors import Corrupt
from cray_agents.runtime.disk.checksums import is_whole
from cray_agents.runtime.store.segments import frames
from cray_agents.runtime.store.segments.facts import FACTS, facts_of
from cray_agents.runtime.store.segments.frames import Footer, Frame
from cray_agents.runtime.store.segments.line_format import SHOWN

FRAME = 64 * 2**10  # bytes of lines in a frame; a longer line has one of its own
CHUNK = 5000  # lines whose facts stand together
CHUNK_BYTES = 4 * 2**20  # or fewer, if their facts are as large as this

log = logging.getLogger(__name__)


Torn = tuple[int, int] | None


def write(
    path: Path,
    lines: Iterable[bytes],
    replaces: Sequence[str] = (),
    torn: Callable[[], Torn] = lambda: None,
) -> Footer:
    """Write lines (without newlines) to a new file, sync it, and read it back.

    `torn` is asked at the end. Raises OSError, Corrupt.
    """
    with path.open("xb") as file:
        draft = _Draft(file)
        for line in lines:
            draft.add(line)
        footer = draft.end(torn(), replaces)
        file.flush()
        os.fsync(file.fileno())
    if verify(path) != footer:
        raise Corrupt(f"{path} does not read back as it was written")
    return footer


class _Draft:
    """A sealed segment on its way into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._crc = 0
        self._offset = 0  # of the lines that are in frames
        self._lines: list[bytes] = []  # those of the next frame
        self._size = 0
        self._hasher = hashlib.sha256()
        self._frames: list[tuple[int, int]] = []
        self._count = 0
        self._bad: list[tuple[int, int]] = []
        self._facts: list[bytes] = []
        self._lengths: list[int] = []
        self._told = 0  # bytes of the facts
        self._told_from = 0  # the offset of the first of their lines
        self._chunks: list[tuple[bytes, int]] = []

    def add(self, line: bytes) -> None:
        """Append a line."""
        if self._lines and self._size + len(line) >= FRAME:
            self._put_frame()
        self._tell(line)
        self._lines.append(line)
        self._size += len(line) + 1
        self._count += 1

    def end(self, torn: Torn, replaces: Sequence[str]) -> Footer:
        """Write what is left, and the footer."""
        if self._lines:
            self._put_frame()
        if self._facts:
            self._put_facts()
        for chunk, _ in self._chunks:
            self._put(chunk)
        footer = Footer(
            frames=self._frames,
            facts=[(len(chunk), lines) for chunk, lines in self._chunks],
            facts_version=FACTS,
            lines=self._count,
            bytes=self._offset,
            sha256=self._hasher.hexdigest(),
            crc=self._crc,
            torn=torn,
            bad=self._bad,
            replaces=list(replaces),
        )
        self._put(frames.ending(footer, self._at))
        return footer

    def _put_frame(self) -> None:
        self._lines.append(b"")
        data = b"\n".join(self._lines)
        self._hasher.update(data)
        packed = frames.compress(data)
        frame = Frame(self._at + frames.MARK_SIZE, len(packed), self._offset, len(data))
        self._put(frames.mark_of(frame) + packed)
        self._frames.append((len(packed), len(data)))
        self._offset += len(data)
        self._lines = []
        self._size = 0

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._at += len(data)

    def _tell(self, line: bytes) -> None:
        fact = b"null"
        if is_whole(line):
            fact = _fact_of(line)
        else:
            self._bad.append((self._offset + self._size, len(line)))
        self._facts.append(fact)
        self._lengths.append(len(line))
        self._told += len(fact)
        if len(self._facts) == CHUNK or self._told > CHUNK_BYTES:
            self._put_facts()

    def _put_facts(self) -> None:
        chunk = frames.facts_chunk(self._told_from, self._lengths, self._facts)
        self._chunks.append((chunk, len(self._facts)))
        self._told_from += sum(self._lengths) + len(self._lengths)
        self._facts, self._lengths, self._told = [], [], 0


def _fact_of(line: bytes) -> bytes:
    """As JSON; null for a line that is whole, but of no kind that is known here."""
    try:
        fact = facts_of(orjson.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("a line is whole, but no event (%r): %r", error, line[:SHOWN])
        return b"null"
    return orjson.dumps((*fact,))


def verify(path: Path) -> Footer:
    """Read a sealed segment whole. Its footer; raises Corrupt, OSError."""
    with path.open("rb", buffering=0) as file:
        table = frames.table_of(file.fileno())
        footer = table.footer
        if footer is None:
            assert table.gap is not None
            raise Corrupt(f"{path}: {table.gap.message}")
        hasher, crc, unpacker = hashlib.sha256(), 0, frames.Unpacker()
        for index in range(len(table)):
            frame = table[index]
            start = frame.at - frames.MARK_SIZE
            data = os.pread(file.fileno(), frames.MARK_SIZE + frame.size, start)
            crc = zlib.crc32(data, crc)
            hasher.update(unpacker.unpack(data[frames.MARK_SIZE :], frame.length))
        at = table.facts_at
        for size, _ in footer.facts:
            crc = zlib.crc32(os.pread(file.fileno(), size, at), crc)
            at += size
    if hasher.hexdigest() != footer.sha256 or crc != footer.crc:
        raise Corrupt(f"{path} is not what its footer says")
    return footer
