"""The steps of an ATIF document, checked, and the conversation they make. Called by atif.py."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import Message, ModelCall, ToolCall, Turn
from cray_agents.runtime.imports.imported_run import an_object, invalid

_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
# of the `extra` of a step that this platform exported: of its call, not of its message
_OF_CALLS = {
    "call_id", "api", "finish_reason", "seconds", "sampling", "tags", "redacted", "messages",
    "tools", "role",
}  # fmt: skip
Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step, its fields of the right kinds. `results` are those of its observation."""

    where: str
    role: str
    content: Any
    extra: Json
    tool_calls: list[Json]
    results: list[Json]
    metrics: Json
    reasoning: str | None
    model: str | None
    time: float
    copied: bool
    calls: int | None  # of the model, in this step


def step_of(value: Any, where: str) -> Step:
    """A step from JSON. Raises BadInput, naming the field."""
    given = an_object(value, where)
    source = given.get("source")
    if not isinstance(source, str) or source not in _SOURCES:
        raise BadInput(f"{where}.source must be one of {', '.join(_SOURCES)}")
    observation = an_object(given.get("observation") or {}, f"{where}.observation")
    return Step(
        where=where,
        role=_SOURCES[source],
        content=_content(given.get("message"), f"{where}.message"),
        extra=an_object(given.get("extra") or {}, f"{where}.extra"),
        tool_calls=_tool_calls(given.get("tool_calls"), f"{where}.tool_calls"),
        results=_results(observation.get("results"), f"{where}.observation.results"),
        metrics=_metrics(given.get("metrics"), f"{where}.metrics"),
        reasoning=_text(given.get("reasoning_content"), f"{where}.reasoning_content"),
        model=_text(given.get("model_name"), f"{where}.model_name"),
        time=_time(given.get("timestamp"), f"{where}.timestamp"),
        copied=given.get("is_copied_context") is True,
        calls=given.get("llm_call_count"),
    )


@dataclass
class StepConversation:
    """The messages and turns that steps make, one after another.

    `named`: they are of this platform's own export, whose calls, results and messages say in
    `extra` what the schema has no field for.
    """

    run_id: str
    model: str
    tools: list[Json]
    named: bool
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Add a step's message, its turn, and the results of its tools. Raises BadInput."""
        orphans = self.named and step.role == "system" and step.results and not step.content
        if not orphans:
            message = self._message(step)
            self._add_turn(step, message)
            self.messages.append(message)
        for number, result in enumerate(step.results):
            self._add_result(step, result, f"{step.where}.observation.results[{number}]")

    def _message(self, step: Step) -> Message:
        message: Message = {"role": step.role, "content": step.content}
        if self.named:
            more = {name: item for name, item in step.extra.items() if name not in _OF_CALLS}
            message |= more | ({"role": step.extra["role"]} if "role" in step.extra else {})
        if step.reasoning:
            message["reasoning"] = step.reasoning
        if step.tool_calls:
            message["content"] = step.content or None
            message["tool_calls"] = [_asked(call) for call in step.tool_calls]
        if step.copied and step.role == "assistant" and not self.named:
            message["weight"] = 0  # the format says that it is not to be trained on
        return message

    def _add_turn(self, step: Step, message: Message) -> None:
        if step.role != "assistant" or (step.copied and not self.named):
            return
        exact = any(step.metrics.get(f"{part}_token_ids") for part in ("prompt", "completion"))
        recorded = "call_id" in step.extra if self.named else exact and step.calls in (None, 1)
        if not recorded:
            return
        written = _as_written(message, step)
        done = _done(step, written, told=self.named)
        call_id = f"{self.run_id}-{len(self.turns)}"
        if self.named:
            call_id = str(step.extra["call_id"])
            if step.calls is None:  # the store did not know this call
                self.turns.append(Turn(call_id=call_id, tool_calls=done))
                return
        call = self._call(step, call_id, written)
        self.turns.append(Turn(call_id=call_id, tool_calls=done, call=call))

    def _call(self, step: Step, call_id: str, message: Message) -> ModelCall:
        known = step.extra if self.named else {}
        sampled = step.metrics.get("completion_token_ids") or []
        logprobs = step.metrics.get("logprobs") or []
        if logprobs and len(logprobs) != len(sampled):
            raise BadInput(
                f"{step.where}.metrics: {len(logprobs)} logprobs of {len(sampled)} tokens"
            )
        names = ("api", "finish_reason", "seconds", "sampling", "tags", "redacted")
        try:
            return ModelCall.model_validate(
                {
                    "id": call_id,
                    "run_id": self.run_id,
                    "model": step.model or self.model,
                    "messages": known.get("messages", [*self.messages]),
                    "message": message,
                    "tools": known.get("tools", self.tools),
                    "prompt_token_ids": step.metrics.get("prompt_token_ids") or [],
                    "token_ids": sampled,
                    "logprobs": logprobs,
                    "started": step.time,
                    **{name: known[name] for name in names if name in known},
                }
            )
        except ValidationError as error:
            raise BadInput(f"{step.where}: {invalid(error)}") from error

    def _add_result(self, step: Step, result: Json, where: str) -> None:
        content = _content(result.get("content"), f"{where}.content")
        extra = result["extra"] if self.named else {}
        call_id = result.get("source_call_id")
        if isinstance(call_id, str):
            message: Message = {"role": "tool", "tool_call_id": call_id, "content": content}
        elif step.role == "system" and not self.named:
            message = {"role": "system", "content": content}
        else:  # what the environment says to an agent that calls no tools
            message = {"role": "user", "content": content}
        self.messages.append(message | extra)


