"""A file into the store, in one of the FORMATS. Called by `cray-agents import`.

What can be read is imported, in groups, each durable before the next is read; what cannot is told
at the end, with its lines. Killed, or mended, the same import again adds what is missing.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import orjson

from cray_agents.errors import BadInput
from cray_agents.records import Event
from cray_agents.runtime.imports import atif, chats, jsonl, sharegpt
from cray_agents.runtime.imports.imported_run import Importing, Read
from cray_agents.runtime.imports.record_source import RecordSource, SourceRecord
from cray_agents.runtime.store import Store

TOLD = 20  # bad lines after which no more is read
GROUP = 512  # events appended at once, or a few more

FORMATS: Mapping[str, Read] = MappingProxyType(
    {"openai": chats.read, "sharegpt": sharegpt.read, "atif": atif.read, "jsonl": jsonl.read}
)


@dataclass(frozen=True)
class Imported:
    """What came of an import: runs and calls that are new, runs that were there already.

    A run that the file tells twice, with other metadata say, is one and a duplicate. One that was
    there and is told anew, with another tag say, is new. `forgotten` counts events of runs that
    were pruned here: they stay so until a compaction.
    """

    runs: int = 0
    duplicates: int = 0
    calls: int = 0
    forgotten: int = 0


Progress = Callable[[Imported, int, int], None]  # so far, and bytes of the file: read, in all


class BadRecords(BadInput):
    """A file holds what is no record of its format; the message names the lines."""

    code = "invalid_import_file"


def read_file(
    path: Path, form: str, importing: Importing | None = None, source: RecordSource | None = None
) -> Iterator[list[Event]]:
    """The events of each run of a file. Raises BadInput; BadRecords at the end, or after TOLD."""
    if form not in FORMATS:
        raise BadInput(f"format {form!r} is not known; valid: {', '.join(FORMATS)}", param="format")
    read, importing = FORMATS[form], importing or Importing()
    source = source or RecordSource(path)
    problems: list[str] = []
    count = 0
    for given in source.records():
        count += 1
        try:
            yield from _runs(read, given, importing)
        except BadInput as error:
            problems.append(f"{path}: {source.word} {given.number}: {error}")
            if len(problems) == TOLD:
                problems.append("... and nothing after that was read")
                break
    if problems:
        raise BadRecords("\n".join(problems), param="file")
    if not count:
        raise BadRecords(f"{path} holds no records", param="file")


def _runs(read: Read, given: SourceRecord, importing: Importing) -> list[list[Event]]:
    """All runs of a record, or none. Raises BadInput."""
    if given.problem is not None:
        raise BadInput(given.problem)
    try:
        runs = list(read(given.value, importing))
        for events in runs:
            for event in events:
                orjson.dumps(event.body)
    except (UnicodeEncodeError, TypeError) as error:  # half a character, a huge integer
        raise BadInput(f"holds what the store cannot: {error}") from error
    except RecursionError as error:
        raise BadInput("is too deeply nested") from error
    return runs


async def import_file(
    store: Store,
    path: Path,
    form: str,
    importing: Importing | None = None,
    on_progress: Progress | None = None,
) -> Imported:
    """Append the runs of a file to the store; those it has already are not doubled.

    Raises BadInput, which names what is wrong with the file; the rest of it is imported then.
    Raises StoreError.
    """
    source = RecordSource(path)
    runs = read_file(path, form, importing, source)
    await asyncio.to_thread(store.refresh)  # what others wrote is there already
    done, group, ended = Imported(), [], False
    counted: set[str] = set()  # runs of this import
    problem: BadRecords | None = None
    while not ended:
        try:
            group += next(runs)
        except StopIteration:
            ended = True
        except BadRecords as error:
            ended, problem = True, error
        if group and (ended or len(group) >= GROUP):
            done, group = await _append(store, group, done, counted), []
            if on_progress is not None:
                on_progress(done, source.done, source.size)
    if problem is not None:
        raise BadRecords(
            f"{problem}\n{done.runs} runs were imported, {done.duplicates} were there already; the "
            "same import of the mended file adds the rest",
            param="file",
        )
    return done


async def _append(store: Store, group: list[Event], done: Imported, counted: set[str]) -> Imported:
    fresh = {event.id: event for event in group if not store.has(event.id)}
    appended = await store.append(group)
    told = [event.kind for event in fresh.values()]
    described = sum(event.kind == "run" for event in group)
    runs = {event.run_id for event in fresh.values() if event.kind == "run"} - counted
    counted |= runs
    return replace(
        done,
        runs=done.runs + len(runs),
        duplicates=done.duplicates + described - len(runs),
        calls=done.calls + told.count("call"),
        forgotten=done.forgotten + len(fresh) - appended.appended,
    )
