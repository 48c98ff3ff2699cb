"""Request router: send each request to a replica of its version, and again if that one is lost.

The pool routes to the replicas that it changes (pool.py). A further gateway routes to those that
the controller's pool publishes (published_replicas.py). No router relies on its own view: a
replica refuses a request whose version it does not serve any more (vllm_plugins/lock.py).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from itertools import count
from math import ceil
from typing import Any
from zlib import crc32

from cray_agents.errors import EngineError, EngineUnavailable, Overtaken, VersionClosed
from cray_agents.ports import Engine, EngineCall
from cray_agents.runtime.background import ChangeNotifier

Wanted = str | Callable[[], str]  # name@N, or a function that is called again at each attempt

_LOSS_TIMEOUT = 0.2  # seconds to wait for news of a replica's death before a request is sent again
_RETRY_INTERVAL = 0.02  # seconds until a replica is picked anew, where one had changed its version
_DEATHS = 2  # of engines, with the same request in flight
_SILENT = 10.0  # seconds in which other replicas come before one that took no connection
_REMEMBERED = 1 << 16  # places of conversations and prompts, by the last call
_ASKING = ("system", "developer", "user")  # roles of the messages before a first answer
_MOST_MESSAGES, _MOST_TEXT = 16, 4096  # of a prompt, and characters of each, that tell it apart
_LONG = 2048  # characters of a beginning that is worth finding in a KV cache
_SPREAD, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1  # Fibonacci hashing of 64 bits


class PoolNotifier(ChangeNotifier):
    """The changes of a pool's replicas, and the rollbacks that wait for one to be given up."""

    def __init__(self) -> None:
        super().__init__()
        self._rollbacks_waiting = 0

    @contextmanager
    def rollback_waiting(self) -> Iterator[None]:
        """Count one more waiting rollback, and wake every waiter so that it aborts."""
        self._rollbacks_waiting += 1
        self.notify()
        try:
            yield
        finally:
            self._rollbacks_waiting -= 1

    def abort_if_rollback_waits(self, version: str) -> None:
        """Raise Overtaken where a rollback waits; the message names the version not loaded."""
        if self._rollbacks_waiting:
            raise Overtaken(f"{version} was not loaded: a rollback came first. Ask again")


class InFlightRequests:
    """Counts of requests by version; `notifier` fires when a version's last request has ended."""

    def __init__(self, notifier: ChangeNotifier) -> None:
        self._notifier = notifier
        self._requests = Counter[str]()
        self.total = 0  # requests in flight
        self._busy, self._busy_since = 0.0, 0.0

    def count_for(self, version: str) -> int:
        """Return how many requests in flight a version answers."""
        return self._requests[version]

    @property
    def busy_seconds(self) -> float:
        """Seconds so far with at least one request in flight."""
        return self._busy + (time.monotonic() - self._busy_since if self.total else 0.0)

    @contextmanager
    def track(self, version: str) -> Iterator[None]:
        """Count a request as in flight while the block runs."""
        if not self.total:
            self._busy_since = time.monotonic()
        self._requests[version] += 1
        self.total += 1
        try:
            yield
        finally:
            busy = self.busy_seconds
            self._requests[version] -= 1
            self.total -= 1
            if not self.total:
                self._busy = busy
            if not self._requests[version]:
                del self._requests[version]
                self._notifier.wake()


class RoutedReplica(ABC):
    """`Replica`, which this process changes | `FollowedReplica`, which the controller changes.

    `losses` counts lost processes, and `why_lost` is the last reason. `notifier` fires at each
    change.
    """

    def __init__(self, notifier: ChangeNotifier) -> None:
        self.requests = InFlightRequests(notifier)
        self.losses = 0
        self.why_lost = ""
        self._changes = notifier

    @property
    def in_flight(self) -> int:
        """Requests of this process in flight, whichever version answers them."""
        return self.requests.total

    @property
    @abstractmethod
    def versions(self) -> list[str]:
        """The versions that can answer requests now."""

    @property
    @abstractmethod
    def contents(self) -> str:
        """Contents and state, for an error message."""

    @abstractmethod
    def engine(self, version: str) -> Engine:
        """Return the engine that answers with a version. Raises EngineUnavailable."""

    @abstractmethod
    def fail(self, since: int, why: str) -> None:
        """Note that the engine is dead, unless `losses` has passed `since`."""

    async def wait_for_loss(self, since: int, seconds: float) -> bool:
        """Tell whether `losses` passes `since`; wait for it up to `seconds`."""
        with suppress(TimeoutError):
            await self._changes.wait_until(lambda: self.losses != since, seconds)
        return self.losses != since


