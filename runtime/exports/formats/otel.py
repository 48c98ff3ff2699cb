"""OpenTelemetry GenAI spans as OTLP/JSON: write a run as a line of TracesData, or several if long.

An `invoke_agent` span holds a `chat {model}` span for each model call and an `execute_tool {name}`
span for each tool call. Attributes follow the semantic conventions 1.41, all still in development:
the last release before their GenAI part moved to its own repository. Further ones are named
`cray_agents.*`. Messages are JSON strings. Ids are hashes of the ids of run and call, so the same
run gives the same spans. The start of a tool call is not recorded, so its span begins at the end of
the model call.

gen_ai.input.messages is a list of {role, parts, name?}; gen_ai.output.messages adds finish_reason.
A part is text, reasoning, tool_call, tool_call_response, uri or blob; other parts keep their own
type. Where calls repeat more than REPEATED bytes of earlier messages in all, later ones carry only
what came since the model spoke last, and `cray_agents.input.left_out` counts the messages before.
Listed in exporter.py.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import orjson

from cray_agents.exact_json import read_arguments
from cray_agents.messages import FIELDS, function_of, reasoning_of
from cray_agents.records import Message, ModelCall, Reward, Run, StopReason, ToolCall, Turn
from cray_agents.runtime.exports.export_format import Json, LineFormat, Written, json_text, line_of
from cray_agents.runtime.store.run_conversation import Conversation, check_calls, conversation_of

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
REPEATED = 64 * 2**20  # bytes of messages of a run's calls, beyond which they are not repeated
LINE = 16 * 2**20  # bytes of spans in a line
_INTERNAL, _CLIENT, _FAILED = 1, 3, 2  # SpanKind, SpanKind, StatusCode
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
# whole numbers
_WHOLE = ("top_k", "max_tokens", "max_completion_tokens", "max_output_tokens", "seed", "n")
_OPERATIONS = {"/v1/completions": "text_completion"}
_CUT = ("error", "cancelled")  # finish reasons of interrupted calls
_REASONS = {"tool_calls": "tool_call", "function_call": "tool_call", "cancelled": "error"}


class _MessageTexts:
    """JSON of the messages of a run's calls. `repeats`: all of a call's are in it, so far."""

    def __init__(self, run: Run) -> None:
        self.repeats = True
        self._run, self._left = run, REPEATED

    def messages(self, messages: list[Message]) -> str | None:
        """Return the JSON of messages, None for none."""
        check_calls(self._run, messages)
        shaped = [genai_message(message) for message in messages]
        return json_text(self._run, "messages", shaped) if shaped else None

    def prompt(self, messages: list[Message]) -> Json:
        """Return a call's attributes of its messages, of the new ones alone where all take much."""
        first = 0 if self.repeats else _first_new(messages)
        text = self.messages(messages[first:])
        self._left -= len(text or "")
        self.repeats = self._left > 0
        return {"gen_ai.input.messages": text, "cray_agents.input.left_out": first or None}


def _first_new(messages: list[Message]) -> int:
    """Return the index after the last answer; without any, that of the last message."""
    for index in reversed(range(len(messages))):
        if messages[index].get("role") == "assistant" and index + 1 < len(messages):
            return index + 1
    return max(0, len(messages) - 1)


def _write_run(run: Run) -> Written:
    losses, lines, size = set[str](), [list[orjson.Fragment]()], 0
    resource = {"attributes": _attributes({"service.name": "cray-agents"})}
    for span in _spans(run, losses):
        text = line_of(run, span)  # a long run's spans take several times as much as objects
        if size + len(text) > LINE and lines[-1]:
            lines.append([])
            size = 0
        lines[-1].append(orjson.Fragment(text))
        size += len(text)
    records: list[Json] = []
    for spans in lines:
        scope = {"scope": {"name": "cray_agents"}, "spans": spans, "schemaUrl": SCHEMA}
        traces = {"resource": resource, "scopeSpans": [scope], "schemaUrl": SCHEMA}
        records.append({"resourceSpans": [traces]})
    return Written(records, tuple(sorted(losses)))


