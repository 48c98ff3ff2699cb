"""Who may ask the engines now, who waits, and who is told to come again.

The engines take `capacity` requests at once. Those beyond it wait here, where it costs nothing,
rather than in an engine: a queue for each key, served in turn, so that a key with a thousand
waiting delays one with a single request by one request. The queue is bounded: beyond it a request
is refused with 429 and told when to come again. A full queue still takes a key that has less than
its share of it waiting, so that nobody fills it against the others; with k keys it thus holds at
most bound × (1 + 1/2 + ... + 1/k).

Batch requests are let in when no interactive one waits, and leave a reserve of slots free for those
to come. They are never refused (who sends them bounds them), and never starve: when none was let in
for `trickle` seconds, the next free slot is theirs.

While weights are swapped nobody is refused. A request whose model no replica holds is parked: it
takes no slot from those that could be answered, such as the evaluation of a candidate, and queues
in its turn when its model is back; requests beyond the bound are let in to wait, too. Those parked
at other times have a bound of their own, of the same size, so that they keep nobody out of the
queue. When nothing could serve a request for `outage` seconds, it gets EngineUnavailable instead of
a place.

One event loop, hence no lock; without contention no future and no task either. Called by
answers.py and passing.py; metrics.py shows the numbers.
"""

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from cray_agents.errors import EngineUnavailable, TooManyRequests

RETRY_SECONDS = (0.05, 60.0)  # the least and the most that a client is told to wait
_LOOK = 0.1  # seconds between looks at the capacity while somebody waits: nobody tells of a rise
_SEEN = 1.0  # seconds without a look after which an outage may have ended and begun again
_WEIGHT = 1 / 32  # of the newest request in the mean of their seconds


class Room(NamedTuple):
    """How many requests are taken in all, how many more now, and seconds until it is empty."""

    limit: int
    remaining: int
    reset: float


class Ticket:
    """A request's place: it waits, is inside, and has left; `release` may come at any time, twice.

    `async with ticket` waits for its turn and gives the slot back. Where the slot outlives the
    handler, as with a stream: `await ticket.turn()`, then `ticket.release()` when all is done.
    """

    __slots__ = (
        *("_admission", "_begun", "_extra", "_parked", "_turn"),
        *("batch", "inside", "key", "model"),
    )

    def __init__(self, admission: "Admission", key: str, model: str, batch: bool) -> None:
        self.key = key
        self.model = model
        self.batch = batch
        self.inside = False
        self._admission = admission
        self._turn: asyncio.Future[None] | None = None  # while it waits
        self._extra = False  # came during a swap: not counted against the bound
        self._parked = 0.0  # since when, while no replica holds its model
        self._begun = 0.0

    async def turn(self) -> None:
        """Wait until the request may go to the engines. Raises EngineUnavailable; see `outage`."""
        if self._turn is None and not self.inside:
            raise RuntimeError("this ticket was released")
        if self._turn is not None:
            try:
                await self._turn
            except BaseException:  # cancelled, perhaps just after it was let in
                self.release()
                raise

    def release(self) -> None:
        """Give the slot, or the place in the queue, to the next."""
        self._admission._leave(self)

    async def __aenter__(self) -> "Ticket":
        if not self.inside:
            await self.turn()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission._leave(self)


