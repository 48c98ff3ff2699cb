"""Append-only JSONL files with one writer each: how the store lies on the shared disk.

Appends from many requests share one fsync (group commit): while a thread writes and syncs one
group, the next group gathers. A writer never opens a file that stood there before it, so the torn
last line of a killed process stays the last line of its file, and readers leave it be.

Called by store.py alone.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cray_agents.errors import StoreError
from cray_agents.runtime import durable

ROLL_BYTES = 256 * 2**20  # a file is left for a new one once it is larger

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a line lies: `length` bytes from `offset`, its newline not counted."""

    path: str
    offset: int
    length: int


Group = list[tuple[Sequence[bytes], "asyncio.Future[list[Place]]"]]


class SegmentWriter:
    """Appends lines to files `<name>-<part>.jsonl` that nobody else writes. One event loop."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self._part = -1
        self._file: int | None = None
        self._path = ""
        self._offset = 0
        self._waiting: Group = []
        self._writing: Group = []
        self._busy = False  # a group is being written, or about to be
        # its own thread: a dataset that fills the default pool must not delay a commit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segment")

    def owns(self, path: Path) -> bool:
        """Whether a file in the directory is this writer's."""
        return path.name.startswith(f"{self.name}-")

    def submit(self, lines: Sequence[bytes]) -> "asyncio.Future[list[Place]]":
        """Queue lines (without newlines); the future is done when they are on the disk.

        It fails with StoreError if they could not be written.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Place]] = loop.create_future()
        self._waiting.append((lines, done))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start)  # not at once: others of this moment join the group
        return done

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and close the file."""
        while self._busy:
            await asyncio.wait([done for _, done in [*self._writing, *self._waiting]])
            await asyncio.sleep(0)
        self._thread.shutdown()
        self._close_file()

    def _start(self) -> None:
        self._writing, self._waiting = self._waiting, []
        lines = [line for some, _ in self._writing for line in some]
        self._thread.submit(self._commit, lines, asyncio.get_running_loop())

    def _commit(self, lines: list[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        try:
            outcome: list[Place] | OSError = self._write(lines)
        except OSError as error:
            outcome = error
        loop.call_soon_threadsafe(self._committed, outcome)

    def _committed(self, outcome: list[Place] | OSError) -> None:
        group, self._writing = self._writing, []
        if isinstance(outcome, OSError):
            self._fail(group, outcome)
        else:
            start = 0
            for some, done in group:
                done.set_result(outcome[start : start + len(some)])
                start += len(some)
        if self._waiting:
            self._start()
        else:
            self._busy = False

    def _fail(
        self,
        group: "Group",
        error: OSError,
    ) -> None:
        """Tell every waiter, and leave the file: it may end in half a line."""
        self._close_file()
        message = f"cannot write to {self._path or self.directory}: {error.strerror or error}"
        log.error(message)
        for _, done in group:
            done.set_exception(StoreError(message))

    def _write(self, lines: list[bytes]) -> list[Place]:
        if self._file is None or self._offset > ROLL_BYTES:
            self._open_next()
        assert self._file is not None
        places = []
        offset = self._offset
        for line in lines:
            places.append(Place(self._path, offset, len(line)))
            offset += len(line) + 1
        rest = memoryview(b"\n".join(lines) + b"\n")
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fdatasync(self._file)
        self._offset = offset
        return places

    def _open_next(self) -> None:
        self._close_file()
        self._part += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = str(self.directory / f"{self.name}-{self._part:04d}.jsonl")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        self._offset = 0
        durable.sync(self.directory)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_lines(path: Path, offset: int) -> Iterator[tuple[Place, bytes]]:
    """The whole lines of a segment from a byte offset on; a line without its newline is not one."""
    name = str(path)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield Place(name, offset, len(line) - 1), line[:-1]
            offset += len(line)


def fetch(places: Sequence[Place]) -> list[bytes]:
    """The lines at some places, in their order; each file is opened once."""
    lines: dict[Place, bytes] = {}
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
