"""Turns: long work of clients in pieces, between which it gives way to others' and may end.

Used where threads read, scan or copy for long; gateway/http/client_work.py shares out the turns.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from cray_agents.errors import StoreError

#: Gives way to others' work, and tells whether nobody waits for this context's any more.
TURN: ContextVar[Callable[[], bool] | None] = ContextVar("turn", default=None)
INLINE = 2**17  # bytes that are parsed, walked or written on the event loop: a few ms at worst
_STEPS = 10_000  # of SQLite between two looks at it: under a millisecond


T = TypeVar("T")


class ReadGivenUp(StoreError):
    """Nobody waits for the answer any more."""


def between_pieces() -> None:
    """Give way to others' work. Raises ReadGivenUp. Call without holding a lock."""
    turn = TURN.get()
    if turn is not None and turn():
        raise ReadGivenUp("nobody waits for this answer any more")


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """Return what `work(*args)` returns; a thread calls it where `size`, in bytes, is large."""
    return work(*args) if size <= INLINE else await asyncio.to_thread(work, *args)


@contextmanager
def undivided() -> Iterator[None]:
    """Do what follows in one piece, as under a lock that others wait for."""
    token = TURN.set(None)
    try:
        yield
    finally:
        TURN.reset(token)


@contextmanager
def statements_in_pieces(connection: sqlite3.Connection) -> Iterator[None]:
    """Give way during this context's statements, and end them with it. Raises ReadGivenUp."""
    turn = TURN.get()
    if turn is None:
        yield
        return
    connection.set_progress_handler(turn, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        raise ReadGivenUp("nobody waits for this answer any more") from None
    finally:
        connection.set_progress_handler(None, 0)
