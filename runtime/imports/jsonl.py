"""`jsonl`: whole records, as `export --format jsonl` wrote them, calls with their tokens included.

A run comes back under its own name. Listed in importing.py.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from cray_agents.records import Event, Run
from cray_agents.runtime.imports.imported_run import (
    Importing,
    an_object,
    calls_of,
    events_of,
    invalid,
)


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """The run of a record. Raises BadInput."""
    try:
        run = Run.model_validate(an_object(value))
    except ValidationError as error:
        raise invalid(error) from error
    calls_of(run, run.trajectory.turns)
    yield events_of(run, importing)
