"""ATIF, versions 1.0 to 1.x: a trajectory document is a run, and so is each subagent's within it.

Steps become messages, with the results of tools after them. A step with exact tokens becomes a
model call as well; one of several calls at once does not, for its tokens are of all of them. What
this platform exported comes back as it was, under its own name, but marked as imported.
Listed in importing.py; what is written is in runtime/exports/atif.py. A step: atif_steps.py.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import Event, ModelCall, Run, StopReason, Task, Trajectory, Turn
from cray_agents.runtime.imports.atif_steps import Step, StepConversation, objects, step_of
from cray_agents.runtime.imports.imported_run import (
    IMPORTED,
    Importing,
    an_object,
    calls_of,
    events_of,
    first_asked,
    invalid,
    last_said,
    run_name,
)

FORM = "atif"
_UNKNOWN = "unknown"  # what our own export writes where the schema requires a word
_NOT_FIELDS = {"reward", "other_turns"}  # of our own `extra`: all else are fields of the run


def read(value: Any, importing: Importing) -> Iterator[list[Event]]:
    """The runs of a document: its own, and those of its subagents. Raises BadInput."""
    document = an_object(value)
    version = document.get("schema_version")
    if not isinstance(version, str) or not version.startswith("ATIF-v1."):
        raise BadInput(f"schema_version is {version!r}; what can be read is ATIF-v1.x")
    yield events_of(_run(document), importing)
    for subagent in objects(document.get("subagent_trajectories"), "subagent_trajectories"):
        yield from read({"schema_version": version, **subagent}, importing)


def _run(document: dict[str, Any]) -> Run:
    agent = an_object(document.get("agent"), "agent")
    given = document.get("steps")
    if not isinstance(given, list) or not given:
        raise BadInput("steps must be a list that is not empty")
    tools = objects(agent.get("tool_definitions"), "agent.tool_definitions")
    steps = [step_of(step, f"steps[{place}]") for place, step in enumerate(given)]
    about = document.get("extra") or {}
    if isinstance(about, dict) and "stop_reason" in about and "input" in about:
        return _ours(document, agent, about, tools, steps)
    return _foreign(document, agent, tools, steps)


def _ours(
    document: dict[str, Any],
    agent: dict[str, Any],
    about: dict[str, Any],
    tools: list[dict[str, Any]],
    steps: list[Step],
) -> Run:
    run_id = document.get("session_id")
    offered = (agent.get("extra") or {}).get("tools", tools)
    told = StepConversation(str(run_id), str(agent.get("model_name") or ""), offered, named=True)
    for step in steps:
        told.add(step)
    fields = {name: value for name, value in about.items() if name not in _NOT_FIELDS}
    try:
        others = [Turn.model_validate(turn) for turn in about.get("other_turns") or ()]
        turns = _in_order([*told.turns, *others]) if others else told.turns
        known = Trajectory(
            messages=told.messages,
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
        raise invalid(error) from error
    calls_of(run, turns)
    return run.model_copy(update={"trajectory": known})


def _in_order(turns: list[Turn]) -> list[Turn]:
    """The turns by the start of their calls; those whose calls are unknown come last."""
    last = float("inf")
    return sorted(turns, key=lambda turn: turn.call.started if turn.call is not None else last)


def _foreign(
    document: dict[str, Any], agent: dict[str, Any], tools: list[dict[str, Any]], steps: list[Step]
) -> Run:
    model = agent.get("model_name")
    model = model if isinstance(model, str) and model else IMPORTED
    # what makes two runs of one conversation: the tokens
    tokens = [step.metrics for step in steps if step.metrics]
    plain = StepConversation("", model, tools, named=False)
    for step in steps:
        plain.add(replace(step, metrics={}))
    name = run_name(plain.messages, tools, tokens) if tokens else run_name(plain.messages, tools)
    told = StepConversation(name, model, tools, named=False)
    for step in steps:
        told.add(step)
    asked = first_asked(told.messages)
    started, ended = _span(steps, told)
    return Run(
        id=name,
        agent=str(agent.get("name") or IMPORTED),
        model=model,
        input=asked,
        output=last_said(told.messages),
        stop_reason=StopReason.completed,
        trajectory=Trajectory(messages=told.messages, turns=told.turns, tools=tools),
        task=Task(input=asked, metadata=_more(document, agent)),
        started=started or time.time(),
        seconds=max(0.0, ended - started) if started else 0.0,
        imported=FORM,
    )


def _span(steps: list[Step], told: StepConversation) -> tuple[float, float]:
    times = [step.time for step in steps if step.time]
    calls: list[ModelCall] = [turn.call for turn in told.turns if turn.call is not None]
    ends = [call.started + call.seconds for call in calls if call.started]
    return (min(times), max([*times, *ends])) if times else (0.0, 0.0)


def _more(document: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
    """What the document says besides the conversation, for the task's metadata."""
    names = ("session_id", "trajectory_id", "notes", "extra", "final_metrics")
    more = {name: document[name] for name in names if document.get(name) is not None}
    if agent.get("version"):
        more["agent_version"] = agent["version"]
    return more
