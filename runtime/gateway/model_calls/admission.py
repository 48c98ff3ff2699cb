"""Admission: let requests in up to the engines' capacity, queue others, refuse the rest.

The engines take `capacity` requests at once. Further requests wait here, where waiting is free.
Each API key has a queue, and the queues are served in turn: a key with a thousand waiting requests
delays another key's single request by one. The queues together are bounded. Beyond the bound a
request is refused with 429 and a time to retry. A full queue still takes a key that has less than
its share waiting, so that no key shuts out another. With k keys it thus holds at most
bound × (1 + 1/2 + ... + 1/k).

Batch requests are let in when no interactive one waits. They leave a reserve of slots free for
interactive ones. They are never refused, since their sender bounds them, and never starve: when
none was let in for `trickle` seconds, the next free slot is theirs.

A request whose model no replica holds is parked. It takes no slot from requests that could be
answered, such as the evaluation of a candidate, and queues again when its model is back. Nothing is
refused while weights are swapped: requests beyond the bound wait, too. At other times the parked
requests have a bound of their own, of the same size. A request that nothing could serve for
`outage` seconds gets EngineUnavailable. If the look-up of a request's model fails (a damaged
record, no disk), this request alone gets that error.

Several gateways must not let in more together than one would alone: `GatewayShares` gives each a
share of the engines' capacity, and of the queue, in proportion to the requests that it reports.

For use on one event loop, hence no lock; without contention it makes no future and no task. Called
by answer.py; http/metrics.py shows the numbers.
"""

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from cray_agents.errors import CrayError, EngineUnavailable, TooManyRequests

RETRY_SECONDS = (0.05, 60.0)  # least and most in a Retry-After
_POLL_INTERVAL = 0.1  # seconds between checks, while requests wait, if the capacity rose
_STALE = 1.0  # seconds without a check after which an outage may have ended and begun again
_WEIGHT = 1 / 32  # of the newest request in the mean of their seconds

log = logging.getLogger(__name__)


