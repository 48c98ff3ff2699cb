"""Group commit: appends from many requests share one write and one fsync.

While a thread writes and syncs one group, the next group gathers. Used by the store's segments
(runtime/store/segments/writer.py) and by batch results (runtime/batches/results.py). They choose
the files; this module forms the groups and resolves their futures.
"""

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cray_agents.errors import StoreError
from cray_agents.runtime.disk import durable

Item = TypeVar("Item")
Done = TypeVar("Done")

log = logging.getLogger(__name__)


class CommitCounts(NamedTuple):
    """Groups and items that were put on the disk so far, and the seconds of writing and syncing."""

    groups: int = 0
    items: int = 0
    seconds: float = 0.0


class GroupCommit(Generic[Item, Done]):
    """A writer of items in groups, with a thread of its own. Belongs to one event loop.

    All three functions run in the thread.
    `write` puts a group on the disk and returns one answer for each item, or raises OSError.
    `make_error` turns that OSError into the error that the group's waiters get.
    `then` runs after the waiters have their answers, and before the next group is written. Its
    errors are only logged.
    """

    def __init__(
        self,
        write: Callable[[list[Item]], list[Done]],
        make_error: Callable[[OSError], StoreError],
        then: Callable[[list[Item], list[Done]], None] | None = None,
    ) -> None:
        self._write = write
        self._make_error = make_error
        self._then = then
        self._waiting: list[tuple[Item, asyncio.Future[Done]]] = []
        self._writing: list[tuple[Item, asyncio.Future[Done]]] = []
        self._busy = False  # a group is being written, or about to be
        self._closed = False
        self.counts = CommitCounts()
        # its own thread, since a dataset may fill the default pool and would delay commits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def submit(self, item: Item) -> "asyncio.Future[Done]":
        """Queue an item. The future is done once the item is on the disk, or has a StoreError.

        Raises StoreError after `close`.
        """
        if self._closed:
            raise StoreError("nothing is written any more: the files are closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Done] = loop.create_future()
        self._waiting.append((item, done))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start)  # later, so that items of this moment join the group
        return done

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and `then` has run."""
        while self._busy:
            await asyncio.wait([done for _, done in [*self._writing, *self._waiting]])
            await asyncio.sleep(0)
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown)

    def _start(self) -> None:
        self._writing, self._waiting = self._waiting, []
        items = [item for item, _ in self._writing]
        loop = asyncio.get_running_loop()
        self._thread.submit(self._commit, items, loop).add_done_callback(_log_error)

    def _commit(self, items: list[Item], loop: asyncio.AbstractEventLoop) -> None:
        """Write one group; runs in the thread."""
        outcome: list[Done] | StoreError = StoreError("the write failed: see the platform's log")
        begun = time.perf_counter()
        try:
            outcome = self._write(items)
            groups, count, seconds = self.counts
            seconds += time.perf_counter() - begun
            self.counts = CommitCounts(groups + 1, count + len(items), seconds)
        except OSError as error:
            outcome = self._make_error(error)
            log.error("%s", outcome)
        finally:  # whatever the error, waiters must get an answer
            loop.call_soon_threadsafe(self._committed, outcome)
        if self._then is not None and not isinstance(outcome, StoreError):
            self._then(items, outcome)

    def _committed(self, outcome: list[Done] | StoreError) -> None:
        group, self._writing = self._writing, []
        for number, (_, done) in enumerate(group):
            if done.cancelled():
                continue
            if isinstance(outcome, StoreError):
                # one exception each: tracebacks add up in an exception
                done.set_exception(type(outcome)(*outcome.args))
            else:
                done.set_result(outcome[number])
        if self._waiting:
            self._start()
        else:
            self._busy = False


class LineFile:
    """A new file of lines that only this process appends to.

    A killed process thus leaves its torn line at the end of a file. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self.path = path
        self.size = 0
        self._file = os.open(path, flags, 0o666)  # less the umask
        self._close = weakref.finalize(self, os.close, self._file)
        self._inode = os.fstat(self._file).st_ino
        try:
            durable.sync(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> list[tuple[int, int]]:
        """Put lines (without newlines) on the disk. Return their (offset, length) in bytes.

        Raises OSError, after cutting off a half-written line if possible.
        """
        spans, offset = [], self.size
        for line in lines:
            spans.append((offset, len(line)))
            offset += len(line) + 1
        text = b"\n".join([*lines, b""])
        written = 0
        try:
            while written < len(text):
                written += os.write(self._file, memoryview(text)[written:])
        except OSError:  # such as a full disk; readers use whole lines only
            os.ftruncate(self._file, self.size + text.rfind(b"\n", 0, written) + 1)
            raise
        os.fdatasync(self._file)
        self.size = offset
        return spans

    def is_at_path(self) -> bool:
        """Tell whether the path still names this file: nobody renamed or removed it."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> bool:
        """Close the file and remove it if it is empty. Return whether it stays."""
        try:
            stays = os.fstat(self._file).st_size > 0
            if not stays and self.is_at_path():
                self.path.unlink()
        finally:
            self._close()
        return stays


def _log_error(committed: "Future[None]") -> None:
    error = committed.exception()
    if error is not None:
        log.error("after a commit: %r", error, exc_info=error)
