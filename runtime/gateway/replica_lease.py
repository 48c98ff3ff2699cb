"""A lease: the last replica of a promoted version holds another one for a while, and goes back.

Where there is one replica, a candidate can only be evaluated in the place of what is promoted. Who
stages it there (an admin, with `force`) says who he is and renews the lease while he works. When he
has ended, rejected it, or died, the promoted version is loaded again. Made by promoting.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cray_agents.errors import BadInput, CrayError, NotFound, PoolBusy
from cray_agents.platform.client import LEASE

LONGEST = 3600.0
_AGAIN = 5.0  # seconds after which a promoted version that did not come back is tried again

log = logging.getLogger(__name__)


def lease_seconds(body: dict[str, Any]) -> float:
    """How long a request wants a lease for. Raises BadInput."""
    seconds = body.get("seconds", LEASE)
    if not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST:
        raise BadInput(f"seconds must be a number from 0 to {LONGEST:g}", param="seconds")
    return float(seconds)


class Lease:
    """`holder` has `version` served in the place of `displaced`, until he lets `seconds` pass."""

    def __init__(self, holder: str, version: str, displaced: Sequence[str], seconds: float) -> None:
        self.holder = holder
        self.version = version
        self.displaced = list(displaced)
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """It lasts so long from now on; 0: it is over."""
        self.until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until it is over."""
        return max(0.0, self.until - time.monotonic())

    def status(self) -> dict[str, Any]:
        """What `/v1/pool` shows."""
        return {
            "holder": self.holder,
            "version": self.version,
            "displaced": self.displaced,
            "seconds_left": self.left,
        }


class Lending:
    """The lease that there is, one a pool. `give_back` loads what is promoted, where it is not."""

    def __init__(self, give_back: Callable[[Lease], Awaitable[None]]) -> None:
        self.lease: Lease | None = None
        self._give_back = give_back
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def check(self, holder: str, *, force: bool) -> None:
        """Raises PoolBusy while another one has the lease; an admin who names none takes it."""
        lease = self.lease
        if lease is None or lease.holder == holder or (force and not holder):
            return
        raise PoolBusy(
            f"the replica is lent to {lease.holder!r}, for {lease.version}: wait for its end (the "
            f"lease lasts {lease.left:.0f} s more, and can be renewed), or promote a version, or "
            "roll back, which ends it"
        )

    def begin(self, holder: str, version: str, displaced: Sequence[str], seconds: float) -> None:
        """Lend the replica, or lend it on for another version."""
        if self.lease is None or self.lease.holder != holder:
            log.warning(
                "%s made room for %s, which %r evaluates: who asks for it waits. It comes back when"
                " that ends, at the latest %g s after its last sign of life",
                *(", ".join(displaced), version, holder, seconds),
            )
        self.lease = Lease(holder, version, displaced, seconds)
        self._look()
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    def renew(self, holder: str, seconds: float) -> Lease:
        """Its holder lives, or, with 0 seconds, has ended. Raises NotFound."""
        lease = self.lease
        if lease is None or lease.holder != holder:
            raise NotFound(f"{holder!r} holds no replica", param="holder", code="no_lease")
        lease.renew(seconds)
        self._look()
        return lease

    def rejected(self, version: str, who: str) -> None:
        """A version was found not good enough: end its lease, unless the holder said so himself."""
        lease = self.lease
        if lease is not None and lease.version == version and lease.holder != who:
            lease.renew(0.0)
            self._look()

    def end(self) -> None:
        """What is promoted is served again."""
        if self.lease is not None:
            log.warning("%s can answer again", ", ".join(self.lease.displaced))
            self.lease = None
            self._look()

    async def close(self) -> None:
        """The platform ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _look(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self) -> None:
        """Give back what is over."""
        while True:
            lease, changed = self.lease, self._changed
            try:
                async with asyncio.timeout(None if lease is None else lease.left):
                    await changed.wait()
                    continue
            except TimeoutError:
                pass
            if lease is None or lease is not self.lease or lease.left:
                continue
            try:
                await self._give_back(lease)
            except CrayError as error:
                log.error("%s did not come back: %s", ", ".join(lease.displaced), error)
            if self.lease is lease and not lease.left:
                await asyncio.sleep(_AGAIN)
