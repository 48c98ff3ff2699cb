"""OpenTelemetry: protobuf reads every line, the names are the conventions', the spans the run's."""

import base64
import json
from typing import Any

import jsonschema
import orjson
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status, TracesData
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, service_attributes
from opentelemetry.semconv.schemas import Schemas

from cray_agents.errors import BadInput
from cray_agents.records import Reward, Run
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.exports.formats import otel
from tests.support.exports.example_runs import LINE_FORMATS, called, chat, made, of_calls

OTEL = LINE_FORMATS["otel"].write_run
IDS = ("traceId", "spanId", "parentSpanId")

#: The conventions' schema of messages: parts by type, with what each must have.
PARTS: dict[str, dict[str, Any]] = {
    "text": {"content": {"type": "string"}},
    "reasoning": {"content": {"type": "string"}},
    "tool_call": {"name": {"type": "string"}},
    "tool_call_response": {"response": {}},
    "uri": {"modality": {"type": "string"}, "uri": {"type": "string"}},
    "blob": {"modality": {"type": "string"}, "content": {"type": "string"}},
}
PART = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}},
    "allOf": [
        {
            "if": {"properties": {"type": {"const": kind}}},
            "then": {"required": list(fields), "properties": fields},
        }
        for kind, fields in PARTS.items()
    ],
}
MESSAGE = {
    "type": "object",
    "required": ["role", "parts"],
    "properties": {"role": {"type": "string"}, "parts": {"type": "array", "items": PART}},
}
INPUT = {"type": "array", "items": MESSAGE}
OUTPUT = {"type": "array", "items": {**MESSAGE, "required": ["role", "parts", "finish_reason"]}}
TOOLS = {"type": "array", "items": {"type": "object", "required": ["type", "name"]}}
SCHEMAS = {
    "gen_ai.input.messages": INPUT,
    "gen_ai.output.messages": OUTPUT,
    "gen_ai.tool.definitions": TOOLS,
}


def named(module: Any) -> set[str]:
    return {value for value in vars(module).values() if isinstance(value, str)}


NAMES = named(gen_ai_attributes) | named(error_attributes) | named(service_attributes)


def value(given: Any) -> Any:
    """An attribute's value as Python's."""
    kind = given.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in given.array_value.values]
    return getattr(given, kind)


def attributes(of: Any) -> dict[str, Any]:
    keys = [pair.key for pair in of.attributes]
    assert len(keys) == len(set(keys))
    return {pair.key: value(pair.value) for pair in of.attributes}


def spans(run: Run) -> list[Span]:
    """The run's spans, read by protobuf; ids are hex in OTLP/JSON and base64 in protobuf's."""
    return [span for record in OTEL(run).records for span in spans_of(run, record)]


