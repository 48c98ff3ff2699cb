"""Drafts: write the file of a sealed segment line by line, and verify it by reading it whole.

Memory holds one frame of lines, and the compressed facts of all. For the file's layout see
frames.py. Called by sealed.py, which publishes the file.
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
from cray_agents.runtime.store.segments.line_format import QUOTED, parse_line

FRAME = 64 * 2**10  # bytes of lines in a frame; a longer line has its own frame
CHUNK = 5000  # lines whose facts are in one chunk
CHUNK_BYTES = 4 * 2**20  # of facts in a chunk, at most

log = logging.getLogger(__name__)


Torn = tuple[int, int] | None


def write(
    path: Path,
    lines: Iterable[bytes],
    replaces: Sequence[str] = (),
    torn: Callable[[], Torn] = lambda: None,
) -> Footer:
    """Write lines (without newlines) to a new file, sync it, and read it back.

    `torn` is called after the last line. Raises OSError, Corrupt.
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
    """A sealed segment that is being written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._crc = 0
        self._offset = 0  # bytes of the lines already in frames
        self._lines: list[bytes] = []  # of the next frame
        self._size = 0
        self._hasher = hashlib.sha256()
        self._frames: list[tuple[int, int]] = []
        self._count = 0
        self._bad: list[tuple[int, int]] = []
        self._facts: list[bytes] = []
        self._lengths: list[int] = []
        self._facts_size = 0  # bytes of the facts
        self._facts_offset = 0  # offset of their first line
        self._chunks: list[tuple[bytes, int]] = []

    def add(self, line: bytes) -> None:
        """Append a line."""
        if self._lines and self._size + len(line) >= FRAME:
            self._put_frame()
        self._add_fact(line)
        self._lines.append(line)
        self._size += len(line) + 1
        self._count += 1

    def end(self, torn: Torn, replaces: Sequence[str]) -> Footer:
        """Write the remaining frame and facts, then the footer."""
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
        self._put(frames.encode_footer(footer, self._at))
        return footer

    def _put_frame(self) -> None:
        self._lines.append(b"")
        data = b"\n".join(self._lines)
        self._hasher.update(data)
        packed = frames.compress(data)
        frame = Frame(self._at + frames.MARK_SIZE, len(packed), self._offset, len(data))
        self._put(frames.encode_mark(frame) + packed)
        self._frames.append((len(packed), len(data)))
        self._offset += len(data)
        self._lines = []
        self._size = 0

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._at += len(data)

    def _add_fact(self, line: bytes) -> None:
        fact = b"null"
        if is_whole(line):
            fact = _fact_of(line)
        else:
            self._bad.append((self._offset + self._size, len(line)))
        self._facts.append(fact)
        self._lengths.append(len(line))
        self._facts_size += len(fact)
        if len(self._facts) == CHUNK or self._facts_size > CHUNK_BYTES:
            self._put_facts()

    def _put_facts(self) -> None:
        chunk = frames.encode_facts(self._facts_offset, self._lengths, self._facts)
        self._chunks.append((chunk, len(self._facts)))
        self._facts_offset += sum(self._lengths) + len(self._lengths)
        self._facts, self._lengths, self._facts_size = [], [], 0


def _fact_of(line: bytes) -> bytes:
    """Return the facts of a line as JSON; null for a whole line that is not a known event."""
    try:
        fact = facts_of(parse_line(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("a line is whole, but no event (%r): %r", error, line[:QUOTED])
        return b"null"
    return orjson.dumps((*fact,))


def verify(path: Path) -> Footer:
    """Read a sealed segment whole and return its footer. Raises Corrupt, OSError."""
    with path.open("rb", buffering=0) as file:
        table = frames.read_table(file.fileno())
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
