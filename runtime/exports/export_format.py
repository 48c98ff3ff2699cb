"""LineFormat: turn a run, or a pair of runs, into records and codes of losses.

A format's module defines a LineFormat and knows nothing of files; exports/exporter.py lists all. A
run that a format cannot carry is the error `unsupported_export`. Anything else left out is a loss,
named by a code that losses.py explains in a sentence. Used by all formats.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.records import Run

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store

Json = dict[str, Any]


class Item(NamedTuple):
    """A run, or the better and the worse run of a pair, to be written.

    `covers` is the number of runs or pairs that it counts as. `lost` holds the losses known before
    writing, as (code, count). An item without runs writes nothing.
    """

    runs: tuple[Run, ...]
    covers: int = 1
    lost: tuple[tuple[str, int], ...] = ()


class Written(NamedTuple):
    """The records of a run or a pair, one per line, and the codes of their losses."""

    records: list[Json]
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnePage:
    """A file that is one page: what it begins with, and how a record stands in it.

    `head` returns the beginning; it raises SetupError where this installation lacks it. When the
    file has `most_bytes`, it ends with `full` instead of further runs.
    """

    head: Callable[[], bytes]
    encode: Callable[[Run, Json], bytes]
    most_bytes: int
    full: bytes


@dataclass(frozen=True)
class LineFormat:
    """A format whose file is records, one after the other: JSON lines, unless it is a `page`.

    It has `write_run`, `write_pair` or `with_store`. `about` describes its contents in a sentence.
    `write_run` gets a whole run with its calls. `write_pair` gets the better and the worse of two
    runs on one task. `with_store` returns a `write_run` that reads more of the runs' store. All
    raise BadInput with the code unsupported_export for a run that the format cannot carry. `pack`
    makes the file of the lines, where a file of lines is not the format itself.
    """

    name: str
    title: str
    about: str
    write_run: Callable[[Run], Written] | None = None
    write_pair: Callable[[Run, Run], Written] | None = None
    with_store: Callable[["Store"], Callable[[Run], Written]] | None = None
    suffix: str = ".jsonl"
    page: OnePage | None = None
    pack: Callable[[Iterable[bytes], Path], None] | None = None


def unsupported(run: Run, field: str, problem: str) -> BadInput:
    """Return the error of a run that a format cannot carry, naming the field and the problem."""
    return BadInput(
        f"run {run.id} cannot be exported: {field} {problem}",
        param=field,
        code="unsupported_export",
    )


def line_of(run: Run, record: Json) -> bytes:
    """Return a record as a line without its newline. Raises BadInput if JSON cannot carry it."""
    return _encode(run, "a value", record)


def json_text(run: Run, field: str, value: Any) -> str:
    """Return a value as JSON text. Raises BadInput if JSON cannot carry it."""
    return _encode(run, field, value).decode()


def _encode(run: Run, field: str, value: Any) -> bytes:
    try:
        return dump_json(value)
    except TypeError as error:  # a lone surrogate, an integer beyond 64 bits
        raise unsupported(run, field, f"has no form in JSON: {error}") from error
