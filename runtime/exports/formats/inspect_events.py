"""Inspect events: a run's calls of models and tools as the transcript that Inspect View shows.

A call names the messages it saw by ranges in a pool, where each different message is once, as
Inspect's own writer does: else a run of n turns would take n² space. Called by inspect_eval.py.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json, sent_arguments
from cray_agents.records import Message, ModelCall, Run, ToolCall
from cray_agents.runtime.exports.export_format import Json
from cray_agents.runtime.exports.formats.inspect_messages import (
    MessageWriter,
    count_tokens,
    write_output,
)


def write_events(run: Run, losses: set[str]) -> tuple[list[Json], list[Json]]:
    """Return the events of a run's turns, and the pool of their messages.

    A call with messages that the format cannot carry is left out.
    """
    pool = _Pool(MessageWriter(run, losses))
    events: list[Json] = []
    for number, turn in enumerate(run.trajectory.turns):
        ended = run.started
        if turn.call is not None:
            ended = turn.call.started + turn.call.seconds
            try:
                events.append(_model_event(run, turn.call, f"turns[{number}]", pool))
            except BadInput:
                losses.add("other_calls")
        events += (_tool_event(run, call, ended) for call in turn.tool_calls)
    return events, pool.messages


def iso_time(seconds: float) -> str:
    """Return unix seconds as Inspect writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class _Pool:
    """Different messages of a run, in the order in which calls first saw them."""

    def __init__(self, writer: MessageWriter) -> None:
        self.writer = writer
        self.messages: list[Json] = []
        self._places: dict[bytes, int] = {}

    def ranges(self, path: str, messages: Sequence[Message], model: str) -> list[list[int]]:
        """Return where messages are, as ranges [start, end)."""
        ranges: list[list[int]] = []
        for index, message in enumerate(messages):
            place = self._place(f"{path}.messages[{index}]", message, model)
            if ranges and ranges[-1][1] == place:
                ranges[-1][1] += 1
            else:
                ranges.append([place, place + 1])
        return ranges

    def _place(self, path: str, message: Message, model: str) -> int:
        key = dump_json(message, sort_keys=True)
        if key not in self._places:
            self.messages.append(self.writer.write(path, message, model))
            self._places[key] = len(self.messages) - 1
        return self._places[key]


def _model_event(run: Run, call: ModelCall, path: str, pool: _Pool) -> Json:
    ranges = pool.ranges(path, call.messages, call.model)
    answer = pool.writer.write(f"{path}.message", call.message, call.model)
    usage = count_tokens(len(call.prompt_token_ids), len(call.token_ids))
    return {
        "event": "model",
        "uuid": call.id,
        "timestamp": iso_time(call.started),
        "working_start": max(0.0, call.started - run.started),
        "model": call.model,
        "input": [],
        "input_refs": ranges,
        "tools": [],
        "tool_choice": "auto",
        "config": {},
        "output": write_output(call.model, answer, call.finish_reason, usage),
        "completed": iso_time(call.started + call.seconds),
        "working_time": call.seconds,
    }


def _tool_event(run: Run, call: ToolCall, started: float) -> Json:
    result: Any = call.result
    event: Json = {
        "event": "tool",
        "id": call.id,
        "function": call.name,
        "arguments": sent_arguments(call.arguments),
        "result": result if isinstance(result, str) else dump_json(result).decode(),
        "timestamp": iso_time(started),
        "working_start": max(0.0, started - run.started),
    }
    if call.error:
        event["error"] = {"type": "unknown", "message": call.error}
    return event