def _asked(call: Json) -> Json:
    """A tool call in the shape of chat completions."""
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _as_written(message: Message, step: Step) -> Message:
    """The message as the model wrote it: some arguments were mended on their way back to it."""
    if not step.tool_calls:
        return dict(message)
    asked = []
    for part, call in zip(message["tool_calls"], step.tool_calls, strict=True):
        extra = call["extra"]
        given = extra["arguments"] if "arguments" in extra else part["function"]["arguments"]
        asked.append({**part, "function": {**part["function"], "arguments": given}})
    return {**message, "tool_calls": asked}


def _done(step: Step, message: Message, *, told: bool) -> list[ToolCall]:
    """The tool calls that were carried out: those with a result, of ours those with a time."""
    results = {r.get("source_call_id"): r.get("content") for r in step.results}
    done = []
    for part, call in zip(message.get("tool_calls") or (), step.tool_calls, strict=True):
        extra = call["extra"]
        if "seconds" not in extra if told else part["id"] not in results:
            continue
        error = extra.get("error") if told else None
        result = extra.get("result") if told else None
        if result is None and error is None:
            result = results.get(part["id"])
        function = part["function"]
        arguments = function["arguments"]
        fields = {
            "id": part["id"],
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            "result": result,
            "error": error,
            "seconds": extra.get("seconds", 0.0) if told else 0.0,
        }
        try:
            done.append(ToolCall.model_validate(fields))
        except ValidationError as problem:
            raise BadInput(f"{step.where}.tool_calls: {invalid(problem)}") from problem
    return done


def _content(value: Any, where: str) -> Any:
    """A text, or parts in OpenAI's shape."""
    if value is None or isinstance(value, str):
        return value or ""
    return [_part(part, where) for part in objects(value, where)]


def _part(part: Json, where: str) -> Json:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict) and source.get("path"):
        return {"type": "image_url", "image_url": {"url": source["path"]}}
    raise BadInput(
        f"{where} has a part of type {part.get('type')!r}: only text and images are read"
    )


def _tool_calls(value: Any, where: str) -> list[Json]:
    calls = []
    for number, call in enumerate(objects(value, where)):
        at = f"{where}[{number}]"
        for name in ("tool_call_id", "function_name"):
            if not isinstance(call.get(name), str):
                raise BadInput(f"{at}.{name} must be a text")
        arguments = an_object(call.get("arguments"), f"{at}.arguments")
        extra = an_object(call.get("extra") or {}, f"{at}.extra")
        calls.append({**call, "arguments": arguments, "extra": extra})
    return calls


def _results(value: Any, where: str) -> list[Json]:
    results = []
    for number, result in enumerate(objects(value, where)):
        at = f"{where}[{number}]"
        _text(result.get("source_call_id"), f"{at}.source_call_id")
        extra = an_object(result.get("extra") or {}, f"{at}.extra")
        results.append({**result, "extra": extra})
    return results


def _metrics(value: Any, where: str) -> Json:
    metrics = an_object(value or {}, where)
    for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
        if not isinstance(metrics.get(name), list | None):
            raise BadInput(f"{where}.{name} must be a list of numbers")
    return metrics


def objects(value: Any, where: str) -> list[Json]:
    """A list of objects, or nothing. Raises BadInput."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadInput(f"{where} must be a list of objects")
    return value


def _text(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{where} must be a text")
    return value


def _time(value: Any, where: str) -> float:
    """Unix seconds; 0 where none is given. A time without a zone is UTC."""
    if value is None:
        return 0.0
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else datetime.fromisoformat(f"{value}+00:00")).timestamp()
    except (AttributeError, ValueError, OverflowError) as error:
        raise BadInput(f"{where}: {value!r} is no ISO 8601 time") from error