class Admission:
    """Lets at most `capacity` requests in, the others in turn.

    Args:
        capacity: of the engines together; a callable is asked at each step, and 0 from it means
            that nobody serves now (then the last other answer holds).
        queue: how many interactive requests may wait, and be parked, config's `max_queue`.
        serves: whether a replica can answer for a model now, by the name that the request has.
        swapping: whether weights are being changed.
        trickle: seconds after which a waiting batch request is let in before interactive ones.
        outage: seconds without capacity after which nobody is kept waiting.
    """

    def __init__(
        self,
        capacity: Callable[[], int] | int = 256,
        queue: int = 1024,
        *,
        serves: Callable[[str], bool] | None = None,
        swapping: Callable[[], bool] | None = None,
        trickle: float = 5.0,
        outage: float = 120.0,
    ) -> None:
        self._capacity = capacity
        self._queue = queue
        self._serves = serves
        self._swapping = swapping
        self._trickle = trickle
        self._outage = outage
        self._last = capacity if isinstance(capacity, int) else 64  # the capacity when last seen
        self._dark: float | None = None  # since when nobody serves, as far as was looked
        self._looked = 0.0
        self._queues: OrderedDict[str, OrderedDict[Ticket, None]] = OrderedDict()  # next key first
        self._batch: OrderedDict[Ticket, None] = OrderedDict()
        self._parked: OrderedDict[Ticket, None] = OrderedDict()
        self._parked_of: Counter[str] = Counter()  # interactive ones by key, against the bound
        self._batch_served = 0.0  # when one was last let in, or began to wait for it
        self._waiting = 0  # interactive ones
        self._counted = 0  # ... of these, those against the bound
        self._inside = 0
        self._batch_inside = 0
        self._seconds: float | None = None  # mean time that a request is inside
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, key: str = "", batch: bool = False, model: str = "") -> Ticket:
        """A slot, or a place in the queue, at once: wait for its turn, and release it.

        Raises TooManyRequests, before anything was waited for, and EngineUnavailable.
        """
        ticket = Ticket(self, key, model, batch)
        if not self._open(model):
            if not batch:
                parked = self._parked_of
                self._check_room(ticket, parked.total(), parked[key], len(parked))
            self._park(ticket)
            return ticket
        if not self._waiting and not (batch and self._batch):
            taken = self._inside + (self.reserve if batch else 0)
            if taken < self._now_capacity():
                self._let_in(ticket)
                return ticket
        self._check_outage()
        if not batch:
            mine = len(self._queues.get(key, ()))
            self._check_room(ticket, self._counted, mine, len(self._queues))
        self._join(ticket)
        self._grant()
        return ticket

    @property
    def capacity(self) -> int:
        """How many requests the engines take at once."""
        return self._now_capacity()

    @property
    def reserve(self) -> int:
        """Slots that batch requests leave free for interactive ones; none of a single one."""
        return min(self._last - 1, 1 + self._last // 8)

    def inside(self, batch: bool = False) -> int:
        """Requests at the engines now, of one class."""
        return self._batch_inside if batch else self._inside - self._batch_inside

    def waiting(self, batch: bool = False) -> int:
        """Requests that wait for a slot now, of one class."""
        parked = sum(ticket.batch is batch for ticket in self._parked)
        return parked + (len(self._batch) if batch else self._waiting)

    def batch_room(self) -> int:
        """How many more batch requests would be let in at once, for who decides how many to send.

        Never none for ever: a batch request may always wait here for its trickle.
        """
        if self._waiting or self._batch:
            return 0
        return max(0, self._now_capacity() - self.reserve - self._inside)

    def room(self) -> Room:
        """What the rate-limit headers say."""
        limit = self._last + self._queue
        there = self._inside + self._waiting
        return Room(limit, max(0, limit - there), self._drain(there))

    def look(self) -> None:
        """The capacity has changed: let in whom it now has room for. It is seen anyway, later."""
        self._grant()

    def _now_capacity(self) -> int:
        if isinstance(self._capacity, int):
            return self._capacity
        now = self._capacity()
        if now > 0:
            self._last, self._dark = now, None
            return now
        looked, self._looked = self._looked, time.monotonic()
        if self._dark is None or self._looked - looked > _SEEN:
            self._dark = self._looked
        return self._last

    def _let_in(self, ticket: Ticket) -> None:
        ticket.inside = True
        ticket._begun = time.monotonic()
        self._inside += 1
        if ticket.batch:
            self._batch_inside += 1
            self._batch_served = ticket._begun

    def _leave(self, ticket: Ticket) -> None:
        """The only way out, from each state; a second time there is nothing left to give back."""
        turn, ticket._turn = ticket._turn, None
        if ticket.inside:
            ticket.inside = False
            self._inside -= 1
            self._batch_inside -= ticket.batch
            seconds = time.monotonic() - ticket._begun
            before = seconds if self._seconds is None else self._seconds
            self._seconds = before + _WEIGHT * (seconds - before)
            if self._waiting or self._batch or self._parked:
                self._grant()
        elif turn is not None:
            self._drop(ticket)
            turn.cancel()

    def _open(self, model: str) -> bool:
        return self._serves is None or self._serves(model)

    def _park(self, ticket: Ticket) -> None:
        """Let a ticket wait beside the queues, for its model."""
        ticket._parked = time.monotonic()
        self._parked[ticket] = None
        if not (ticket.batch or ticket._extra):
            self._parked_of[ticket.key] += 1
        self._wait(ticket)

    def _unpark(self) -> None:
        """Let those queue whose model is served again."""
        seen: dict[str, bool] = {}
        for ticket in list(self._parked):
            if ticket.model not in seen:
                seen[ticket.model] = self._open(ticket.model)
            if seen[ticket.model]:
                self._drop(ticket)
                ticket._extra = True
                self._join(ticket)

    def _wait(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        if ticket._turn is None:
            ticket._turn = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_later(_LOOK, self._tick)

    def _join(self, ticket: Ticket) -> None:
        self._wait(ticket)
        if ticket.batch:
            if not self._batch:
                self._batch_served = time.monotonic()
            self._batch[ticket] = None
        else:
            self._queues.setdefault(ticket.key, OrderedDict())[ticket] = None
            self._waiting += 1
            self._counted += not ticket._extra

    def _drop(self, ticket: Ticket) -> None:
        """Take a ticket out of where it waits, if it does."""
        if ticket in self._parked:
            del self._parked[ticket]
            if not (ticket.batch or ticket._extra):
                self._parked_of[ticket.key] -= 1
                if not self._parked_of[ticket.key]:
                    del self._parked_of[ticket.key]
            return
        mine = self._batch if ticket.batch else self._queues.get(ticket.key)
        if mine is None or ticket not in mine:
            return
        del mine[ticket]
        if not ticket.batch:
            self._waiting -= 1
            self._counted -= not ticket._extra
            if not mine:
                del self._queues[ticket.key]

    def _grant(self) -> None:
        if self._parked:
            self._unpark()
        free = self._now_capacity() - self._inside
        while free > 0 and (ticket := self._next(free)) is not None:
            self._drop(ticket)
            if ticket._turn is None or ticket._turn.done():  # cancelled, and about to leave
                continue
            if not self._open(ticket.model):
                self._park(ticket)
                continue
            if ticket.key in self._queues and not ticket.batch:
                self._queues.move_to_end(ticket.key)  # the other keys come first
            self._let_in(ticket)
            ticket._turn.set_result(None)
            free -= 1

    def _next(self, free: int) -> Ticket | None:
        """Whose turn it is when so many slots are free."""
        if self._batch:
            late = time.monotonic() - self._batch_served >= self._trickle
            if late or (not self._waiting and free > self.reserve):
                return next(iter(self._batch))
        if self._queues:
            return next(iter(next(iter(self._queues.values()))))
        return None

    def _tick(self) -> None:
        self._timer = None
        self._grant()
        try:
            self._check_outage()
        except EngineUnavailable as error:
            for queue in [*self._queues.values(), self._batch]:
                self._refuse(list(queue), str(error))
        late = time.monotonic() - self._outage
        for ticket in [ticket for ticket in self._parked if ticket._parked < late]:
            why = f"no replica has served {ticket.model} for {self._outage:g} s"
            self._refuse([ticket], f"{why}; GET /v1/pool tells what they hold")
        if self._waiting or self._batch or self._parked:
            self._timer = asyncio.get_running_loop().call_later(_LOOK, self._tick)

    def _refuse(self, tickets: Sequence[Ticket], why: str) -> None:
        for ticket in tickets:
            self._drop(ticket)
            if ticket._turn is not None and not ticket._turn.done():
                ticket._turn.set_exception(EngineUnavailable(why))

    def _check_room(self, ticket: Ticket, counted: int, mine: int, keys: int) -> None:
        """Raise TooManyRequests where so many wait, of so many keys, and its own has its share."""
        if counted < self._queue or mine < max(1, self._queue // (keys + (not mine))):
            return
        if self._swapping is not None and self._swapping():
            ticket._extra = True
            return
        least, most = RETRY_SECONDS
        # spread over half the time that the queue takes, lest all come back at once
        waiting = self.waiting()
        seconds = self._drain(waiting) * random.uniform(0.5, 1.0)
        seconds = min(most, max(least, seconds))
        raise TooManyRequests(
            f"{self._inside} requests are served and {waiting} wait, which is the most "
            f"(max_queue = {self._queue}): come again in {seconds:.2g} s",
            retry_after=seconds,
        )

    def _check_outage(self) -> None:
        if self._dark is None or time.monotonic() - self._dark < self._outage:
            return
        if self._swapping is not None and self._swapping():
            return
        raise EngineUnavailable(
            f"no replica has served for {time.monotonic() - self._dark:.0f} s; "
            "GET /v1/pool tells why"
        )

    def _drain(self, requests: int) -> float:
        """Seconds in which so many requests are worked off, as fast as the last ones were."""
        seconds = 1.0 if self._seconds is None else self._seconds
        return requests * seconds / max(1, self._last)
