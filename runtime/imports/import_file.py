"""Import a file in one of the FORMATS into the store. Called by `cray-agents import`.

Readable records are imported in groups, each durable before the next is read. The error at the end
names the lines of the others. After a kill, or for a corrected file, the same import adds the rest.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.messages import first_question
from cray_agents.records import Event, Message, Reward, Task, digest
from cray_agents.runtime.fine_tuning.examples import parse_example
from cray_agents.runtime.imports import atif, sharegpt, whole_runs
from cray_agents.runtime.imports.imported_run import (
    SOURCE,
    Importing,
    Read,
    conversation_events,
    require_object,
)
from cray_agents.runtime.store import Store
from cray_agents.tasks.record_source import RecordSource, SourceRecord

MAX_PROBLEMS = 20  # bad lines after which reading stops
GROUP = 512  # events appended at once; a run's are not split, so it may be a few more

# ---- OpenAI's fine-tuning files: read chats and preferences, checked as fine-tuning checks them
# A chat is {"messages", "tools"?, "parallel_tool_calls"?}; other fields of a line become its task's
# metadata. A preference is {"input": {"messages", "tools"?}, "preferred_output",
# "non_preferred_output"}: two runs on one task, with the rewards 1 and 0. Only their outputs are
# trained on.
_CHAT = ("messages", "tools", "parallel_tool_calls")
_SIDES = {"preferred_output": 1.0, "non_preferred_output": 0.0}  # side: reward


def read_chat(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a chat, or the two runs of a preference. Raises BadInput."""
    record = require_object(value)
    if any(side in record for side in _SIDES):
        yield from _preference(record, importing)
        return
    chat = parse_example(0, {name: record[name] for name in _CHAT if name in record})
    more = {name: item for name, item in record.items() if name not in _CHAT}
    yield conversation_events("openai", chat.messages, importing, tools=chat.tools, metadata=more)


def _preference(record: dict[str, Any], importing: Importing) -> Iterator[list[Event]]:
    question = require_object(record.get("input"), "input")
    prompt = question.get("messages")
    if not isinstance(prompt, list) or not prompt:
        raise BadInput("input.messages must be a list that is not empty")
    if record.get("preferred_output") == record.get("non_preferred_output"):
        raise BadInput("preferred_output and non_preferred_output are the same")
    more = {name: item for name, item in record.items() if name not in ("input", *_SIDES)}
    sides = []
    for side, value in _SIDES.items():
        answer = record.get(side)
        if not isinstance(answer, list) or not answer:
            raise BadInput(f"{side} must be a list that is not empty")
        chat = parse_example(0, {**question, "messages": [*prompt, *answer]})
        # the task is the whole prompt, since pairs are made of runs on one task
        context = chat.messages[: len(prompt)]
        name = digest([context, chat.tools])
        task = Task(input=first_question(chat.messages), metadata=more, id=name)
        reward = Reward(name="preferred", value=value, source=SOURCE)
        messages = [*map(_untrained, context), *chat.messages[len(prompt) :]]
        sides.append(
            conversation_events(
                "openai", messages, importing, tools=chat.tools, rewards=[reward], task=task
            )
        )
    yield from sides


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


FORMATS: Mapping[str, Read] = MappingProxyType(
    {
        "openai": read_chat,
        "sharegpt": sharegpt.read,
        "atif": atif.read,
        "jsonl": whole_runs.read_run,
        "openenv": whole_runs.read_trace,
    }
)


@dataclass(frozen=True)
class Imported:
    """Counts of an import: new runs, runs already stored, new calls, and forgotten events.

    A run that stands twice in the file, as with other metadata, is one new run and one duplicate. A
    stored run with a new label, such as another tag, is new. `forgotten` counts events of runs
    that were pruned here; they stay pruned until a compaction. In `replaced` records half a
    character, which no text can hold, became "?".
    """

    runs: int = 0
    duplicates: int = 0
    calls: int = 0
    forgotten: int = 0
    replaced: int = 0


Progress = Callable[[Imported, int, int], None]  # counts so far; bytes of the file: read, in all


class BadRecords(BadInput):
    """Invalid records in a file; the message names their lines."""

    code = "invalid_import_file"


def read_file(
    path: Path, form: str, importing: Importing | None = None, source: RecordSource | None = None
) -> Iterator[list[Event]]:
    """Yield the events of each run of a file.

    Raises BadInput, and BadRecords at the end or after MAX_PROBLEMS bad lines.
    """
    if form not in FORMATS:
        raise BadInput(f"format {form!r} is not known; valid: {', '.join(FORMATS)}", param="format")
    read, importing = FORMATS[form], importing or Importing()
    source = source or RecordSource(path)
    problems: list[str] = []
    count = 0
    for record in source.records():
        count += 1
        try:
            yield from _runs(read, record, importing)
        except BadInput as error:
            problems.append(f"{path}: {source.word} {record.number}: {error}")
            if len(problems) == MAX_PROBLEMS:
                problems.append("... and nothing after that was read")
                break
    if problems:
        raise BadRecords("\n".join(problems), param="file")
    if not count:
        raise BadRecords(f"{path} holds no records", param="file")


def _runs(read: Read, record: SourceRecord, importing: Importing) -> list[list[Event]]:
    """Return the events of all runs of a record. Raises BadInput if one is invalid."""
    if record.problem is not None:
        raise BadInput(record.problem)
    try:
        runs = list(read(record.value, importing))
        for events in runs:
            for event in events:
                dump_json(event.body)
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
    """Append the runs of a file to the store; stored runs are not doubled.

    Raises BadInput naming the problems of the file; the rest of it is imported before. Raises
    StoreError.
    """
    source = RecordSource(path)
    runs = read_file(path, form, importing, source)
    await asyncio.to_thread(store.refresh)  # sees events that other processes wrote
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
            f"{problem}\n{done.runs} runs were imported, {done.duplicates} were there, or twice in "
            "it; the same import of the mended file adds the rest",
            param="file",
        )
    return replace(done, replaced=source.replaced)


async def _append(store: Store, group: list[Event], done: Imported, counted: set[str]) -> Imported:
    fresh = {event.id: event for event in group if not store.has(event.id)}
    appended = await store.append(group)
    calls = sum(event.kind == "call" for event in fresh.values())
    records = sum(event.kind == "run" for event in group)
    runs = {event.run_id for event in fresh.values() if event.kind == "run"} - counted
    counted |= runs
    return replace(
        done,
        runs=done.runs + len(runs),
        duplicates=done.duplicates + records - len(runs),
        calls=done.calls + calls,
        forgotten=done.forgotten + len(fresh) - appended.appended,
    )