class _DeathSuspicion:
    """A request's part in the deaths of engines.

    A request that was in flight alone at two deaths killed those engines. A request that was in
    flight with others at two deaths is a suspect. Suspects are sent again one at a time, under
    `lock`; the one in flight at the next death killed that engine. Where engines are
    `shared` with other gateways, none is known to be alone, and a suspect is sent once more.
    """

    def __init__(self, lock: asyncio.Lock, *, shared: bool) -> None:
        self._lock = lock
        self._has_lock = False
        self._shared = shared
        self._chances = 1 if shared else 0  # deaths under the lock that another may have caused
        self._deaths = 0
        self._alone = 0

    async def wait(self) -> None:
        """Return when the request may be sent (again)."""
        if self._deaths >= _DEATHS and not self._has_lock:
            await self._lock.acquire()
            self._has_lock = True

    def add(self, alone: bool, why: str) -> None:
        """Count a death with this request in flight. Raises EngineError if it is to blame."""
        self._deaths += 1
        self._alone += alone and not self._shared
        if self._has_lock and self._chances:
            self._chances -= 1
        elif self._has_lock or self._alone >= _DEATHS:
            raise EngineError(
                f"the engine died {self._deaths} times while it answered this request, which is not"
                f" sent to it again: {why}",
                status=500,
                code="engine_died",
            )

    def end(self) -> None:
        """Let the next suspect be sent: this request has ended."""
        if self._has_lock:
            self._lock.release()


