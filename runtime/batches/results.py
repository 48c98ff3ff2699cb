"""The results of a chunk, as they come: lines in files of one writer each, and where they lie.

Written by worker.py; read by chunks.py.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import StoreError
from cray_agents.runtime.disk.group_commit import GroupCommit, LineFile

ROLL_BYTES = 256 * 2**20  # a file is left for a new one once it is larger


class ResultPlace(NamedTuple):
    """Where a line lies: `length` bytes from `offset`, its newline not counted."""

    path: str
    offset: int
    length: int


class ResultWriter:
    """Appends lines to files `<name>-<part>.jsonl` that nobody else writes. One event loop."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._part = 0
        self._file: LineFile | None = None
        self._commits: GroupCommit[bytes, ResultPlace] = GroupCommit(self._write, self._failed)

    def submit(self, line: bytes) -> "asyncio.Future[ResultPlace]":
        """Queue a line (without newline); the future is done when it is on the disk.

        It fails with StoreError if it could not be written.
        """
        return self._commits.submit(line)

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and close the file."""
        await self._commits.close()
        self._leave()

    def _write(self, lines: list[bytes]) -> list[ResultPlace]:
        if self._file is not None and self._file.size > ROLL_BYTES:
            self._leave()
        if self._file is None:
            path = self._directory / f"{self._name}-{self._part:04d}.jsonl"
            self._part += 1
            self._file = LineFile(path)
        name = str(self._file.path)
        return [ResultPlace(name, *span) for span in self._file.append(lines)]

    def _failed(self, error: OSError) -> StoreError:
        """Leave the file: it may end in half a line."""
        where = self._file.path if self._file else self._directory
        self._leave()
        return StoreError.of(f"cannot write to {where}", error)

    def _leave(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path, offset: int) -> Iterator[tuple[ResultPlace, bytes]]:
    """The whole lines of a file from a byte offset on; a line without its newline is not one."""
    name = str(path)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield ResultPlace(name, offset, len(line) - 1), line[:-1]
            offset += len(line)


def fetch(places: Sequence[ResultPlace]) -> list[bytes]:
    """The lines at some places, in their order; each file is opened once."""
    lines: dict[ResultPlace, bytes] = {}
    handles: dict[str, int] = {}
    try:
        for place in places:
            handle = handles.get(place.path)
            if handle is None:
                handle = handles[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            lines[place] = os.pread(handle, place.length, place.offset)
    except OSError as error:
        raise StoreError(f"cannot read {place.path}: {error.strerror or error}") from error
    finally:
        for handle in handles.values():
            os.close(handle)
    return [lines[place] for place in places]
