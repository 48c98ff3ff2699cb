"""`jsonl`: read whole records of `export --format jsonl`, with the exact tokens of their calls.

A run keeps its id. Listed in import_file.py.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from cray_agents.records import Event, Run
from cray_agents.runtime.imports.imported_run import (
    Importing,
    as_bad_input,
    check_call_owners,
    events_of,
    require_object,
)


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a record. Raises BadInput."""
    try:
        run = Run.model_validate(require_object(value))
    except ValidationError as error:
        raise as_bad_input(error) from error
    check_call_owners(run, run.trajectory.turns)
    yield events_of(run, importing)
