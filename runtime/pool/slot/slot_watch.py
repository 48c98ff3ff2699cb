"""Slot watch: notice that a replica is lost or silent, and bring it back."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from cray_agents.errors import EngineError, EngineTimeout
from cray_agents.runtime.pool.slot.slot_places import SlotPlaces
from cray_agents.runtime.pool.slot.slot_weights import SlotWeights

log = logging.getLogger(__name__)

_LIVENESS_CHECKS = 4  # within the seconds that a replica may be silent
_BACKOFF = (0.2, 30.0)  # seconds before the first restart, and at most before any
_OUT_BACKOFF = (10.0, 600.0)  # ... of a replica that was left out


class SlotWatch:
    """The restarts of one slot: their number, and the last one."""

    def __init__(self, slot: SlotWeights, places: SlotPlaces) -> None:
        self.restarts = 0
        self.last_restart: dict[str, Any] | None = None
        self._slot = slot
        self._places = places
        self._restarting = False

    async def keep_alive(self) -> None:
        """Bring the replica back whenever it is lost or left out. Runs until cancelled."""
        while True:
            if not self._restarting:  # else this task itself had failed
                await self._wait_until_lost()
            self._restarting = True
            comes_back = self._places.take_call_back()
            if not comes_back and await self._places.end_sleep():
                log.warning("a replica that slept has ended, and stays away")
                self._restarting = False
                continue
            if not comes_back:
                self._note_loss()
            delay, most = _OUT_BACKOFF if self._slot.state == "out" else _BACKOFF
            while True:
                await self._wait_while_lost(delay)
                if not await self._places.find_place():
                    delay = min(delay * 2, most)
                    continue
                async with self._slot.changing:
                    if self._slot.state == "serving" or self._slot.loaded is None:
                        break  # a swap has put a fresh process there
                    self.restarts += not comes_back
                    await self._places.serve_again(self._slot.loaded)
                    if not comes_back:
                        self._note_restart()
                    comes_back = False
                delay = min(delay * 2, most)
            self._restarting = False

    def fail_start(self, why: str) -> None:
        """Let `keep_alive` go on with a first start that failed."""
        self._slot.mark_lost(why)

    async def watch_for_silence(self, silence: float) -> None:
        """Restart a serving replica that was silent for `silence` seconds. Runs until cancelled.

        The engine is checked several times, whether or not it answers requests. A moment in which
        this process itself stood still then does not count as silence.
        """
        silent, pause = 0, silence / _LIVENESS_CHECKS
        while True:
            await asyncio.sleep(0 if silent else pause)
            since, began = self._slot.losses, time.monotonic()
            if self._slot.state != "serving":
                silent = 0
                await asyncio.sleep(pause)
                continue
            try:
                async with asyncio.timeout(pause):
                    await self._slot.engine_host.check_alive()
                silent = 0
            except (TimeoutError, EngineTimeout):
                silent += 1
            except EngineError as error:
                if isinstance(error.__cause__, TimeoutError):  # it takes no connection
                    silent += 1
                    await asyncio.sleep(began + pause - time.monotonic())
                else:
                    silent = 0
                if error.status >= 500:  # without a status the process has ended: see keep_alive
                    self._slot.fail(since, str(error))
            if silent == _LIVENESS_CHECKS - 1:
                silent = 0
                self._slot.fail(since, f"it said nothing for {silence:g} s (silence_timeout)")

    def _note_loss(self) -> None:
        slot = self._slot
        death_reason = slot.engine_host.death_reason()
        reasons = [slot.error] if slot.lost.is_set() and slot.error else []
        if death_reason and death_reason not in str(slot.error):
            reasons.append(death_reason)
        slot.why_lost = ": ".join(reasons) or "its process ended"
        slot.losses += 1
        self.last_restart = {"time": time.time(), "why": slot.why_lost, "seconds": None}
        if slot.state in ("serving", "leaving"):
            slot.error = slot.why_lost
            slot.state = "down"
        slot.notifier.notify()
        if slot.loaded is not None and slot.state != "out":
            log.warning("the replica of %s is lost: %s", slot.loaded.version, slot.why_lost)

    def _note_restart(self) -> None:
        slot = self._slot
        if slot.loaded is None or self.last_restart is None:
            return
        if slot.state != "serving":
            log.warning(
                "restart %d of %s failed: %s",
                self.restarts,
                slot.loaded.version,
                slot.error,
            )
            return
        self.last_restart["seconds"] = time.time() - self.last_restart["time"]
        log.warning(
            "restart %d: a replica serves %s again after %.1f s",
            *(self.restarts, slot.loaded.version, self.last_restart["seconds"]),
        )

    async def _wait_while_lost(self, seconds: float) -> None:
        """Return after `seconds`, or earlier when a swap has begun to repair the slot."""
        slot = self._slot
        with suppress(TimeoutError):
            await slot.notifier.wait_until(lambda: slot.state not in ("down", "out"), seconds)

    async def _wait_until_lost(self) -> None:
        """Return when the process has died, or when the slot was marked lost."""
        while True:
            moved = asyncio.create_task(self._places.wait_until_moved())
            waits = {
                asyncio.create_task(self._slot.engine_host.wait_until_dead()),
                asyncio.create_task(self._slot.lost.wait()),
                moved,
            }
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
            if done != {moved}:
                return
