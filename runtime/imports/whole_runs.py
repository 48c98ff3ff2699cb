"""Whole runs with the exact tokens of their calls: `jsonl`, and `openenv`'s TrainingTrace.

A run of `export --format jsonl` keeps its id. Of a trace, each turn becomes a model call with its
tokens as they are. A turn whose mask leaves out its whole completion keeps no tokens, so nothing of
it can be trained on; a mask of a part of a completion is refused, as calls here have none. A trace
that this platform exported keeps its run's id and fields, but is marked as imported. Listed in
import_file.py; runtime/exports/formats/jsonl.py is the writer.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.messages import first_question
from cray_agents.records import Event, ModelCall, Run, StopReason, Task, Trajectory, Turn
from cray_agents.runtime.imports.imported_run import (
    IMPORTED,
    Importing,
    as_bad_input,
    events_of,
    imported_run_id,
    last_answer,
    require_object,
)


def read_run(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a record. Raises BadInput."""
    try:
        run = Run.model_validate(require_object(value))
    except ValidationError as error:
        raise as_bad_input(error) from error
    for call in run.calls:
        if call.run_id != run.id:
            raise BadInput(f"call {call.id!r} is of run {call.run_id!r}, not of {run.id!r}")
    yield events_of(run, importing)


SCHEMA_VERSION = 1
_RUN_FIELDS = ("agent", "task", "rewards", "stop_reason", "tags")  # of our own metadata


def read_trace(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the run of a trace. Raises BadInput."""
    trace = require_object(value)
    if (version := trace.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise BadInput(f"schema_version is {version!r}; what can be read is {SCHEMA_VERSION}")
    turns = trace.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadInput("turns must be a list that is not empty")
    try:
        yield events_of(
            _run([_checked(turn, f"turns[{n}]") for n, turn in enumerate(turns)]), importing
        )
    except ValidationError as error:
        raise as_bad_input(error) from error


def _run(turns: list[dict[str, Any]]) -> Run:
    about = turns[0]["metadata"]
    own = isinstance(about.get("run"), str) and "stop_reason" in about
    tokens = [
        [turn[name] for name in ("prompt_token_ids", "completion_token_ids")] for turn in turns
    ]
    run_id = about["run"] if own else imported_run_id([], [], tokens, [t["node_id"] for t in turns])
    names = [turn["node_id"] if own else f"{run_id}.{n}" for n, turn in enumerate(turns)]
    if len(set(names)) < len(names):
        raise BadInput("two turns have the same node_id")
    calls = [_call(turn, name, run_id) for turn, name in zip(turns, names, strict=True)]
    messages = [*calls[-1].messages, calls[-1].message]
    question = first_question(messages)
    fields = {name: about[name] for name in _RUN_FIELDS if own and about.get(name) is not None}
    return Run.model_validate(
        {
            "agent": IMPORTED,
            "stop_reason": StopReason.completed,
            "task": None if own else Task(input=question),
            **fields,
            "id": run_id,
            "model": calls[-1].model,
            "input": question,
            "output": last_answer(messages),
            "trajectory": Trajectory(
                messages=messages, turns=[Turn(call_id=call.id, call=call) for call in calls]
            ),
            "started": time.time(),
            "imported": "openenv",
        }
    )


def _call(turn: dict[str, Any], name: str, run_id: str) -> ModelCall:
    request, response = dict(turn["request"]), turn["response"]
    learned = any(turn["loss_mask"])
    return ModelCall(
        id=name,
        run_id=run_id,
        model=str(turn["metadata"].get("model") or request.pop("model", None) or IMPORTED),
        messages=request.pop("messages", None) or [],
        tools=request.pop("tools", None) or [],
        message=response.get("message") or {},
        finish_reason=response.get("finish_reason"),
        sampling=request,
        prompt_token_ids=turn["prompt_token_ids"] if learned else [],
        token_ids=turn["completion_token_ids"] if learned else [],
        logprobs=turn["per_token_logps"] if learned else [],
    )


def _checked(value: Any, at: str) -> dict[str, Any]:
    """Return a turn whose fields are what OpenEnv's schema says. Raises BadInput."""
    turn = {name: {} for name in ("request", "response", "metadata")} | require_object(value, at)
    for name in ("request", "response", "metadata"):
        require_object(turn[name], f"{at}.{name}")
    if not isinstance(turn.get("node_id"), str) or not turn["node_id"]:
        raise BadInput(f"{at}.node_id must be a text that is not empty")
    prompt, sampled = (
        _integers(turn.get(name), f"{at}.{name}")
        for name in ("prompt_token_ids", "completion_token_ids")
    )
    logprobs = turn.get("per_token_logps")
    if not isinstance(logprobs, list) or len(logprobs) != len(sampled):
        raise BadInput(f"{at}.per_token_logps must have a number for each completion token")
    if not all(_is_number(each) for each in logprobs):
        raise BadInput(f"{at}.per_token_logps must be finite numbers")
    mask = _integers(turn.get("loss_mask"), f"{at}.loss_mask")
    if mask not in ([0] * len(prompt) + [bit] * len(sampled) for bit in (0, 1)):
        raise BadInput(
            f"{at}.loss_mask must be 0 for each prompt token, and either 1 or 0 for all completion "
            "tokens: a part of a completion cannot be left out here"
        )
    return turn


def _integers(value: Any, at: str) -> list[int]:
    fits = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not fits:
        raise BadInput(f"{at} must be a list of whole numbers from 0 on")
    return list(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