def spans_of(run: Run, record: Any) -> list[Span]:
    """The spans of a line."""
    read = orjson.loads(line_of(run, record))
    for resource in read["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in set(IDS) & set(span):
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    request = json_format.Parse(json.dumps(read), ExportTraceServiceRequest())
    data = json_format.Parse(json.dumps(read), TracesData())
    assert request.resource_spans[0] == data.resource_spans[0]
    (resource,) = data.resource_spans
    assert attributes(resource.resource) == {"service.name": "cray-agents"}
    (scope,) = resource.scope_spans
    assert scope.schema_url == resource.schema_url == Schemas.V1_41_0.value
    return list(scope.spans)


def told(span: Span, name: str) -> Any:
    return json.loads(attributes(span)[name])


@pytest.mark.slow
def test_every_run_is_read_and_named_as_the_conventions_say(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        if name == "surrogate":
            with pytest.raises(BadInput, match="has no form in JSON"):
                spans(run)
            continue
        root, *others = spans(run)
        assert len(root.trace_id) == 16
        assert not root.parent_span_id
        ids = [span.span_id for span in (root, *others)]
        assert len(ids) == len(set(ids)) and all(len(one) == 8 for one in ids), name
        for span in (root, *others):
            assert span.trace_id == root.trace_id
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.parent_span_id == (b"" if span is root else root.span_id)
            for key in attributes(span):
                assert key in NAMES or key.startswith("cray_agents."), key
            for key, schema in SCHEMAS.items():
                if key in attributes(span):
                    jsonschema.validate(told(span, key), schema)


def test_the_same_run_gives_the_same_spans_and_another_run_others(runs: dict[str, Run]) -> None:
    once, again = ([line_of(run, r) for r in OTEL(run).records] for run in [runs["calc"]] * 2)
    assert once == again
    first, other = spans(runs["calc"]), spans(runs["wrong"])
    assert {span.span_id for span in first}.isdisjoint(span.span_id for span in other)
    assert first[0].trace_id != other[0].trace_id


def test_a_recorded_run_is_an_agent_s_span_with_calls_and_tools(runs: dict[str, Run]) -> None:
    run = runs["calc"]
    root, *others = spans(run)
    assert [span.name for span in others] == ["chat m@1", "execute_tool calculator", "chat m@1"]
    kinds = [span.kind for span in (root, *others)]
    assert kinds == [Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL, 3]
    assert root.name == "invoke_agent clerk"
    assert abs(root.start_time_unix_nano - run.started * 1e9) < 2_000
    seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(run.seconds, abs=1e-5)
    about = attributes(root)
    assert about["gen_ai.operation.name"] == "invoke_agent"
    assert about["gen_ai.agent.name"] == "clerk"
    assert about["gen_ai.conversation.id"] == "run-calc"
    told_twice = [attributes(span).get("gen_ai.usage.output_tokens", 0) for span in spans(run)]
    assert sum(told_twice) == run.usage.completion_tokens, "by the calls alone"
    assert about["cray_agents.stop_reason"] == "completed"
    assert about["cray_agents.tags"] == ["a", "b:c"]
    assert told(root, "cray_agents.task")["target"] == "432"
    roles = [message["role"] for message in told(root, "gen_ai.input.messages")]
    assert roles == ["system", "user", "assistant", "tool"]
    assert told(root, "gen_ai.output.messages") == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "It is 432."}],
            "finish_reason": "stop",
        }
    ]
    assert OTEL(run).losses == ("exact_tokens",)