def _spans(run: Run, losses: set[str]) -> Iterator[Json]:
    """Yield the spans of a run, its own first; add what they leave out to `losses`."""
    conversation = conversation_of(run)
    trace = trace_hash(run.id, 32)
    texts = _MessageTexts(run)
    root = _root(run, conversation, texts, trace)
    yield root
    for index, turn in enumerate(run.trajectory.turns):
        parent, ended = root["spanId"], run.started
        if turn.call is None:
            losses.add("missing_calls")
        else:
            yield _chat(run, turn.call, texts, trace, parent, index)
            ended = turn.call.started + turn.call.seconds
            if turn.call.token_ids:
                losses.add("exact_tokens")
        for number in range(len(turn.tool_calls)):
            yield _tool(run, turn, number, trace, parent, ended)
    if not texts.repeats:
        losses.add("repeated_messages")


def _root(run: Run, conversation: Conversation, texts: _MessageTexts, trace: str) -> Json:
    """Return the run's span: the conversation is its input, an answer at the end its output.

    Tokens are told by the spans of its calls alone: whoever sums up usage counts each once.
    """
    messages, output = conversation.messages, None
    if messages and messages[-1].get("role") == "assistant":
        turn = conversation.turns_by_message.get(len(messages) - 1)
        call = turn.call if turn is not None else None
        output = [genai_answer(messages[-1], call.finish_reason if call is not None else None)]
        messages = messages[:-1]
    values = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "cray_agents",
        "gen_ai.agent.name": run.agent or None,
        "gen_ai.request.model": run.model or None,
        "gen_ai.conversation.id": run.id,
        "gen_ai.input.messages": texts.messages(messages),
        "gen_ai.output.messages": _json(run, output),
        "gen_ai.tool.definitions": _json(run, _tools_of(conversation.tools)),
        "error.type": _failure(run),
        **_own_attributes(run),
    }
    name = f"invoke_agent {run.agent}".strip()
    failure = run.error.message if run.error is not None else _failure(run)
    ids, times = (trace, trace_hash(run.id, 16)), (run.started, run.seconds)
    span = _span(name, _INTERNAL, ids, times, values, failure)
    return {**span, "events": [_evaluation(reward) for reward in run.rewards]}


def _failure(run: Run) -> str | None:
    if run.error is not None:
        return run.error.type
    cut = run.stop_reason in (StopReason.timeout, StopReason.cancelled, StopReason.error)
    return str(run.stop_reason) if cut else None


def _own_attributes(run: Run) -> Json:
    """Return the run's attributes that the conventions lack."""
    task = run.task.model_dump(mode="json") if run.task else None
    return {
        "cray_agents.stop_reason": str(run.stop_reason),
        "cray_agents.error.infrastructure": run.error.infrastructure if run.error else None,
        "cray_agents.input": run.input,
        "cray_agents.output": _json(run, run.output),
        "cray_agents.task": _json(run, task),
        "cray_agents.loop": run.loop,
        "cray_agents.iteration": run.iteration,
        "cray_agents.attempt": run.attempt,
        "cray_agents.tags": run.tags or None,
        "cray_agents.imported": run.imported,
        "cray_agents.redacted": _json(run, [removed.model_dump() for removed in run.redacted]),
    }


def _evaluation(reward: Reward) -> Json:
    values = {
        "gen_ai.evaluation.name": reward.name,
        "gen_ai.evaluation.score.value": float(reward.value),
        "cray_agents.reward.source": reward.source,
        "cray_agents.reward.turn": reward.turn,
    }
    return {
        "timeUnixNano": _nanos(reward.time),
        "name": "gen_ai.evaluation.result",
        "attributes": _attributes(values),
    }


