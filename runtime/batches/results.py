"""Result lines of a chunk: append them to files of one writer each, and read them back.

Written by worker.py; read by chunks.py.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import StoreError
from cray_agents.runtime.disk.group_commit import GroupCommit, LineFile

ROLL_BYTES = 256 * 2**20  # a larger file is closed, and a new one is begun


class ResultPlace(NamedTuple):
    """The place of a line in a file: `length` bytes from `offset`, without its newline."""

    path: str
    offset: int
    length: int


class ResultWriter:
    """A writer of lines to its own files `<name>-<part>.jsonl`. Use it in one event loop."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._part = 0
        self._file: LineFile | None = None
        self._commits: GroupCommit[bytes, ResultPlace] = GroupCommit(
            self._write, self._handle_failure
        )

    def submit(self, line: bytes) -> "asyncio.Future[ResultPlace]":
        """Queue a line (without newline). The future is done when the line is on the disk.

        The future raises StoreError if the line could not be written.
        """
        return self._commits.submit(line)

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and close the file."""
        await self._commits.close()
        self._close_file()

    def _write(self, lines: list[bytes]) -> list[ResultPlace]:
        if self._file is not None and self._file.size > ROLL_BYTES:
            self._close_file()
        if self._file is None:
            path = self._directory / f"{self._name}-{self._part:04d}.jsonl"
            self._part += 1
            self._file = LineFile(path)
        name = str(self._file.path)
        return [ResultPlace(name, *span) for span in self._file.append(lines)]

    def _handle_failure(self, error: OSError) -> StoreError:
        """Close the file, since it may end in a partial line. Return the error to raise."""
        path = self._file.path if self._file else self._directory
        self._close_file()
        return StoreError.of(f"cannot write to {path}", error)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path, offset: int) -> Iterator[tuple[ResultPlace, bytes]]:
    """Yield the lines of a file from a byte offset on, except a last line without a newline."""
    name = str(path)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield ResultPlace(name, offset, len(line) - 1), line[:-1]
            offset += len(line)


def fetch(places: Sequence[ResultPlace]) -> list[bytes]:
    """Read the lines at some places, in the given order. Opens each file once."""
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