class Room(NamedTuple):
    """Requests taken in all, room for more now, and seconds until all are answered."""

    limit: int
    remaining: int
    reset: float


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place: waiting, then inside, then released.

    `async with ticket` waits for a slot and gives it back. A stream's slot outlives the handler:
    `await ticket.wait()`, and `ticket.release()` at the end. `release` is safe at any time, also
    twice.
    """

    _admission: "Admission"
    key: str
    model: str
    batch: bool
    inside: bool = False
    _slot: asyncio.Future[None] | None = None  # while it waits
    _extra: bool = False  # came during a swap: not counted against the bound
    _parked_since: float = 0.0  # set while no replica holds its model
    _begun: float = field(default_factory=lambda: time.monotonic())
    _entered: float = 0.0

    @property
    def waited(self) -> float:
        """Seconds until the request got its slot; 0 before."""
        return max(0.0, self._entered - self._begun)

    async def wait(self) -> None:
        """Wait until the request may go to the engines. Raises EngineUnavailable; see `outage`."""
        if self._slot is None and not self.inside:
            raise RuntimeError("this ticket was released")
        if self._slot is not None:
            try:
                await self._slot
            except BaseException:  # cancelled, perhaps just after entering
                self.release()
                raise

    def release(self) -> None:
        """Give the slot, or the place in the queue, to the next request."""
        self._admission._leave(self)

    async def __aenter__(self) -> "Ticket":
        await self.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """At most `capacity` requests at the engines, and queues for the others.

    Args:
        capacity: requests that the engines take together. A callable is called at each step; 0 from
            it means an outage, during which its last other value is used.
        queue: most interactive requests that wait, and most that are parked; `max_queue` in the
            configuration, or a callable for this gateway's share of it.
        serves: returns True if a replica can answer for a model, by the name in the request.
        swapping: returns True while weights are being changed.
        trickle: seconds after which a waiting batch request is let in before interactive ones.
        outage: seconds without capacity after which no request is kept waiting; a callable is
            called at each look.
    """

    def __init__(
        self,
        capacity: Callable[[], int] | int = 256,
        queue: Callable[[], int] | int = 1024,
        *,
        serves: Callable[[str], bool] = lambda model: True,
        swapping: Callable[[], bool] = lambda: False,
        trickle: float = 5.0,
        outage: Callable[[], float] | float = 120.0,
    ) -> None:
        self._capacity = capacity
        self._queue = queue
        self._serves = serves
        self._swapping = swapping
        self._trickle = trickle
        self._given_outage = outage
        self._last_capacity = capacity if isinstance(capacity, int) else 64
        self._dark_since: float | None = None  # start of an outage, as far as it was checked
        self._last_check = 0.0
        self._queues: OrderedDict[str, OrderedDict[Ticket, None]] = OrderedDict()  # next key first
        self._batch: OrderedDict[Ticket, None] = OrderedDict()
        self._parked: OrderedDict[Ticket, None] = OrderedDict()
        self._parked_by_key: Counter[str] = Counter()  # interactive ones, against the bound
        self._batch_served = 0.0  # time when one was last let in, or the first began to wait
        self._waiting = 0  # interactive ones
        self._counted = 0  # interactive ones that count against the bound
        self._inside = 0
        self._batch_inside = 0
        self._mean_seconds: float | None = None  # that a request is inside
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, key: str = "", batch: bool = False, model: str = "") -> Ticket:
        """Return a ticket at once: inside if a slot is free, else waiting. Release it in the end.

        Raises TooManyRequests and EngineUnavailable, also at once.
        """
        ticket = Ticket(self, key, model, batch)
        if not self._serves(model):
            if not batch:
                parked = self._parked_by_key
                self._check_room(ticket, parked.total(), parked[key], len(parked))
            self._park(ticket)
            return ticket
        if not self._waiting and not (batch and self._batch):
            taken = self._inside + (self.reserve if batch else 0)
            if taken < self.capacity:
                self._let_in(ticket)
                return ticket
        self._check_outage()
        if not batch:
            mine = len(self._queues.get(key, ()))
            self._check_room(ticket, self._counted, mine, len(self._queues))
        self._join(ticket)
        self.recheck()
        return ticket

    @property
    def reserve(self) -> int:
        """Slots that batch requests leave free for interactive ones; 0 if the capacity is 1."""
        return min(self._last_capacity - 1, 1 + self._last_capacity // 8)

    def inside(self, batch: bool = False) -> int:
        """Return how many requests of one class are at the engines now."""
        return self._batch_inside if batch else self._inside - self._batch_inside

    def waiting(self, batch: bool = False) -> int:
        """Return how many requests of one class wait for a slot now."""
        parked = sum(ticket.batch is batch for ticket in self._parked)
        return parked + (len(self._batch) if batch else self._waiting)

    @property
    def parked(self) -> int:
        """Requests that wait because no replica holds their version."""
        return len(self._parked)

    def waiting_by_key(self) -> dict[str, int]:
        """Return how many requests of each key wait, of both classes."""
        counts = Counter({key: len(queue) for key, queue in self._queues.items()})
        counts.update(ticket.key for ticket in (*self._batch, *self._parked))
        return {key: count for key, count in counts.items() if count}

    @property
    def demand(self) -> int:
        """Requests of both classes, at the engines and waiting."""
        return self._inside + self._waiting + len(self._batch) + len(self._parked)

    def room(self) -> Room:
        """Return the numbers for the rate-limit headers."""
        limit = self._last_capacity + self._bound
        present = self._inside + self._waiting
        return Room(limit, max(0, limit - present), self._drain_seconds(present))

    @property
    def mean_seconds(self) -> float:
        """Seconds that the last requests were inside, on average; 1 before the first one."""
        return 1.0 if self._mean_seconds is None else self._mean_seconds

    @property
    def _bound(self) -> int:
        return self._queue if isinstance(self._queue, int) else max(1, self._queue())

    @property
    def capacity(self) -> int:
        """Requests that the engines take at once; in an outage those before it."""
        if isinstance(self._capacity, int):
            return self._capacity
        now = self._capacity()
        if now > 0:
            self._last_capacity, self._dark_since = now, None
            return now
        before, self._last_check = self._last_check, time.monotonic()
        if self._dark_since is None or self._last_check - before > _STALE:
            self._dark_since = self._last_check
        return self._last_capacity

    def _let_in(self, ticket: Ticket) -> None:
        ticket.inside = True
        ticket._entered = time.monotonic()
        self._inside += 1
        if ticket.batch:
            self._batch_inside += 1
            self._batch_served = ticket._entered

    def _leave(self, ticket: Ticket) -> None:
        """Take a ticket out of any state. A second call does nothing."""
        slot, ticket._slot = ticket._slot, None
        if ticket.inside:
            ticket.inside = False
            self._inside -= 1
            self._batch_inside -= ticket.batch
            seconds = time.monotonic() - ticket._entered
            before = seconds if self._mean_seconds is None else self._mean_seconds
            self._mean_seconds = before + _WEIGHT * (seconds - before)
            if self._waiting or self._batch or self._parked:
                self.recheck()
        elif slot is not None:
            self._drop(ticket)
            slot.cancel()

    def _is_ready(self, ticket: Ticket) -> bool | None:
        """Tell whether a waiting ticket's model is served. On an error the ticket is out: None."""
        try:
            return self._serves(ticket.model)
        except Exception as error:  # for its own request to raise, not for whoever left a slot
            if not isinstance(error, CrayError | OSError):
                log.exception("%s was not looked up", ticket.model)
            self._refuse([ticket], error)
            return None

    def _park(self, ticket: Ticket) -> None:
        """Let a ticket wait for its model, outside the queues."""
        ticket._parked_since = time.monotonic()
        self._parked[ticket] = None
        if not (ticket.batch or ticket._extra):
            self._parked_by_key[ticket.key] += 1
        self._wait(ticket)

    def _unpark(self) -> None:
        """Queue the parked tickets whose model is served again."""
        served: dict[str, bool] = {}
        for ticket in list(self._parked):
            if ticket.model not in served:
                ready = self._is_ready(ticket)
                if ready is None:
                    continue
                served[ticket.model] = ready
            if served[ticket.model]:
                self._drop(ticket)
                ticket._extra = True
                self._join(ticket)

    def _wait(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        if ticket._slot is None:
            ticket._slot = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_later(_POLL_INTERVAL, self._tick)

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
        """Take a ticket out of its queue or out of the parked ones, if it is there."""
        if ticket in self._parked:
            del self._parked[ticket]
            if not (ticket.batch or ticket._extra):
                self._parked_by_key[ticket.key] -= 1
                if not self._parked_by_key[ticket.key]:
                    del self._parked_by_key[ticket.key]
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

    def recheck(self) -> None:
        """Let requests in now, as after a change of capacity. The next poll would do so, too."""
        if self._parked:
            self._unpark()
        free = self.capacity - self._inside
        while free > 0 and (ticket := self._next(free)) is not None:
            if ticket._slot is None or ticket._slot.done():  # cancelled, and about to leave
                self._drop(ticket)
                continue
            ready = self._is_ready(ticket)
            self._drop(ticket)
            if not ready:
                if ready is False:
                    self._park(ticket)
                continue
            if ticket.key in self._queues and not ticket.batch:
                self._queues.move_to_end(ticket.key)  # now the other keys come first
            self._let_in(ticket)
            ticket._slot.set_result(None)
            free -= 1

    def _next(self, free: int) -> Ticket | None:
        """Return the next ticket to let in when `free` slots are free."""
        if self._batch:
            late = time.monotonic() - self._batch_served >= self._trickle
            if late or (not self._waiting and free > self.reserve):
                return next(iter(self._batch))
        if self._queues:
            return next(iter(next(iter(self._queues.values()))))
        return None

    def _tick(self) -> None:
        self._timer = None
        try:
            self.recheck()
            self._refuse_late()
        finally:  # whatever a callback raised, who waits is looked at again
            if self._waiting or self._batch or self._parked:
                self._timer = asyncio.get_running_loop().call_later(_POLL_INTERVAL, self._tick)

    def _refuse_late(self) -> None:
        """Refuse the requests that nothing could serve for `outage` seconds."""
        try:
            self._check_outage()
        except EngineUnavailable as error:
            for queue in [*self._queues.values(), self._batch]:
                self._refuse(list(queue), error)
        late = time.monotonic() - self._outage
        for ticket in [ticket for ticket in self._parked if ticket._parked_since < late]:
            why = f"no replica has served {ticket.model} for {self._outage:g} s"
            hint = "GET /v1/pool tells what they hold"
            self._refuse([ticket], EngineUnavailable(f"{why}; {hint}"))

    def _refuse(self, tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in tickets:
            self._drop(ticket)
            if ticket._slot is not None and not ticket._slot.done():
                ticket._slot.set_exception(error)

    def _check_room(self, ticket: Ticket, counted: int, mine: int, keys: int) -> None:
        """Raise TooManyRequests if the queue is full and the ticket's key has its share of it.

        `counted` requests of `keys` keys wait, `mine` of them of the ticket's own key.
        """
        bound = self._bound
        if counted < bound or mine < max(1, bound // (keys + (not mine))):
            return
        if self._swapping():
            ticket._extra = True
            return
        least, most = RETRY_SECONDS
        # spread the retries over half the time that the queue takes
        waiting = self.waiting()
        seconds = self._drain_seconds(waiting) * random.uniform(0.5, 1.0)
        seconds = min(most, max(least, seconds))
        raise TooManyRequests(
            f"{self._inside} requests are served and {waiting} wait, which is the most "
            f"(max_queue = {bound}): come again in {seconds:.2g} s",
            retry_after=seconds,
        )

    @property
    def _outage(self) -> float:
        given = self._given_outage
        return given if isinstance(given, int | float) else given()

    def _check_outage(self) -> None:
        if self._dark_since is None or time.monotonic() - self._dark_since < self._outage:
            return
        if self._swapping():
            return
        raise EngineUnavailable(
            f"no replica has served for {time.monotonic() - self._dark_since:.0f} s; "
            "GET /v1/pool tells why"
        )

    def _drain_seconds(self, requests: int) -> float:
        """Return the seconds that so many requests take, at the pace of the last ones."""
        return requests * self.mean_seconds / max(1, self._last_capacity)


FORGOTTEN = 3.0  # seconds after which a gateway that says nothing has no share


class GatewayShares:
    """The demands of further gateways, in requests inside and waiting, as last reported."""

    def __init__(self) -> None:
        self._demands: dict[str, tuple[int, float]] = {}

    def note(self, gateway: str, demand: int) -> None:
        """Take a gateway's report."""
        self._demands[gateway] = (demand, time.monotonic())

    @property
    def gateways(self) -> list[str]:
        """The names of the further gateways that report."""
        self._forget()
        return sorted(self._demands)

    @property
    def demand(self) -> int:
        """The requests that further gateways have."""
        self._forget()
        return sum(demand for demand, _ in self._demands.values())

    def own(self, demand: int) -> float:
        """Return the share of the gateway that holds this object, in (0, 1]."""
        if not self._demands:
            return 1.0
        return self._share(demand, self.demand + demand, len(self._demands) + 1)

    def of(self, gateway: str, own_demand: int) -> float:
        """Return the share of a gateway that has reported; `own_demand`: that of this one."""
        demand = self._demands[gateway][0]
        return self._share(demand, self.demand + own_demand, len(self._demands) + 1)

    @staticmethod
    def _share(demand: int, total: int, gateways: int) -> float:
        return (demand + 1) / (total + gateways)  # so that an idle one may begin

    def _forget(self) -> None:
        old = time.monotonic() - FORGOTTEN
        for gateway in [g for g, (_, at) in self._demands.items() if at < old]:
            del self._demands[gateway]
