"""Index thread: add written events to the index in the background, so that commits do not wait.

A transaction costs as much as a model call's whole way through the gateway. So events gather for a
moment first, unless somebody waits for them. Called by store.py.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.line_format import Placed

GATHER = 0.1  # seconds
BATCH = 2_000  # events of a transaction, about
MAX_BEHIND = 20_000  # events that may wait; then commits wait too

log = logging.getLogger(__name__)


class Indexing:
    """A queue of events for the index. `done`, run in the thread, gets each batch of them."""

    def __init__(self, index: Index, done: Callable[[list[Placed]], None]) -> None:
        self._index = index
        self._done = done
        self._waiting: deque[list[Placed]] = deque()
        self._behind = 0  # events
        self._taken = 0  # events, ever
        self._busy = False
        self._hurry = 0  # callers that wait for the gathered events
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    @property
    def behind(self) -> int:
        """Events that are on the disk and not in the index yet."""
        return self._behind

    def submit(self, placed: list[Placed]) -> None:
        """Queue events of one segment, in its order. Wait while the index is too far behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._behind < MAX_BEHIND)
            self._waiting.append(placed)
            self._behind += len(placed)
            if not self._busy:
                self._start_next()

    def wait_for(self, count: int) -> None:
        """Wait until `count` events, counted from the start, are in the index."""
        if self._taken < count:
            self._wait_until(lambda: self._taken >= count)

    def close(self) -> None:
        """Wait until everything queued is in the index, and end the thread."""
        self._wait_until(lambda: not self._busy)
        self._thread.shutdown()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            self._changed.wait_for(condition)
            self._hurry -= 1

    def _work(self) -> None:
        """Run one transaction, then start the next one, also after an error."""
        placed = self._next()
        try:
            self._take_in(placed)
        except OSError as error:  # StoreError is one; it is read from the segments later
            log.warning("not indexed yet: %s", error)
        finally:
            self._done(placed)
            with self._changed:
                self._taken += len(placed)
                self._behind -= len(placed)
                self._start_next()
                self._changed.notify_all()

    def _start_next(self) -> None:
        """Start a transaction if events wait. Call with the lock held."""
        self._busy = bool(self._waiting)
        if self._busy:
            self._thread.submit(self._work).add_done_callback(_report)

    def _next(self) -> list[Placed]:
        """Take groups of one segment from the queue, up to about BATCH events."""
        with self._changed:
            self._changed.wait_for(lambda: self._hurry or self._behind >= BATCH, GATHER)
            placed = self._waiting.popleft()
            segment = placed[0].place.segment
            while (
                self._waiting
                and len(placed) < BATCH
                and self._waiting[0][0].place.segment == segment
            ):
                placed = placed + self._waiting.popleft()
            return placed

    def _take_in(self, placed: list[Placed]) -> None:
        first, last = placed[0].place, placed[-1].place
        end = last.offset + last.length + 1
        if self._index.add(first.segment, first.offset, end, placed) < 0:
            log.info("the index is behind in %s: it will be read on", first.segment)


def _report(work: "Future[None]") -> None:
    """Log an unexpected error of the thread, for nobody waits for its future."""
    if (error := work.exception()) is not None:
        log.error("not indexed: %r", error, exc_info=error)
