"""ATIF 1.x: read a trajectory document as a run, and each subagent's document within it too.

Steps become messages, with tool results after them. A step with exact tokens becomes a model call
as well, unless it counts several calls: its tokens belong to all of them. A document that this
platform exported keeps its id and all its fields, but is marked as imported. Listed in
import_file.py; runtime/exports/formats/atif.py is the writer, atif_steps.py reads the steps.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import Event, ModelCall, Run, StopReason, Task, Trajectory, Turn
from cray_agents.runtime.imports.atif_steps import Step, StepConversation, require_objects, step_of
from cray_agents.runtime.imports.imported_run import (
    IMPORTED,
    Importing,
    as_bad_input,
    check_call_owners,
    events_of,
    first_question,
    imported_run_id,
    last_answer,
    require_object,
)

FORM = "atif"
_UNKNOWN = "unknown"  # our own export's word for a required field without a value
_NOT_FIELDS = {"reward", "other_turns"}  # keys of our own `extra` that are no fields of a run


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """Yield the runs of a document: its own, and those of its subagents. Raises BadInput."""
    document = require_object(value)
    version = document.get("schema_version")
    if not isinstance(version, str) or not version.startswith("ATIF-v1."):
        raise BadInput(f"schema_version is {version!r}; what can be read is ATIF-v1.x")
    yield events_of(_run(document), importing)
    for subagent in require_objects(document.get("subagent_trajectories"), "subagent_trajectories"):
        yield from read({"schema_version": version, **subagent}, importing)


def _run(document: dict[str, Any]) -> Run:
    agent = require_object(document.get("agent"), "agent")
    values = document.get("steps")
    if not isinstance(values, list) or not values:
        raise BadInput("steps must be a list that is not empty")
    tools = require_objects(agent.get("tool_definitions"), "agent.tool_definitions")
    steps = [step_of(value, f"steps[{index}]") for index, value in enumerate(values)]
    extra = document.get("extra") or {}
    if isinstance(extra, dict) and "stop_reason" in extra and "input" in extra:
        return _own_run(document, agent, extra, tools, steps)
    return _foreign_run(document, agent, tools, steps)


def _own_run(
    document: dict[str, Any],
    agent: dict[str, Any],
    extra: dict[str, Any],
    tools: list[dict[str, Any]],
    steps: list[Step],
) -> Run:
    run_id = document.get("session_id")
    offered = (agent.get("extra") or {}).get("tools", tools)
    conversation = StepConversation(
        str(run_id), str(agent.get("model_name") or ""), offered, own=True
    )
    for step in steps:
        conversation.add(step)
    fields = {name: value for name, value in extra.items() if name not in _NOT_FIELDS}
    try:
        unplaced = [Turn.model_validate(turn) for turn in extra.get("other_turns") or ()]
        turns = _sort_turns([*conversation.turns, *unplaced]) if unplaced else conversation.turns
        trajectory = Trajectory(
            messages=conversation.messages,
            turns=turns,
            tools=[] if any(turn.call is not None for turn in turns) else offered,
        )
        run = Run.model_validate(
            {
                **fields,
                "id": run_id,
                "agent": "" if agent.get("name") == _UNKNOWN else agent.get("name"),
                "model": agent.get("model_name") or "",
                "imported": fields.get("imported") or FORM,
            }
        )
    except ValidationError as error:
        raise as_bad_input(error) from error
    check_call_owners(run, turns)
    return run.model_copy(update={"trajectory": trajectory})


def _sort_turns(turns: list[Turn]) -> list[Turn]:
    """Sort turns by the start of their calls; turns without a known call come last."""
    last = float("inf")
    return sorted(turns, key=lambda turn: turn.call.started if turn.call is not None else last)


def _foreign_run(
    document: dict[str, Any], agent: dict[str, Any], tools: list[dict[str, Any]], steps: list[Step]
) -> Run:
    model = agent.get("model_name")
    model = model if isinstance(model, str) and model else IMPORTED
    # runs with the same messages are told apart by their tokens
    tokens = [step.metrics for step in steps if step.metrics]
    plain = StepConversation("", model, tools, own=False)
    for step in steps:
        plain.add(replace(step, metrics={}))
    run_id = imported_run_id(plain.messages, tools, *([tokens] if tokens else ()))
    conversation = StepConversation(run_id, model, tools, own=False)
    for step in steps:
        conversation.add(step)
    question = first_question(conversation.messages)
    started, ended = _time_span(steps, conversation)
    return Run(
        id=run_id,
        agent=str(agent.get("name") or IMPORTED),
        model=model,
        input=question,
        output=last_answer(conversation.messages),
        stop_reason=StopReason.completed,
        trajectory=Trajectory(
            messages=conversation.messages, turns=conversation.turns, tools=tools
        ),
        task=Task(input=question, metadata=_task_metadata(document, agent)),
        started=started or time.time(),
        seconds=max(0.0, ended - started) if started else 0.0,
        imported=FORM,
    )


def _time_span(steps: list[Step], conversation: StepConversation) -> tuple[float, float]:
    times = [step.time for step in steps if step.time]
    calls: list[ModelCall] = [turn.call for turn in conversation.turns if turn.call is not None]
    ends = [call.started + call.seconds for call in calls if call.started]
    return (min(times), max([*times, *ends])) if times else (0.0, 0.0)


def _task_metadata(document: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
    """Return the document's fields besides the conversation, for the task's metadata."""
    names = ("session_id", "trajectory_id", "notes", "extra", "final_metrics")
    metadata = {name: document[name] for name in names if document.get(name) is not None}
    if agent.get("version"):
        metadata["agent_version"] = agent["version"]
    return metadata
