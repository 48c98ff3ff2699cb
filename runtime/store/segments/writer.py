"""The one writer of a process's segments: appends in groups, rolls, and seals what it leaves.

A process that stands still for long may be taken for dead, and its open segment sealed by another
(orphans.py). So that nothing is acknowledged that went into such a file, the writer

- never appends to a file it last appended to more than IDLE ago, but opens the next: that is more
  than the minute for which a network file system may answer from its memory what a path names, and
  less than the hour after which a segment counts as left;
- looks, after write and sync, whether its path still names its file; if not, the group is written
  again to a new file. (Lines that are there twice are one event.)

Called by store.py. Read next: ../appending.py (group commit), sealed.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import StoreError
from cray_agents.runtime.disk.group_commit import GroupCommit, LineFile
from cray_agents.runtime.store.segments.facts import Fact
from cray_agents.runtime.store.segments.line_format import FORMS, OPEN, LinePlace, Placed
from cray_agents.runtime.store.segments.sealed import seal

ROLL_BYTES = 64 * 2**20  # a file is left for a new one once it is larger
IDLE = 600.0  # seconds


log = logging.getLogger(__name__)


class Payload(NamedTuple):
    """Lines (without newlines) and what is told of them, one fact a line."""

    lines: Sequence[bytes]
    facts: Sequence[Fact]


class SegmentWriter:
    """Appends lines to segments `<name>-<part>` that nobody else writes. One event loop.

    `name` is new for each process. `indexed` is called in the writer's thread with what is on the
    disk, after those who wait for it are told; an error of it is logged. `roll`: bytes of a file,
    `idle`: seconds, after which it is left.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        indexed: Callable[[list[Placed]], None] | None = None,
        *,
        roll: int = ROLL_BYTES,
        idle: float = IDLE,
    ) -> None:
        self._directory = directory
        self._name = name
        self._indexed = indexed
        self._roll = roll
        self._idle = idle
        self._part = 0
        self._file: LineFile | None = None
        self._stem = ""
        self._appended = 0.0  # when the last append began, by the clock that also counts sleep
        self._held: set[str] = set()
        self._commits = GroupCommit(self._write, self._failed, self._then)
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="seal")

    def holds(self, stem: str) -> bool:
        """Whether a segment is being written, or about to be sealed, by this writer."""
        return stem in self._held

    def submit(
        self, lines: Sequence[bytes], facts: Sequence[Fact]
    ) -> "asyncio.Future[list[LinePlace]]":
        """Queue lines (without newlines), and what is told of them, one fact a line.

        The future is done when they are on the disk; it fails with StoreError if they could not
        be written.
        """
        return self._commits.submit(Payload(lines, facts))

    async def close(self) -> None:
        """Wait until everything queued is on the disk and indexed, and all files are sealed."""
        await self._commits.close()
        self._leave()
        await asyncio.to_thread(self._sealing.shutdown)

    def _write(self, group: list[Payload]) -> list[list[LinePlace]]:
        """In the thread of the commits, as all below."""
        lines = [line for payload in group for line in payload.lines]
        spans = iter(self._append(lines))
        return [[LinePlace(self._stem, *next(spans)) for _ in payload.lines] for payload in group]

    def _append(self, lines: list[bytes]) -> list[tuple[int, int]]:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._file and (self._file.size > self._roll or now - self._appended > self._idle):
            self._leave()
        while True:
            file = self._file or self._open_next()
            self._appended = time.clock_gettime(time.CLOCK_BOOTTIME)
            spans = file.append(lines)
            if file.stands():
                return spans
            log.warning("%s was taken for left: its last %d lines go on", file.path, len(lines))
            self._leave()

    def _failed(self, error: OSError) -> StoreError:
        """Leave the file: it may end in half a line."""
        where = self._file.path if self._file else self._directory
        self._leave()
        return StoreError.of(f"cannot write to {where}", error)

    def _then(self, group: list[Payload], places: list[list[LinePlace]]) -> None:
        facts = chain.from_iterable(payload.facts for payload in group)
        placed = [Placed(*both) for both in zip(facts, chain.from_iterable(places), strict=True)]
        if self._indexed is not None and placed:
            self._indexed(placed)

    def _open_next(self) -> LineFile:
        while True:
            stem = f"{self._name}-{self._part:04d}"
            self._part += 1
            if not any((self._directory / f"{stem}{form}").exists() for form in FORMS):
                break
        self._held.add(stem)
        try:
            self._file = LineFile(self._directory / f"{stem}{OPEN}")
        except OSError:
            self._held.discard(stem)
            raise
        self._stem = stem
        return self._file

    def _leave(self) -> None:
        """Close the file and have it sealed, by a thread of its own: commits go on."""
        if self._file is not None:
            file, self._file = self._file, None
            if file.close():
                self._sealing.submit(self._seal, file.path, self._stem)
            else:
                self._held.discard(self._stem)

    def _seal(self, path: Path, stem: str) -> None:
        try:
            seal(path)
        except StoreError as error:
            log.error("%s stays open, to be sealed another time: %s", path, error)
        finally:
            self._held.discard(stem)
