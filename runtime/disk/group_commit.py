"""Group commit: appends from many requests share one write and one fsync.

While a thread writes and syncs one group, the next group gathers. The store's segments
(store/segments/writer.py) and the results of batches (batches/results.py) are written so: each says
what its files are; how a group comes together and who is told what is here.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from cray_agents.errors import StoreError
from cray_agents.runtime.disk import durable

Item = TypeVar("Item")
Done = TypeVar("Done")

log = logging.getLogger(__name__)


class GroupCommit(Generic[Item, Done]):
    """Writes items in groups, in a thread of its own. Belongs to one event loop.

    `write`, in the thread: puts a group on the disk and answers for each item, or raises OSError.
    `failed`, in the thread: what the waiters of a group are told that `write` failed on.
    `then`, in the thread, once the waiters are told: what is done with a group before the next one
    is written. An error of it is logged, no more.
    """

    def __init__(
        self,
        write: Callable[[list[Item]], list[Done]],
        failed: Callable[[OSError], StoreError],
        then: Callable[[list[Item], list[Done]], None] | None = None,
    ) -> None:
        self._write = write
        self._failed = failed
        self._then = then
        self._waiting: list[tuple[Item, asyncio.Future[Done]]] = []
        self._writing: list[tuple[Item, asyncio.Future[Done]]] = []
        self._busy = False  # a group is being written, or about to be
        self._closed = False
        # its own thread: a dataset that fills the default pool must not delay a commit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def submit(self, item: Item) -> "asyncio.Future[Done]":
        """Queue an item; the future is done when it is on the disk, or fails with StoreError.

        Raises StoreError once this is closed.
        """
        if self._closed:
            raise StoreError("nothing is written any more: the files are closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Done] = loop.create_future()
        self._waiting.append((item, done))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start)  # not at once: others of this moment join the group
        return done

    async def close(self) -> None:
        """Wait until everything queued is on the disk, and `then` is through with it."""
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
        """In the thread."""
        outcome: list[Done] | StoreError = StoreError("the write failed: see the platform's log")
        try:
            outcome = self._write(items)
        except OSError as error:
            outcome = self._failed(error)
            log.error("%s", outcome)
        finally:  # nobody waits forever, whatever it was
            loop.call_soon_threadsafe(self._committed, outcome)
        if self._then is not None and not isinstance(outcome, StoreError):
            self._then(items, outcome)

    def _committed(self, outcome: list[Done] | StoreError) -> None:
        group, self._writing = self._writing, []
        for number, (_, done) in enumerate(group):
            if done.cancelled():
                continue
            if isinstance(outcome, StoreError):
                done.set_exception(type(outcome)(*outcome.args))  # one each: they gather tracebacks
            else:
                done.set_result(outcome[number])
        if self._waiting:
            self._start()
        else:
            self._busy = False


class LineFile:
    """A file of lines that this process alone appends to, and that was not there before.

    So the torn last line of a killed process stays the last line of its file. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self.path = path
        self.size = 0
        self._file = os.open(path, flags, 0o644)
        self._inode = os.fstat(self._file).st_ino
        try:
            durable.sync(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, lines: Sequence[bytes]) -> list[tuple[int, int]]:
        """Put lines (without newlines) on the disk. Returns where: (offset, length) in bytes.

        Raises OSError; then no half a line is left, if that can be helped.
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
        except OSError:  # such as a full disk: whoever reads has seen whole lines at most
            os.ftruncate(self._file, self.size + text.rfind(b"\n", 0, written) + 1)
            raise
        os.fdatasync(self._file)
        self.size = offset
        return spans

    def stands(self) -> bool:
        """Whether the path still names this file: nobody has renamed or removed it."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> bool:
        """Close the file; whether it stays, as it is. One that nothing came into is removed."""
        try:
            stays = os.fstat(self._file).st_size > 0
            if not stays and self.stands():
                self.path.unlink()
        finally:
            os.close(self._file)
        return stays


def _log_error(committed: "Future[None]") -> None:
    error = committed.exception()
    if error is not None:
        log.error("after a commit: %r", error, exc_info=error)
