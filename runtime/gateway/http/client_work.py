"""Client work: what may take long for a client, in threads, with a fair share for each API key.

The event loop serves everybody. So whatever grows with what a client sends or asks for is done
here, beyond a few bytes: a large body is parsed, a list of runs read and written. AT_ONCE works
run, taken from the keys in turn, so that a key with a thousand waiting works delays another key's
one by a piece. Between its pieces work gives way to others' (disk/turns.py), and ends when its
client has left. Within a key short works come first, and what has begun before what has not.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from cray_agents.runtime.disk.turns import TURN
from cray_agents.runtime.gateway.http.auth import caller_of

if TYPE_CHECKING:
    from cray_agents.runtime.gateway.model_calls.admission import Ticket

AT_ONCE = 2  # works that run: more only take the interpreter from the event loop
SLICE = 0.05  # seconds after which a work gives way
MOST_BEGUN = 64  # works that run or have given way; with so many none gives way
SHORT, BEGUN, LONG = range(3)  # the order of a key's works
WATCH_AFTER = 0.05  # seconds of work after which the client's disconnect is watched for

T = TypeVar("T")


class ClientWork:
    """The works of all clients. For use on one event loop."""

    def __init__(self) -> None:
        #: Those that wait for their turn, by key, in heaps; the next key first.
        self._waiting: OrderedDict[str, list[tuple[int, int, asyncio.Future[None]]]] = OrderedDict()
        self._places = count()
        self._running = 0
        self._begun = 0
        self._threads = ThreadPoolExecutor(MOST_BEGUN, "client-work")

    async def run(
        self, key: str, work: Callable[[], T], *, long: bool = False, ends: bool = True
    ) -> T:
        """Return what `work` returns, which a thread calls when it is the key's turn.

        `long`: the key's other works need not wait for it. `ends`: with this, if it has begun.
        """
        await self._wait(key, LONG if long else SHORT)
        loop, left, context = asyncio.get_running_loop(), threading.Event(), copy_context()
        context.run(TURN.set, self._turn(loop, key, left))
        self._begun += 1
        running = self._threads.submit(context.run, work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end))
        try:
            return await asyncio.wrap_future(running)
        finally:
            if ends:
                left.set()

    async def close(self) -> None:
        """Wait for the works that run; the clients have left."""
        await asyncio.to_thread(self._threads.shutdown)

    def _turn(
        self, loop: asyncio.AbstractEventLoop, key: str, left: threading.Event
    ) -> Callable[[], bool]:
        """Return what a work calls between its pieces, in its thread."""
        since = time.monotonic()

        def turn() -> bool:
            nonlocal since
            late = time.monotonic() - since > SLICE
            if late and self._waiting and self._begun < MOST_BEGUN and not left.is_set():
                again = threading.Event()
                loop.call_soon_threadsafe(self._give_way, key, again)
                again.wait()
                since = time.monotonic()
            return left.is_set()

        return turn

    async def _wait(self, key: str, order: int) -> None:
        place = self._queue(key, order)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came just before
                self._running -= 1
                self._grant()
            raise

    def _queue(self, key: str, order: int) -> asyncio.Future[None]:
        place = asyncio.get_running_loop().create_future()
        heappush(self._waiting.setdefault(key, []), (order, next(self._places), place))
        return place

    def _give_way(self, key: str, again: threading.Event) -> None:
        self._queue(key, BEGUN).add_done_callback(lambda _: again.set())
        self._running -= 1
        self._grant()

    def _end(self) -> None:
        self._running -= 1
        self._begun -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._running < AT_ONCE:
            key, queue = self._waiting.popitem(last=False)
            *_, place = heappop(queue)
            if queue:
                self._waiting[key] = queue  # behind the other keys
            if not place.cancelled():
                self._running += 1
                place.set_result(None)


async def aside(request: Request, work: Callable[[], T], **how: bool) -> T:
    """Return what `work` returns: a work of the request's key. `how`: see `ClientWork.run`."""
    works: ClientWork = request.app.state.work
    return await works.run(caller_of(request).key_id, work, **how)


async def until_left(receive: Receive) -> None:
    """Return when the client has left; a body that was not read is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def await_or_disconnect(
    request: Request, ticket: "Ticket | None", work: Coroutine[Any, Any, T]
) -> T:
    """Return the result of work, under a ticket if it has one; cancel it when the client leaves.

    Raises ClientDisconnect then. The watching task starts only after WATCH_AFTER seconds, so that
    quick requests do without it.
    """
    task, gone = asyncio.current_task(), False
    watching: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal gone
        await until_left(request.receive)
        gone = True
        assert task is not None
        task.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if gone:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        if watching is not None:
            watching.cancel()
        if ticket is not None:
            ticket.release()  # also if the work never got its slot
