"""Live traces: spans of calls, runs and jobs, sent to an OpenTelemetry collector as they end.

    invoke_agent          a run, when its agent describes it
      chat name@N         a call; a link leads to the span of the job that made the version
        cray.queue        its wait for a place at the engines
        cray.swap.wait    its wait for a replica that serves the version
      execute_tool        a tool call of the run
    train                 a job, when its version is registered

Names and attributes are those of the GenAI conventions that the export `otel` has, 1.41. A call
with a W3C `traceparent` belongs to that trace, else to the trace of its run, whose id is the
export's. So is the id of the run's span, which is known before the run has ended. The call's own
`traceparent` goes on to vLLM, whose spans nest below it. Messages are sent only with `content`,
redacted as they are stored. Spans are made from records after the fact. Nothing here is imported
where no endpoint is set.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from cray_agents.exact_json import dump_json
from cray_agents.records import Run
from cray_agents.runtime.exports.formats.otel import SCHEMA, genai_answer, genai_message, trace_hash

LEAST_WAIT = 0.001  # seconds of a wait that gets a span
REMEMBERED = 10_000  # calls whose ends are known for the tools that follow them
CUT = ("error", "cancelled")

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("cray_agents", schema_url=SCHEMA)
_RESOURCE = Resource.create({"service.name": "cray-agents"}, SCHEMA)


@dataclass
class CallTrace:
    """The span of a call that is under way: its own context, and the one above it."""

    context: SpanContext
    parent: SpanContext | None

    @property
    def traceparent(self) -> str:
        """The W3C header for whoever works on the call."""
        trace, span = self.context.trace_id, self.context.span_id
        return f"00-{trace:032x}-{span:016x}-{int(self.context.trace_flags):02x}"


@dataclass(frozen=True)
class CallEnd:
    """A call that has ended, for its span.

    body: of the call's event, or the fields of it that are known. requested: the request's `model`.
    job: that made the version. waited: seconds for a place. began: when a replica took it, in Unix
    seconds; 0 if none did. first: seconds to a stream's first event. failure: type and message.
    """

    body: Mapping[str, Any]
    requested: str
    job: str | None = None
    waited: float = 0.0
    began: float = 0.0
    first: float | None = None
    failure: tuple[str, str] | None = None


@dataclass
class LiveTraces:
    """Sends spans in batches from a thread of its own; those that find no collector are dropped.

    `endpoint`: a collector's URL; spans go to its /v1/traces. `content`: whether messages are sent.
    """

    endpoint: str
    content: bool = False
    _ends: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        """Start the thread."""
        url = f"{self.endpoint.rstrip('/')}/v1/traces"
        self._processor = BatchSpanProcessor(OTLPSpanExporter(url), schedule_delay_millis=1000)

    def close(self) -> None:
        """Send what waits, and end the thread. Blocks, for some seconds at most."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def begin(self, traceparent: str | None, run_id: str, *, named: bool) -> CallTrace:
        """Return the trace of a call that begins. `named`: its client named the run."""
        above = parse_traceparent(traceparent)
        if above is None and named:
            above = _named_context(run_id)
        trace_id = above.trace_id if above is not None else _named_context(run_id).trace_id
        flags = above.trace_flags if above is not None else _SAMPLED
        return CallTrace(_new_context(trace_id, flags), above)

    def end_call(self, trace: CallTrace, end: CallEnd) -> None:
        """Send the spans of a call."""
        body = end.body
        started, ended = float(body["started"]), float(body["started"]) + float(body["seconds"])
        self._ends[str(body["id"])] = ended
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)
        links = []
        if end.job is not None:
            about = {"cray_agents.job": end.job, "cray_agents.link": "made the version"}
            links.append(Link(job_context(end.job), about))
        attributes = dict(_call_attributes(end, self.content))
        operation = attributes["gen_ai.operation.name"]
        self._send(
            f"{operation} {body['model']}", trace.context, trace.parent, (started, ended),
            attributes, kind=SpanKind.CLIENT, links=links, failure=end.failure,
        )  # fmt: skip
        taken = started + end.waited
        for name, begin, until in (
            ("cray.queue", started, taken),
            ("cray.swap.wait", taken, end.began or taken),
        ):
            if until - begin >= LEAST_WAIT:
                child = _new_context(trace.context.trace_id, trace.context.trace_flags)
                self._send(name, child, trace.context, (begin, until), {})

    def end_run(self, run: Run) -> None:
        """Send the spans of a run and its tool calls. The run's calls sent their own."""
        context = _named_context(run.id)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "cray_agents",
            "gen_ai.conversation.id": run.id,
            "gen_ai.agent.name": run.agent,
            "gen_ai.request.model": run.model,
            "cray_agents.stop_reason": str(run.stop_reason),
            "cray_agents.loop": run.loop,
            "cray_agents.iteration": run.iteration,
        }
        events = [
            SpanEvent(
                "gen_ai.evaluation.result",
                {
                    "gen_ai.evaluation.name": reward.name,
                    "gen_ai.evaluation.score.value": float(reward.value),
                    "cray_agents.reward.source": reward.source,
                },
                _nanoseconds(reward.time),
            )
            for reward in run.rewards
        ]
        failure = None if run.error is None else (run.error.type, run.error.type)
        times = (run.started, run.started + run.seconds)
        name = f"invoke_agent {run.agent}".strip()
        self._send(name, context, None, times, attributes, events=events, failure=failure)
        for turn in run.trajectory.turns:
            begin = self._ends.get(turn.call_id, run.started)
            for tool in turn.tool_calls:
                about = {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": tool.name,
                    "gen_ai.tool.call.id": tool.id,
                    "gen_ai.tool.type": "function",
                }
                if self.content:
                    about |= {"gen_ai.tool.call.arguments": tool.arguments}
                wrong = None if tool.error is None else ("tool_error", "tool_error")
                times = (begin, begin + tool.seconds)
                child = _new_context(context.trace_id, context.trace_flags)
                name = f"execute_tool {tool.name}"
                self._send(name, child, context, times, about, failure=wrong)

    def end_job(self, job_id: str, events: Sequence[Mapping[str, Any]], version: str) -> None:
        """Send the span of a job that made a version, from the job's events; none without any."""
        if not events:
            return
        steps = [event for event in events if event.get("event") == "step"]
        attributes = {
            "cray_agents.job": job_id,
            "cray_agents.version": version,
            "cray_agents.steps": len(steps),
            "cray_agents.loss": steps[-1].get("loss") if steps else None,
        }
        times = (float(events[0]["time"]), float(events[-1]["time"]))
        self._send(f"train {version}", job_context(job_id), None, times, attributes)

    def _send(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        events: Sequence[SpanEvent] = (),
        failure: tuple[str, str] | None = None,
    ) -> None:
        given = {key: value for key, value in attributes.items() if value not in (None, "", [])}
        status = Status(StatusCode.UNSET)
        if failure is not None:
            given["error.type"], status = failure[0], Status(StatusCode.ERROR, failure[1])
        begin, end = map(_nanoseconds, times)
        self._processor.on_end(
            ReadableSpan(
                name, context, parent, _RESOURCE, given, events, links, kind, status=status,
                start_time=begin, end_time=max(begin, end), instrumentation_scope=_SCOPE,
            )
        )  # fmt: skip