def test_a_call_s_span_tells_what_was_asked_and_sampled(runs: dict[str, Run]) -> None:
    run = runs["calc"]
    call = run.calls[0]
    _, chat_span, tool_span, _ = spans(run)
    about = attributes(chat_span)
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.response.id"] == call.id
    assert about["gen_ai.response.model"] == "m@1"
    assert about["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert about["gen_ai.usage.input_tokens"] == len(call.prompt_token_ids)
    assert about["gen_ai.usage.output_tokens"] == len(call.token_ids)
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.request.top_k"] == 3
    assert told(chat_span, "cray_agents.sampling")["parallel_tool_calls"] is True
    (said,) = told(chat_span, "gen_ai.output.messages")
    assert said["finish_reason"] == "tool_call"
    arguments = {"expression": "47 + 385"}
    assert said["parts"] == [
        {"type": "tool_call", "id": "call_0", "name": "calculator", "arguments": arguments}
    ]
    names = [tool["name"] for tool in told(chat_span, "gen_ai.tool.definitions")]
    assert names == ["calculator", "refuse", "table", "forever"]
    done = attributes(tool_span)
    assert done["gen_ai.operation.name"] == "execute_tool"
    assert done["gen_ai.tool.name"] == "calculator"
    assert done["gen_ai.tool.call.id"] == "call_0"
    assert json.loads(done["gen_ai.tool.call.arguments"]) == arguments
    assert (
        told(tool_span, "gen_ai.tool.call.result") == run.trajectory.turns[0].tool_calls[0].result
    )
    assert tool_span.start_time_unix_nano == chat_span.end_time_unix_nano


def test_rewards_are_events_of_evaluation(runs: dict[str, Run]) -> None:
    root = spans(runs["calc"])[0]
    (event,) = root.events
    assert event.name == "gen_ai.evaluation.result"
    assert event.time_unix_nano == 1_700_000_009_500_000_000
    assert attributes(event) == {
        "gen_ai.evaluation.name": "correct",
        "gen_ai.evaluation.score.value": 1.0,
        "cray_agents.reward.source": "function",
    }
    wild = [Reward(name=str(number), value=number) for number in (float("inf"), float("nan"))]
    first, second = spans(made(messages=chat("x", "y"), rewards=wild))[0].events
    assert attributes(first)["gen_ai.evaluation.score.value"] == float("inf")
    assert attributes(second)["gen_ai.evaluation.score.value"] != 0.0


def test_what_failed_has_a_status_and_a_type(runs: dict[str, Run]) -> None:
    root = spans(runs["broken"])[0]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "EngineError"
    assert attributes(root)["cray_agents.error.infrastructure"] is False
    stopped = spans(runs["stopped"])[0]
    assert attributes(stopped)["error.type"] == "CancelledError"
    assert attributes(spans(runs["cancelled"])[0])["error.type"] == "cancelled"
    tool = spans(runs["refused"])[2]
    assert (tool.status.code, tool.status.message) == (2, "refused: no")
    assert attributes(tool)["error.type"] == "tool_error"
    for name in ("calc", "endless"):
        assert spans(runs[name])[0].status.code == Status.STATUS_CODE_UNSET
        assert "error.type" not in attributes(spans(runs[name])[0])


def test_calls_that_the_store_has_not_are_a_stated_loss(runs: dict[str, Run]) -> None:
    run = runs["lost_call"]
    assert OTEL(run).losses == ("missing_calls",)
    root, tool = spans(run)
    assert tool.name == "execute_tool f"
    assert [m["role"] for m in told(root, "gen_ai.input.messages")] == ["user", "assistant", "tool"]


def test_every_call_has_a_span_also_those_of_other_conversations(runs: dict[str, Run]) -> None:
    run = runs["many"]
    said = {attributes(span)["gen_ai.response.id"] for span in spans(run)[1:]}
    assert said == {call.id for call in run.calls}
    assert attributes(spans(run)[1])["gen_ai.request.choice.count"] == 3
    asked = [told(span, "gen_ai.input.messages")[0]["parts"] for span in spans(runs["two"])[1:]]
    assert [parts[0]["content"] for parts in asked] == ["sub", "x"]


def test_a_long_run_has_several_lines_that_repeat_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    words = chat(*(f"{place} " + "long " * 20 for place in range(40)))
    calls = [called(words[: 2 * turn + 1], words[2 * turn + 1], f"c{turn}") for turn in range(20)]
    other = called(chat("elsewhere", "there", "again"), {"role": "assistant", "content": "x"}, "o")
    run = of_calls(*calls, other, messages=words)
    whole = spans(run)
    assert "repeated_messages" not in OTEL(run).losses
    monkeypatch.setattr(otel, "REPEATED", 5000)
    monkeypatch.setattr(otel, "LINE", 4000)
    cut = spans(run)
    assert len(OTEL(run).records) > 2 and OTEL(run).losses == ("exact_tokens", "repeated_messages")
    assert [span.span_id for span in cut] == [span.span_id for span in whole]
    assert [attributes(span) for span in cut[:5]] == [attributes(span) for span in whole[:5]]
    for turn, span in enumerate(cut[-7:-1], 14):
        (asked,) = told(span, "gen_ai.input.messages")
        assert asked["parts"][0]["content"] == words[2 * turn]["content"]
        assert attributes(span)["cray_agents.input.left_out"] == 2 * turn
    (asked,) = told(cut[-1], "gen_ai.input.messages")
    assert asked["parts"][0]["content"] == "again"


def test_parts_of_all_kinds(runs: dict[str, Run]) -> None:
    def parts(name: str, place: int = 0) -> Any:
        return told(spans(runs[name])[0], "gen_ai.input.messages")[place]["parts"]

    uri = "https://a.test/i.png"
    assert parts("image") == [{"type": "uri", "modality": "image", "uri": uri, "detail": "low"}]
    assert parts("audio")[0]["type"] == "blob"
    assert parts("token_prompt") == [{"type": "prompt", "content": [5, 6]}]
    assert parts("wild", 1)[0]["arguments"] == "not json"
    (thought, text) = told(spans(runs["thinking"])[0], "gen_ai.output.messages")[0]["parts"]
    assert thought == {"type": "reasoning", "content": "I think."}
    assert text == {"type": "text", "content": "So."}
    span = spans(runs["completions"])[1]
    assert span.name == "text_completion m@1"
    assert attributes(span)["gen_ai.operation.name"] == "text_completion"


def test_what_was_redacted_is_told(runs: dict[str, Run]) -> None:
    root, call = spans(runs["redacted"])
    for span in (root, call):
        assert told(span, "cray_agents.redacted") == [{"kind": "email", "count": 2}]
    assert "gen_ai.usage.input_tokens" not in attributes(call)
    assert OTEL(runs["redacted"]).losses == ()