class RequestRouter:
    """The router of requests to replicas: `Pool` | `FollowedPool`.

    A call goes to the replica whose KV cache has its beginning, unless that is clearly busier (the
    bound is that of arXiv 1608.01350): the one that answered its conversation last. Attempts of one
    task begin where the first did, and so do prompts with one long beginning; half as much beyond
    the mean is busy for them. A single gateway remembers where that was, and places new prompts by
    turns where least is in flight. Gateways that share their replicas find it by the prompt's
    rendezvous hash, so that all agree, and one that starts anew with them.

    Args:
        replicas: may change at any time; `notifier` then fires, as at each of their own changes.
        wait_timeout: seconds that a request waits for its version.
        affinity: the setting `replica_affinity`.

    `shared`: True where other gateways send requests to the same replicas.
    """

    def __init__(
        self,
        replicas: Sequence[RoutedReplica],
        notifier: ChangeNotifier,
        wait_timeout: float,
        affinity: float = 1.5,
    ) -> None:
        self._affinity = affinity
        self._places: OrderedDict[int, RoutedReplica] = OrderedDict()  # by hashes of `_choose`
        self._numbers = count(1)
        self._given: dict[RoutedReplica, int] = {}  # numbers of the last new prompts
        self._fits: dict[str, dict[RoutedReplica, int]] = {}  # see `_fit`
        self._seen = 0  # changes of the replicas that `_fits` has taken in
        self._silent: dict[RoutedReplica, float] = {}  # until when others come first
        self._replicas = replicas
        self._notifier = notifier
        self.wait_timeout = wait_timeout
        self.shared = False
        self._suspects = asyncio.Lock()  # suspect requests are sent again one at a time

    def serves(self, version: str) -> bool:
        """Tell whether a replica can answer with a version now."""
        return any(version in replica.versions for replica in self._replicas)

    @property
    def serving(self) -> int:
        """The number of replicas that can answer now."""
        return sum(bool(replica.versions) for replica in self._replicas)

    def recall(self, version: str) -> None:
        """Note that a request needs a version and no replica serves it."""

    async def answer(self, version: Wanted, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        """Answer a request: see `Engine.answer`. Sets the exchange's version to the answering one.

        If a replica dies before anything was sent, the request is sent again: sampling again is
        then safe. A request that may have killed the engine is not sent forever: see
        `_DeathSuspicion`. Raises EngineError and its kinds.
        """
        deadline = _now() + self.wait_timeout
        suspicion = _DeathSuspicion(self._suspects, shared=self.shared)
        refused: set[RoutedReplica] = set()  # by these, or not answered: others come first
        try:
            while True:
                sent, closed, exchange.samples = False, False, []
                await suspicion.wait()
                slot, exchange.version = await self._pick(version, deadline, refused, exchange)
                with slot.requests.track(exchange.version):
                    exchange.began = time.time()
                    losses, alone = slot.losses, slot.in_flight == 1
                    try:
                        answer = slot.engine(exchange.version).answer(exchange)
                        async with aclosing(answer) as pieces:
                            async for piece in pieces:
                                sent = True
                                yield piece
                        return
                    except VersionClosed:  # it changed its version since it was picked
                        if _now() > deadline:
                            raise
                        closed = True
                        refused.add(slot)
                    except EngineUnavailable as error:
                        if isinstance(error.__cause__, TimeoutError):  # it takes no connection
                            self._silent[slot] = _now() + _SILENT
                        if error.status >= 500:  # the server lives, and reports a dead engine
                            slot.fail(losses, "its engine died")
                        if sent or _now() > deadline:
                            raise
                        refused.add(slot)
                        alone = alone and slot.in_flight == 1
                if closed:
                    await asyncio.sleep(_RETRY_INTERVAL)
                elif await slot.wait_for_loss(losses, _LOSS_TIMEOUT):
                    suspicion.add(alone, slot.why_lost)
        finally:
            suspicion.end()

    async def _pick(
        self,
        version: Wanted,
        deadline: float,
        refused: Collection[RoutedReplica],
        exchange: EngineCall,
    ) -> tuple[RoutedReplica, str]:
        """Return a slot that serves the version, and the version's `name@N`.

        Those that `refused`, and silent ones, are taken only if no other fits.
        There is no await between choice and return, so the slot still serves it.
        """
        while True:
            wanted = version if isinstance(version, str) else version()
            fit, last = self._fit(wanted), set(refused)
            if self._silent:
                last |= {slot for slot, until in self._silent.items() if until > _now()}
            if last:
                fit = {slot: number for slot, number in fit.items() if slot not in last} or fit
            if fit:
                slot = self._choose(wanted, fit, exchange)
                if wanted in slot.versions:
                    return slot, wanted
                self._fits.clear()  # it was lost, and nobody was told yet
                continue
            self.recall(wanted)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._notifier.wait()
            except TimeoutError:
                states = ", ".join(replica.contents for replica in self._replicas)
                raise EngineUnavailable(
                    f"no replica served {wanted} within {self.wait_timeout:g} s; "
                    f"the replicas hold: {states}"
                ) from None

    def _fit(self, version: str) -> dict[RoutedReplica, int]:
        """Return the replicas that serve a version, each with its factor of the rendezvous hash.

        It follows from the replica's place in the pool, which all gateways know.
        """
        if self._seen != self._notifier.changes:
            self._seen = self._notifier.changes
            self._fits.clear()
        if version not in self._fits:
            self._fits[version] = {
                slot: (number + 1) * _SPREAD & _WORD
                for number, slot in enumerate(self._replicas)
                if version in slot.versions
            }
        return self._fits[version]

    def _choose(
        self, version: str, fit: dict[RoutedReplica, int], exchange: EngineCall
    ) -> RoutedReplica:
        """Return, of the replicas that fit, the one with a call's beginning or a least busy one."""
        requests = [slot.requests.total for slot in fit]
        least = min(requests)
        if not exchange.conversation or not self._affinity or len(requests) == 1:
            return [*fit][requests.index(least)]
        prompt, beginning, answered = _prompt_of(exchange.request)
        keys = [hash((version, prompt, exchange.conversation))]
        if not self.shared:
            keys += [hash((version, key)) for key in (prompt, beginning) if key]
        place, total = self._places.get(keys[0]), sum(requests)
        most = 1 + ceil(self._affinity * (total + 1) / len(requests))
        if place is None:
            if not answered:  # there is but a prompt to be found
                most = 1 + int((1 + self._affinity) / 2 * total / len(requests))
            known = (self._places[key] for key in keys if key in self._places)
            place = self._meeting(fit, prompt, exchange) if self.shared else next(known, None)
        if place is None or place not in fit or place.requests.total >= most:
            idle = (slot for slot, busy in zip(fit, requests, strict=True) if busy == least)
            place = min(idle, key=lambda slot: self._given.get(slot, 0))
            self._given[place] = next(self._numbers)
        for key in keys:
            self._places[key] = place
            self._places.move_to_end(key)
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)
        return place

    @staticmethod
    def _meeting(fit: dict[RoutedReplica, int], prompt: int, exchange: EngineCall) -> RoutedReplica:
        """Return a prompt's replica by rendezvous hashing: few of them move when a replica goes."""
        key = prompt or crc32(exchange.conversation.encode(errors="replace"))
        spread = key * _SPREAD & _WORD
        hashes = [(spread ^ factor) * _SPREAD & _WORD for factor in fit.values()]
        return [*fit][hashes.index(max(hashes))]


def _prompt_of(request: dict[str, Any]) -> tuple[int, int, bool]:
    """Return hashes of a conversation's messages before its first answer; 0 for none.

    The second is of a long beginning of theirs alone. Of a long message a part counts. And tell
    whether there is an answer.
    """
    told = [request.get("system") or request.get("instructions")]  # of other APIs
    given = request.get("messages") or request.get("input") or []
    messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
    answered = False
    for message in messages[:_MOST_MESSAGES]:
        answered = not isinstance(message, dict) or message.get("role") not in _ASKING
        if answered:
            break
        told.append(message.get("content"))
    content = "\0".join(map(_text, told)).strip("\0").encode(errors="replace")
    beginning = crc32(content[:_LONG]) if len(content) > _LONG else 0
    return crc32(content), beginning, answered


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = content[:_MOST_MESSAGES]
        return "".join(_text(part.get("text")) for part in parts if isinstance(part, dict))
    return content[:_MOST_TEXT] if isinstance(content, str) else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
