"""ATIF 1.x: read a trajectory document as a run, and each subagent's document within it too.

Steps become messages, with tool results after them. A step with exact tokens becomes a model call
as well, unless it counts several calls: its tokens belong to all of them. `extra` of a document
goes to its task's metadata, also that of our own exports: runs that shall come back whole are
exported as `jsonl`. Listed in import_file.py; runtime/exports/formats/atif.py is the writer.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.messages import first_question
from cray_agents.records import (
    Event,
    Message,
    ModelCall,
    Run,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from cray_agents.runtime.imports.imported_run import (
    IMPORTED,
    Importing,
    as_bad_input,
    events_of,
    imported_run_id,
    last_answer,
    require_object,
)

_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step with fields of checked types. `results` are those of its observation."""

    path: str
    role: str
    content: Any
    tool_calls: list[Json]
    results: list[Json]
    metrics: Json
    reasoning: str | None
    model: str | None
    time: float
    copied: bool
    calls: int | None  # number of model calls in this step


def step_of(value: Any, path: str) -> Step:
    """Return a step from JSON. Raises BadInput naming the field."""
    fields = require_object(value, path)
    source = fields.get("source")
    if not isinstance(source, str) or source not in _SOURCES:
        raise BadInput(f"{path}.source must be one of {', '.join(_SOURCES)}")
    observation = require_object(fields.get("observation") or {}, f"{path}.observation")
    return Step(
        path=path,
        role=_SOURCES[source],
        content=_content(fields.get("message"), f"{path}.message"),
        tool_calls=_tool_calls(fields.get("tool_calls"), f"{path}.tool_calls"),
        results=_results(observation.get("results"), f"{path}.observation.results"),
        metrics=_metrics(fields.get("metrics"), f"{path}.metrics"),
        reasoning=_text(fields.get("reasoning_content"), f"{path}.reasoning_content"),
        model=_text(fields.get("model_name"), f"{path}.model_name"),
        time=_time(fields.get("timestamp"), f"{path}.timestamp"),
        copied=fields.get("is_copied_context") is True,
        calls=fields.get("llm_call_count"),
    )


@dataclass
class StepConversation:
    """The messages and turns made of steps, added one by one."""

    run_id: str
    model: str
    tools: list[Json]
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Add a step's message, its turn and its tool results. Raises BadInput."""
        message = self._message(step)
        self._add_turn(step, message)
        self.messages.append(message)
        for number, result in enumerate(step.results):
            self._add_result(step, result, f"{step.path}.observation.results[{number}]")

    def _message(self, step: Step) -> Message:
        message: Message = {"role": step.role, "content": step.content}
        if step.reasoning:
            message["reasoning"] = step.reasoning
        if step.tool_calls:
            message["content"] = step.content or None
            message["tool_calls"] = [_openai_call(call) for call in step.tool_calls]
        if step.copied and step.role == "assistant":
            message["weight"] = 0  # the format excludes copied context from training
        return message

    def _add_turn(self, step: Step, message: Message) -> None:
        exact = any(step.metrics.get(f"{side}_token_ids") for side in ("prompt", "completion"))
        if step.role != "assistant" or step.copied or not exact or step.calls not in (None, 1):
            return
        call_id = f"{self.run_id}-{len(self.turns)}"
        call = self._call(step, call_id, message)
        done = _finished_calls(step, message)
        self.turns.append(Turn(call_id=call_id, tool_calls=done, call=call))

    def _call(self, step: Step, call_id: str, message: Message) -> ModelCall:
        sampled = step.metrics.get("completion_token_ids") or []
        logprobs = step.metrics.get("logprobs") or []
        if logprobs and len(logprobs) != len(sampled):
            raise BadInput(
                f"{step.path}.metrics: {len(logprobs)} logprobs of {len(sampled)} tokens"
            )
        try:
            return ModelCall.model_validate(
                {
                    "id": call_id,
                    "run_id": self.run_id,
                    "model": step.model or self.model,
                    "messages": [*self.messages],
                    "message": dict(message),
                    "tools": self.tools,
                    "prompt_token_ids": step.metrics.get("prompt_token_ids") or [],
                    "token_ids": sampled,
                    "logprobs": logprobs,
                    "started": step.time,
                }
            )
        except ValidationError as error:
            raise BadInput(f"{step.path}: {as_bad_input(error)}") from error

    def _add_result(self, step: Step, result: Json, path: str) -> None:
        content = _content(result.get("content"), f"{path}.content")
        call_id = result.get("source_call_id")
        if isinstance(call_id, str):
            message: Message = {"role": "tool", "tool_call_id": call_id, "content": content}
        elif step.role == "system":
            message = {"role": "system", "content": content}
        else:  # an observation of an agent that calls no tools
            message = {"role": "user", "content": content}
        self.messages.append(message)