def _chat(
    run: Run, call: ModelCall, texts: _MessageTexts, trace: str, parent: str, index: int
) -> Json:
    operation = _OPERATIONS.get(call.api, "chat")
    known = bool(call.prompt_token_ids)
    failure = call.finish_reason if call.finish_reason in _CUT else None
    values = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "cray_agents",
        "gen_ai.conversation.id": run.id,
        "gen_ai.agent.name": run.agent or None,
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
        "gen_ai.usage.input_tokens": len(call.prompt_token_ids) if known else None,
        "gen_ai.usage.output_tokens": len(call.token_ids) if known else None,
        **texts.prompt(call.messages),
        "gen_ai.output.messages": _json(run, [genai_answer(call.message, call.finish_reason)]),
        "gen_ai.tool.definitions": _json(run, _tools_of(call.tools)),
        "error.type": failure,
        **_sampling(run, call.sampling),
        "cray_agents.api": call.api,
        "cray_agents.tags": call.tags or None,
        "cray_agents.redacted": _json(run, [removed.model_dump() for removed in call.redacted]),
    }
    ids = (trace, trace_hash(f"{run.id}/{index}/{call.id}", 16), parent)
    times = (call.started, call.seconds)
    return _span(f"{operation} {call.model}", _CLIENT, ids, times, values, failure)


def _sampling(run: Run, sampling: Json) -> Json:
    """Return the request's parameters under the conventions' names, further ones as JSON."""
    named: Json = {}
    rest: Json = {}
    for name, value in sampling.items():
        if name in _SAMPLING and _is_number(value, whole=name in _WHOLE):
            named[_SAMPLING[name]] = int(value) if name in _WHOLE else float(value)
        elif name == "stop" and isinstance(value, str):
            named["gen_ai.request.stop_sequences"] = [value]
        elif name == "stop" and isinstance(value, list) and all(isinstance(s, str) for s in value):
            named["gen_ai.request.stop_sequences"] = value
        else:
            rest[name] = value
    return {**named, "cray_agents.sampling": _json(run, rest)}


def _is_number(value: Any, *, whole: bool) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return not whole or (abs(value) < 2**63 and value == int(value))


def _tool(run: Run, turn: Turn, number: int, trace: str, parent: str, started: float) -> Json:
    done: ToolCall = turn.tool_calls[number]
    values = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": done.name,
        "gen_ai.tool.call.id": done.id or None,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.arguments": done.arguments,
        "gen_ai.tool.call.result": _json(run, done.result),
        "error.type": "tool_error" if done.error is not None else None,
    }
    ids = (trace, trace_hash(f"{run.id}/{turn.call_id}/{number}/{done.id}", 16), parent)
    times = (started, done.seconds)
    return _span(f"execute_tool {done.name}", _INTERNAL, ids, times, values, done.error)


def genai_message(message: Message) -> Json:
    """Return a message in the conventions' shape; unknown fields stay as they are."""
    record: Json = {"role": str(message.get("role") or "user"), "parts": _content_parts(message)}
    if isinstance(message.get("name"), str):
        record["name"] = message["name"]
    record |= {name: value for name, value in message.items() if name not in FIELDS and value}
    return record


def genai_answer(message: Message, finish_reason: str | None) -> Json:
    """Return a model's answer with its finish reason."""
    reason = finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    return genai_message(message) | {"finish_reason": _REASONS.get(reason, reason)}


def _tools_of(tools: list[Json]) -> list[Json]:
    """Return tool definitions; a tool that is no function keeps its own fields."""
    listed = []
    for tool in tools:
        function = function_of(tool)
        if function is not None:
            listed.append({"type": "function", **function})
        else:
            kind = str(tool.get("type") or "unknown")
            listed.append({**tool, "type": kind, "name": str(tool.get("name") or kind)})
    return listed


