"""Slot places: find a replica a place, hand over to a successor in time, and give places back.

A replica that is not needed may also sleep on its place. It is away as one without a place: it
answers nobody, and takes the newest version when it comes back. But it is woken, not started.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from cray_agents.errors import CrayError
from cray_agents.runtime.background import start_task
from cray_agents.runtime.pool.engine.engine_host import EngineHost
from cray_agents.runtime.pool.slot.golden_probe import LoadedVersion
from cray_agents.runtime.pool.slot.lora_adapters import Adapters
from cray_agents.runtime.pool.slot.slot_sleep import fall_asleep, wake_up
from cray_agents.runtime.pool.slot.slot_weights import SlotWeights

log = logging.getLogger(__name__)

_OTHERS_LOOK = 0.1  # seconds between two looks if other gateways' requests have ended
_RETRY = 30.0  # seconds until a successor that did not come is tried again


class SlotPlaces:
    """The places of one slot: the present one, its successor's, and those that are being left."""

    def __init__(self, slot: SlotWeights) -> None:
        self._slot = slot
        self._successor: EngineHost | None = None  # for the time after the present host's place
        self._moved = asyncio.Event()  # set when a successor took the host's part
        self._retiring: dict[asyncio.Task[None], EngineHost] = {}  # that end their last requests
        self._gives_back = False  # until its place is given back
        self._comes_back = False  # it was away, and is to be started
        self._slept: LoadedVersion | None = None  # with which it fell asleep on its place
        self._level = 0  # of that sleep

    def stay_away(self, loaded: LoadedVersion) -> None:
        """Take no place until `come_back`; the version is the one to start with then."""
        self._slot.expect(loaded)
        self._slot.set_state("away")

    @property
    def can_leave(self) -> bool:
        """True if the replica serves, and neither changes nor is about to move."""
        return (
            self._slot.state == "serving"
            and not self._slot.changing.locked()
            and self._successor is None
        )

    @property
    def asleep(self) -> int:
        """The level at which the replica sleeps on its place; 0: it does not."""
        return self._level if self._slot.state == "away" else 0

    def leave(self, *, sleep: bool = False) -> Coroutine[Any, Any, None]:
        """Answer no more requests; the coroutine gives the place back when the last one has ended.

        With `sleep` the replica then sleeps on its place, or gives it back if it cannot. Only for a
        slot that `can_leave`. A replica that dies meanwhile is brought back as ever, and then keeps
        its place.
        """
        self._gives_back = True
        self._slot.set_state("away")
        return self._leave(sleep)

    async def _leave(self, sleep: bool) -> None:
        try:
            while self._slot.in_flight and self._slot.state == "away":
                await self._slot.notifier.wait()
            async with self._slot.changing:
                if self._slot.state == "away" and not (sleep and await self._fall_asleep()):
                    await self._give_back()
        finally:
            self._gives_back = False

    async def _give_back(self) -> None:
        self._slept, self._level = None, 0
        self._slot.adapters.clear()
        await self._slot.engine_host.release()
        self._slot.notifier.notify()

    async def _fall_asleep(self) -> bool:
        loaded = self._slot.loaded
        if loaded is None:
            return False
        try:
            while await self._slot.refuse():  # noqa: ASYNC110 - other gateways' requests
                await asyncio.sleep(_OTHERS_LOOK)
            self._level = await fall_asleep(self._slot, loaded)
        except (CrayError, OSError) as error:
            log.warning("the replica of %s leaves, it does not sleep: %s", loaded.version, error)
            return False
        self._slept = loaded
        self._slot.notifier.notify()
        return True

    async def end_sleep(self) -> bool:
        """Give back the place of a replica that sleeps. Return False if it does not sleep."""
        if not self.asleep:  # what else changes it may hold `changing` for long
            return False
        async with self._slot.changing:
            if not self.asleep:
                return False
            await self._give_back()
            return True

    async def serve_again(self, loaded: LoadedVersion) -> None:
        """Wake the replica if it sleeps, else start it; the version serves once it is proven."""
        slept, level, self._slept, self._level = self._slept, self._level, None, 0
        if slept is not None and self._slot.engine_host.placed:
            self._slot.set_state("starting")
            try:
                self._slot.accept(loaded, await wake_up(self._slot, slept, loaded, level))
                return
            except (CrayError, OSError) as error:
                log.warning("%s did not wake up, and is started: %s", loaded.version, error)
        await self._slot.restore(loaded)

    def come_back(self) -> bool:
        """Start again, on a new place. Return False if the slot is not away, or not yet."""
        if self._slot.state != "away" or self._gives_back:
            return False
        self._comes_back = True
        self._slot.set_state("waiting")
        self._slot.lost.set()
        return True

    async def close(self) -> None:
        """End the replica, and give its places back."""
        self._slot.set_state("down")
        hosts = [self._slot.engine_host, *self._retiring.values()]
        hosts += [self._successor] if self._successor is not None else []
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(host.release() for host in hosts))

    async def find_place(self) -> bool:
        """Wait for a place where the replica has none. Return False if none is to be had yet."""
        async with self._slot.changing:  # a successor may be starting
            if self._slot.engine_host.placed or (loaded := self._slot.loaded) is None:
                return True
            if self._successor is not None:  # it waits for a place already
                self._move_to(self._successor, self._slot.adapters_of(self._successor))
            self._slot.set_state("waiting")
        try:
            await self._slot.engine_host.allocate()
        except (CrayError, OSError) as error:
            log.warning("the replica of %s has no place: %s", loaded.version, error)
            self._slot.mark_lost(str(error))
            return False
        self._slot.set_state("down")
        return True

    async def keep_place(self) -> None:
        """Have a successor ready before each place is left. Runs until cancelled."""
        while True:
            host = self._slot.engine_host
            leaving = asyncio.create_task(host.wait_until_leaving())
            moved = asyncio.create_task(self._moved.wait())
            ending = start_task("ending place", self._drain_ending_place(host))
            try:
                await asyncio.wait({leaving, moved}, return_when=asyncio.FIRST_COMPLETED)
                if not moved.done():
                    await self._hand_over(host)
            except (CrayError, OSError) as error:
                log.warning("%s has no successor yet: %s", self._slot.loaded, error)
                await asyncio.sleep(_RETRY)
            finally:
                for task in (leaving, moved, ending):
                    task.cancel()

    async def _hand_over(self, host: EngineHost) -> None:
        """Start and prove a successor, send it all further requests, and release the host.

        The host answers until then, and ends what it has begun.
        """
        if self._slot.state == "away":
            await self.end_sleep()
            return
        successor = self._successor = self._successor or host.successor()
        await successor.allocate()
        async with self._slot.changing:
            if self._slot.engine_host is not host or self._slot.loaded is None:
                return  # its place was lost, and keep_alive starts on the successor's
            loaded, adapters = self._slot.loaded, self._slot.adapters_of(successor)
            try:
                await successor.start(loaded.checkpoint, loaded.version)
                report = await self._slot.prove_on(successor.engine, loaded, {})
                await adapters.restore(loaded.beside, report)
            except BaseException:
                await successor.stop()
                raise
            self._move_to(successor, adapters)
            self._slot.accept(loaded, report)

    async def _drain_ending_place(self, host: EngineHost) -> None:
        """Send no more requests to a place that is about to be lost, so that its last ones end."""
        await host.wait_until_ending()
        async with self._slot.changing:
            if self._slot.engine_host is host and self._slot.state == "serving":
                self._slot.error = "its place is about to be taken away"
                self._slot.set_state("leaving")
                await self._slot.refuse()

    def _move_to(self, successor: EngineHost, adapters: Adapters) -> None:
        """Let a successor take the host's part."""
        former, self._slot.engine_host, self._successor = self._slot.engine_host, successor, None
        self._slot.adapters = adapters
        self._moved.set()
        self._moved = asyncio.Event()
        task = start_task("release of a place", former.release(drain=True))
        self._retiring[task] = former
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def wait_until_moved(self) -> None:
        """Return when a successor took the host's part."""
        await self._moved.wait()

    def take_call_back(self) -> bool:
        """Return True once after each `come_back`."""
        comes_back, self._comes_back = self._comes_back, False
        return comes_back
