"""Segment writer: append lines in groups, roll to new files, and seal finished ones.

A process that pauses for long may be taken for dead, and another then seals its open segment
(repair.py). Lines appended to such a file must not be acknowledged. So the writer

- opens a new file if its last append was more than IDLE ago. IDLE is longer than the minute for
  which a network file system may cache the file of a path, and shorter than the hour after which a
  segment counts as left;
- checks after write and sync if its path still names its file. If not, it writes the group again to
  a new file. (A doubled line is one event.)

Called by store.py. Read next: runtime/disk/group_commit.py, sealed.py.
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
from cray_agents.runtime.disk.group_commit import CommitCounts, GroupCommit
from cray_agents.runtime.disk.journal import LineFile
from cray_agents.runtime.store.segments.line_format import FORMS, OPEN, Fact, LinePlace, Placed
from cray_agents.runtime.store.segments.sealed import seal

ROLL_BYTES = 64 * 2**20  # a larger file is left for a new one
IDLE = 600.0  # seconds


log = logging.getLogger(__name__)


class Payload(NamedTuple):
    """Lines (without newlines) of one `submit`, with one fact a line."""

    lines: Sequence[bytes]
    facts: Sequence[Fact]


class SegmentWriter:
    """The writer of segments `<name>-<part>`, which belong to this process and one event loop.

    `name` is new for each process. `on_written` is called in the writer's thread with the written
    events, after the waiters have their answers; its errors are logged. A file is left after `roll`
    bytes, or `idle` seconds.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        on_written: Callable[[list[Placed]], None] | None = None,
        *,
        roll: int = ROLL_BYTES,
        idle: float = IDLE,
    ) -> None:
        self._directory = directory
        self._name = name
        self._on_written = on_written
        self._roll = roll
        self._idle = idle
        self._part = 0
        self._file: LineFile | None = None
        self._stem = ""
        self._appended = 0.0  # start of the last append, by a clock that also counts suspended time
        self._own_stems: set[str] = set()  # being written, or not sealed yet
        self._commits = GroupCommit(self._write, self._on_error, self._after_commit)
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="seal")

    @property
    def counts(self) -> CommitCounts:
        """Groups and payloads on the disk so far, and the seconds of that."""
        return self._commits.counts

    def holds(self, stem: str) -> bool:
        """Tell whether this writer writes a segment or is about to seal it."""
        return stem in self._own_stems

    def submit(
        self, lines: Sequence[bytes], facts: Sequence[Fact]
    ) -> "asyncio.Future[list[LinePlace]]":
        """Queue lines (without newlines), with one fact a line.

        The future is done when they are on the disk, or has a StoreError.
        """
        return self._commits.submit(Payload(lines, facts))

    async def close(self) -> None:
        """Wait until everything queued is on the disk and indexed, and all files are sealed."""
        await self._commits.close()
        self._leave()
        await asyncio.to_thread(self._sealing.shutdown)

    def _write(self, group: list[Payload]) -> list[list[LinePlace]]:
        """Append a group of payloads. This and all below run in the thread of the commits."""
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
            if file.is_at_path():
                return spans
            log.warning(
                "%s was taken for a dead writer's: its last %d lines are written to a new file",
                file.path,
                len(lines),
            )
            self._leave()

    def _on_error(self, error: OSError) -> StoreError:
        """Leave the file, which may end in half a line, and return the error to raise."""
        path = self._file.path if self._file else self._directory
        self._leave()
        return StoreError.of(f"cannot write to {path}", error)

    def _after_commit(self, group: list[Payload], places: list[list[LinePlace]]) -> None:
        facts = chain.from_iterable(payload.facts for payload in group)
        placed = [Placed(*both) for both in zip(facts, chain.from_iterable(places), strict=True)]
        if self._on_written is not None and placed:
            self._on_written(placed)

    def _open_next(self) -> LineFile:
        while True:
            stem = f"{self._name}-{self._part:04d}"
            self._part += 1
            if not any((self._directory / f"{stem}{form}").exists() for form in FORMS):
                break
        self._own_stems.add(stem)
        try:
            self._file = LineFile(self._directory / f"{stem}{OPEN}")
        except OSError:
            self._own_stems.discard(stem)
            raise
        self._stem = stem
        return self._file

    def _leave(self) -> None:
        """Close the file, and seal it in another thread so that commits go on."""
        if self._file is not None:
            file, self._file = self._file, None
            if file.close():
                self._sealing.submit(self._seal, file.path, self._stem)
            else:
                self._own_stems.discard(self._stem)

    def _seal(self, path: Path, stem: str) -> None:
        try:
            seal(path)
        except StoreError as error:
            log.error("%s stays open, to be sealed another time: %s", path, error)
        finally:
            self._own_stems.discard(stem)