def _openai_call(call: Json) -> Json:
    """Return a tool call in the shape of chat completions."""
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _finished_calls(step: Step, message: Message) -> list[ToolCall]:
    """Return the tool calls that were carried out: those that have a result."""
    results = {r.get("source_call_id"): r.get("content") for r in step.results}
    return [
        ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments=call["function"]["arguments"],
            result=results[call["id"]],
        )
        for call in message.get("tool_calls") or ()
        if call["id"] in results
    ]


def _content(value: Any, path: str) -> Any:
    """Return a content: a text, or parts in OpenAI's shape."""
    if value is None or isinstance(value, str):
        return value or ""
    return [_part(part, path) for part in require_objects(value, path)]


def _part(part: Json, path: str) -> Json:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict) and source.get("path"):
        return {"type": "image_url", "image_url": {"url": source["path"]}}
    raise BadInput(f"{path} has a part of type {part.get('type')!r}: only text and images are read")


def _tool_calls(value: Any, path: str) -> list[Json]:
    calls = []
    for number, call in enumerate(require_objects(value, path)):
        item = f"{path}[{number}]"
        for name in ("tool_call_id", "function_name"):
            if not isinstance(call.get(name), str):
                raise BadInput(f"{item}.{name} must be a text")
        arguments = require_object(call.get("arguments"), f"{item}.arguments")
        calls.append({**call, "arguments": arguments})
    return calls


def _results(value: Any, path: str) -> list[Json]:
    results = require_objects(value, path)
    for number, result in enumerate(results):
        _text(result.get("source_call_id"), f"{path}[{number}].source_call_id")
    return results


def _metrics(value: Any, path: str) -> Json:
    metrics = require_object(value or {}, path)
    for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
        if not isinstance(metrics.get(name), list | None):
            raise BadInput(f"{path}.{name} must be a list of numbers")
    return metrics


def require_objects(value: Any, path: str) -> list[Json]:
    """Return a list of objects, empty for None. Raises BadInput for any other value."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadInput(f"{path} must be a list of objects")
    return value


def _text(value: Any, path: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{path} must be a text")
    return value


def _time(value: Any, path: str) -> float:
    """Return Unix seconds, 0 for None. A time without a zone is UTC."""
    if value is None:
        return 0.0
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else datetime.fromisoformat(f"{value}+00:00")).timestamp()
    except (AttributeError, ValueError, OverflowError) as error:
        raise BadInput(f"{path}: {value!r} is no ISO 8601 time") from error


FORM = "atif"


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
    model = agent.get("model_name")
    model = model if isinstance(model, str) and model else IMPORTED
    # runs with the same messages are told apart by their tokens
    tokens = [step.metrics for step in steps if step.metrics]
    plain = StepConversation("", model, tools)
    for step in steps:
        plain.add(replace(step, metrics={}))
    run_id = imported_run_id(plain.messages, tools, *([tokens] if tokens else ()))
    conversation = StepConversation(run_id, model, tools)
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
