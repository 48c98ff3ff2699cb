"""Phase seconds: measure the phases of a replica's change. Used by replica_slot.py and others."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record the seconds that the block takes as `seconds[phase]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = time.perf_counter() - started
