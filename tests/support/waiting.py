"""Waiting for what has no event, also on a machine that has much else to do."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T]) -> T:
    """Wait until something is true; return it."""
    async with asyncio.timeout(180):
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


def wait_until(
    condition: Callable[[], T],
    why: Callable[[], str] = lambda: "it did not happen in time",
    seconds: float = 300.0,
) -> T:
    """Wait, without an event loop, until something is true; return it. `why` says why it is not."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
    return found