def parse_traceparent(header: str | None) -> SpanContext | None:
    """Return the context of a W3C `traceparent`; None for none, or one that is not valid."""
    match = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    flags = TraceFlags(int(match[3], 16))
    context = SpanContext(int(match[1], 16), int(match[2], 16), True, flags)
    return context if context.is_valid else None


def job_context(job_id: str) -> SpanContext:
    """Return the context of a job's span, which follows from the job's id."""
    return _named_context(f"job {job_id}")


def _named_context(run_id: str) -> SpanContext:
    trace, span = trace_hash(run_id, 32), trace_hash(run_id, 16)
    return SpanContext(int(trace, 16), int(span, 16), True, _SAMPLED)


def _new_context(trace_id: int, flags: TraceFlags) -> SpanContext:
    return SpanContext(trace_id, int.from_bytes(os.urandom(8)) or 1, False, flags)


def _call_attributes(end: CallEnd, content: bool) -> Iterator[tuple[str, Any]]:
    body = end.body
    operation = "text_completion" if body.get("api") == "/v1/completions" else "chat"
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "cray_agents"
    yield "gen_ai.conversation.id", body["run_id"]
    yield "gen_ai.request.model", end.requested
    yield "gen_ai.response.model", body["model"]
    yield "gen_ai.response.id", body["id"]
    if finish := body.get("finish_reason"):
        yield "gen_ai.response.finish_reasons", [finish]
    if "token_ids" in body:
        yield "gen_ai.usage.input_tokens", len(body["prompt_token_ids"])
        yield "gen_ai.usage.output_tokens", len(body["token_ids"])
    yield "gen_ai.response.time_to_first_chunk", end.first
    yield "cray_agents.job", end.job
    if content and "message" in body:
        requested = [genai_message(message) for message in body["messages"]]
        answer = [genai_answer(body["message"], body.get("finish_reason"))]
        yield "gen_ai.input.messages", dump_json(requested).decode()
        yield "gen_ai.output.messages", dump_json(answer).decode()


def _nanoseconds(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e6) * 1000
