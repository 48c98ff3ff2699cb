"""What was written goes into the index from here, in a thread of its own: commits do not wait.

A transaction costs as much as a model call's whole way through the gateway. So what was written
gathers here for a moment, unless somebody waits for it. Called by store.py.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.segments.line_format import Placed

GATHER = 0.1  # seconds
MOST = 2_000  # events of a transaction
BEHIND = 20_000  # events: from then on commits do wait

log = logging.getLogger(__name__)


class Indexing:
    """The way into the index. `done` is told, in the thread, what is in it."""

    def __init__(self, index: Index, done: Callable[[list[Placed]], None]) -> None:
        self._index = index
        self._told = done
        self._waiting: deque[list[Placed]] = deque()
        self._behind = 0  # events
        self._taken = 0  # events, ever
        self._busy = False
        self._hurry = 0  # how many wait for what has gathered
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="index")

    def submit(self, placed: list[Placed]) -> None:
        """Of one segment, in its order. Waits while the index is too far behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._behind < BEHIND)
            self._waiting.append(placed)
            self._behind += len(placed)
            if not self._busy:
                self._go_on()

    def settle(self, count: int) -> None:
        """Wait until so many events, of all there ever were, are in the index."""
        if self._taken < count:
            self._wait_until(lambda: self._taken >= count)

    def close(self) -> None:
        """Wait for all of it."""
        self._wait_until(lambda: not self._busy)
        self._thread.shutdown()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            self._changed.wait_for(condition)
            self._hurry -= 1

    def _work(self) -> None:
        """One transaction. Whatever comes of it, the next one's turn comes."""
        placed = self._next()
        try:
            self._take_in(placed)
        except OSError as error:  # StoreError is one; it is read from the segments later
            log.warning("not indexed yet: %s", error)
        finally:
            self._told(placed)
            with self._changed:
                self._taken += len(placed)
                self._behind -= len(placed)
                self._go_on()
                self._changed.notify_all()

    def _go_on(self) -> None:
        """Under the lock."""
        self._busy = bool(self._waiting)
        if self._busy:
            self._thread.submit(self._work).add_done_callback(_report)

    def _next(self) -> list[Placed]:
        """The groups that wait, as far as they are of one segment and not too many."""
        with self._changed:
            self._changed.wait_for(lambda: self._hurry or self._behind >= MOST, GATHER)
            placed = self._waiting.popleft()
            segment = placed[0].place.segment
            while (
                self._waiting
                and len(placed) < MOST
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
    """What nobody expected is told, since nobody waits for it."""
    if (error := work.exception()) is not None:
        log.error("not indexed: %r", error, exc_info=error)
