"""Replica leases: a candidate takes the last replica of a promoted version for a limited time.

With one replica, a candidate can only be evaluated in place of the promoted version. An admin
stages it with `force`, as the lease's holder, and renews the lease during the evaluation. When the
holder ends the lease, rejects the candidate or dies, the promoted version is loaded again. Made by
version_switch.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cray_agents.errors import CrayError, NotFound, PoolBusy
from cray_agents.runtime.background import BackgroundTasks, ChangeNotifier

LONGEST = 3600.0  # seconds
_RETRY_INTERVAL = 5.0  # seconds until a promoted version that did not come back is tried again

log = logging.getLogger(__name__)


class Lease:
    """A replica serves `version` for `holder`, in place of `displaced`, for `seconds`."""

    def __init__(self, holder: str, version: str, displaced: Sequence[str], seconds: float) -> None:
        self.holder = holder
        self.version = version
        self.displaced = list(displaced)
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Let the lease last `seconds` from now; 0 ends it."""
        self.until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end of the lease, at least 0."""
        return max(0.0, self.until - time.monotonic())

    def status(self) -> dict[str, Any]:
        """Return the lease as `/v1/pool` shows it."""
        return {
            "holder": self.holder,
            "version": self.version,
            "displaced": self.displaced,
            "seconds_left": self.left,
        }


class ReplicaLeases:
    """The pool's lease, of which there is at most one.

    `give_back` loads the promoted versions that no replica serves.
    """

    def __init__(self, give_back: Callable[[Lease], Awaitable[None]]) -> None:
        self.lease: Lease | None = None
        self._give_back = give_back
        self._changed = ChangeNotifier()
        self._tasks = BackgroundTasks()
        self._watched = False

    def check(self, holder: str, *, force: bool) -> None:
        """Raise PoolBusy while another holder has the lease, unless by `force` and no holder."""
        lease = self.lease
        if lease is None or lease.holder == holder or (force and not holder):
            return
        raise PoolBusy(
            f"the replica is lent to {lease.holder!r}, for {lease.version}: wait for its end (the "
            f"lease lasts {lease.left:.0f} s more, and can be renewed), or promote a version, or "
            "roll back, which ends it"
        )

    def begin(self, holder: str, version: str, displaced: Sequence[str], seconds: float) -> None:
        """Begin a lease, or move it to another version."""
        if self.lease is None or self.lease.holder != holder:
            log.warning(
                "%s made room for %s, which %r evaluates: who asks for it waits. It comes back when"
                " that ends, at the latest %g s after its last sign of life",
                *(", ".join(displaced), version, holder, seconds),
            )
        self.lease = Lease(holder, version, displaced, seconds)
        self._changed.notify()
        if not self._watched:
            self._watched = True
            self._tasks.keep("replica lease", self._watch)

    def renew(self, holder: str, seconds: float) -> Lease:
        """Renew the holder's lease, or end it with 0 seconds. Raises NotFound."""
        lease = self.lease
        if lease is None or lease.holder != holder:
            raise NotFound(f"{holder!r} holds no replica", param="holder", code="no_lease")
        lease.renew(seconds)
        self._changed.notify()
        return lease

    def end_rejected(self, version: str, who: str) -> None:
        """End the lease of a rejected version, unless its holder rejected it."""
        lease = self.lease
        if lease is not None and lease.version == version and lease.holder != who:
            lease.renew(0.0)
            self._changed.notify()

    def end(self) -> None:
        """Drop the lease: the promoted versions are served again."""
        if self.lease is not None:
            log.warning("%s can answer again", ", ".join(self.lease.displaced))
            self.lease = None
            self._changed.notify()

    async def close(self) -> None:
        """Stop watching the lease."""
        await self._tasks.close()

    async def _watch(self) -> None:
        """Give the replica back at the end of each lease."""
        while True:
            lease = self.lease
            try:
                async with asyncio.timeout(None if lease is None else lease.left):
                    await self._changed.wait()
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
                await asyncio.sleep(_RETRY_INTERVAL)
