"""Reads that may be given up: their statements end soon after nobody waits for the answer.

Used by database.py; gateway/long_reads.py sets the event.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cray_agents.errors import StoreError

#: The event that gives up the reads of this context.
GIVE_UP: ContextVar[threading.Event | None] = ContextVar("give_up", default=None)
_STEPS = 10_000  # of SQLite between two looks at it: under a millisecond


class ReadGivenUp(StoreError):
    """Nobody waits for the answer any more."""


@contextmanager
def ending_given_up(connection: sqlite3.Connection) -> Iterator[None]:
    """End this context's statements when it is given up. Raises ReadGivenUp."""
    event = GIVE_UP.get()
    if event is None:
        yield
        return
    connection.set_progress_handler(event.is_set, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        raise ReadGivenUp("nobody waits for this answer any more") from None
    finally:
        connection.set_progress_handler(None, 0)