def _content_parts(message: Message) -> list[Json]:
    content = message.get("content")
    if message.get("role") == "tool":
        call_id = message.get("tool_call_id")
        return [{"type": "tool_call_response", "id": call_id, "response": content}]
    converted: list[Json] = []
    if thought := reasoning_of(message):
        converted.append({"type": "reasoning", "content": str(thought)})
    if isinstance(content, str):
        if content:
            converted.append({"type": "text", "content": content})
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        for part in content:  # fields that the conventions do not know stay
            replaced, fields = _convert_part(part)
            kept = {name: value for name, value in part.items() if name not in replaced}
            converted.append({**kept, **fields})
    elif content is not None:  # a prompt of token ids, or several
        converted.append({"type": "prompt", "content": content})
    converted += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return converted


def _convert_part(part: Json) -> tuple[set[str], Json]:
    """Return which fields of one of OpenAI's content parts to replace, and by which."""
    if isinstance(part.get("text"), str):
        return {"text"}, {"type": "text", "content": part["text"]}
    image, audio = part.get("image_url"), part.get("input_audio")
    details = image if isinstance(image, dict) else {"url": image}
    if isinstance(url := details.get("url"), str):
        more = {name: value for name, value in details.items() if name != "url"}
        if url.startswith("data:") and ";base64," in url:
            kind, _, data = url.removeprefix("data:").partition(";base64,")
            blob = {"type": "blob", "modality": "image", "mime_type": kind, "content": data}
            return {"image_url"}, more | blob
        return {"image_url"}, more | {"type": "uri", "modality": "image", "uri": url}
    if isinstance(audio, dict) and isinstance(audio.get("data"), str):
        kind = f"audio/{audio.get('format')}"
        blob = {"type": "blob", "modality": "audio", "mime_type": kind, "content": audio["data"]}
        return {"input_audio"}, blob
    return set(), {"type": str(part.get("type") or "unknown")}


def _tool_call(call: Json) -> Json:
    function = call.get("function") or call.get("custom") or {}
    arguments: Any = function.get("arguments", function.get("input"))
    if (read := read_arguments(arguments)) is not None:  # else the text stays as it was written
        arguments = read
    name = str(function.get("name") or "")
    return {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}


def _span(
    name: str,
    kind: int,
    ids: tuple[str, ...],
    times: tuple[float, float],
    values: Json,
    failure: str | None,
) -> Json:
    """Return a span. `ids`: of the trace, the span and its parent, if any. `times`: start, length.

    `failure`: what went wrong, in words.
    """
    span: Json = {"traceId": ids[0], "spanId": ids[1], "name": name, "kind": kind}
    if ids[2:]:
        span["parentSpanId"] = ids[2]
    span["startTimeUnixNano"] = _nanos(times[0])
    span["endTimeUnixNano"] = _nanos(sum(times))
    span["attributes"] = _attributes(values)
    if failure is not None:
        span["status"] = {"code": _FAILED, "message": failure}
    return span


def trace_hash(text: str, digits: int) -> str:
    """Return the id that follows from a text: 32 hex digits for a trace, 16 for a span."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:digits]


def _nanos(seconds: float) -> str:
    """Return Unix nanoseconds, rounded to a microsecond, the precision of a float."""
    return str(round(max(seconds, 0.0) * 1e6) * 1000)


def _json(run: Run, value: Any) -> str | None:
    return json_text(run, "a value", value) if value not in (None, [], {}) else None


def _attributes(values: Json) -> list[Json]:
    """Return OTLP's list of attributes, without those that are None."""
    return [{"key": key, "value": _value(v)} for key, v in values.items() if v is not None]


def _value(value: Any) -> Json:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        named = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {"doubleValue": value if math.isfinite(value) else named}  # as protobuf's JSON
    return {"arrayValue": {"values": [_value(one) for one in value]}}


OTEL = LineFormat(
    name="otel",
    title="OpenTelemetry GenAI spans (OTLP/JSON)",
    about="a trace for each run: spans of the run, its model calls and its tool calls, with "
    "messages, usage and rewards (semantic conventions 1.41); no exact tokens",
    write_run=_write_run,
)
