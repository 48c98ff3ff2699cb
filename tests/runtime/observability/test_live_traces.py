"""Live traces, as a real OTLP receiver gets them from a gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cray_agents.config import load_config
from cray_agents.errors import ConfigError
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.records import Reward, Run, StopReason, ToolCall, Trajectory, Turn
from cray_agents.runtime.exports.formats.otel import SCHEMA, trace_hash
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scans.text_scanners import Blocks
from cray_agents.runtime.store.redaction import Redactor
from cray_agents.runtime.telemetry.live_traces import LiveTraces, parse_traceparent
from tests.support.bare_models import bare_model
from tests.support.scraped_metrics import put
from tests.support.scripted_gateway import Paced, echo, served
from tests.support.unix_servers import at_socket

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """An OTLP collector over HTTP, as far as spans."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.schemas: set[str] = set()
        self.headers: list[dict[str, str]] = []

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if request.path != "/v1/traces":
            return web.json_response({"error": {"message": "no"}}, status=400)
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.schemas.add(scope.schema_url)
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")

    async def find(self, name: str) -> Span:
        """The only span of this name; waits for it."""
        async with asyncio.timeout(120):
            while not (some := [span for span in self.spans if span.name == name]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (span,) = some
        return span


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")  # or spans are dropped after 10 s
    receiver = Receiver()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", receiver.take)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield receiver
    await runner.cleanup()


def attributes(span: Span) -> dict[str, Any]:
    return {
        one.key: [v.string_value for v in one.value.array_value.values]
        if one.value.HasField("array_value")
        else getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


async def test_a_call_in_its_clients_trace(tmp_path: Path, receiver: Receiver) -> None:
    traces = LiveTraces(receiver.url)
    async with served(tmp_path, Paced(echo, pause=0.02), traces=traces) as gateway:
        header = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
        reply = await gateway.ask("secret words", stream=True, headers=header)
        span = await receiver.find("chat calc@1")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, ABOVE)
    assert span.kind == Span.SPAN_KIND_CLIENT and receiver.schemas == {SCHEMA}
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.conversation.id"] == reply.run_id
    assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == ("calc", "calc@1")
    assert found["gen_ai.usage.output_tokens"] > 1
    length = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.response.time_to_first_chunk"] <= length
    assert b"secret words" not in b"".join(span.SerializeToString() for span in receiver.spans)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_withheld_answer_has_one_span(
    tmp_path: Path, receiver: Receiver, stream: bool
) -> None:
    traces, blocks = LiveTraces(receiver.url), Blocks(["secrets"])
    async with served(tmp_path, traces=traces, blocks=blocks) as gateway:
        withheld = await gateway.ask("it is me@example.com", stream=stream)
        assert b"content_filter" in withheld.body
    span = await receiver.find("chat calc@1")  # after all are sent
    assert attributes(span)["error.type"] == "content_filter"


async def test_a_run_with_its_call_and_tool_is_one_trace(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with served(tmp_path, traces=LiveTraces(receiver.url)) as gateway:
        reply = await gateway.ask("hi", headers={"X-Run-Id": "run-7"})
        (call,) = gateway.calls("run-7")
        tool = ToolCall(id="t1", name="shout", arguments="{}", seconds=0.5, error="it broke")
        run = Run(
            id="run-7", agent="echo", model="calc", input="hi", stop_reason=StopReason.completed,
            started=call.started - 0.25, seconds=2.0, rewards=[Reward(name="right", value=0.5)],
            trajectory=Trajectory(turns=[Turn(call_id=call.id, tool_calls=[tool])]),
        )  # fmt: skip
        event = {"kind": "run", "body": run.model_dump(mode="json")}
        path = "/v1/trajectories/run-7/events"
        for _ in range(2):  # said again it is the same event, and no further span
            assert (await gateway.call("POST", path, json={"events": [event]}))[0] == 200
        chat, agent = await receiver.find("chat calc@1"), await receiver.find("invoke_agent echo")
        used = await receiver.find("execute_tool shout")
    assert reply.status == 200
    assert {span.trace_id.hex() for span in (chat, agent, used)} == {trace_hash("run-7", 32)}
    assert chat.parent_span_id == used.parent_span_id == agent.span_id
    assert agent.span_id.hex() == trace_hash("run-7", 16) and not agent.parent_span_id
    assert used.start_time_unix_nano >= chat.end_time_unix_nano - 1000
    assert attributes(used)["error.type"] == "tool_error"
    (reward,) = agent.events
    assert reward.name == "gen_ai.evaluation.result"


async def test_a_call_leads_to_the_job_that_made_its_version(
    tmp_path: Path, receiver: Receiver
) -> None:
    home = Home(tmp_path / "home")
    registry = Registry(home)
    checkpoint, manifest = registry.import_checkpoint(bare_model(tmp_path / "model"))
    registry.register("calc", checkpoint, manifest.model_copy(update={"job": "job-9"}))
    registry.promote("calc", 1, who="test")
    midway, manifest = registry.import_checkpoint(bare_model(tmp_path / "midway", b"other"))
    registry.register("calc", midway, manifest.model_copy(update={"job": "job-9"}))
    started, step = {"event": "started", "time": 100.0}, {"event": "step", "time": 104.0}
    published = {"event": "version", "checkpoint": midway, "time": 102.0}
    put(home.job("job-9") / "events.jsonl", started, published, step)
    async with served(tmp_path, traces=LiveTraces(receiver.url)) as gateway:
        body = {"checkpoint": checkpoint}
        assert (await gateway.call("POST", "/v1/models/calc/versions", json=body))[0] == 200
        prompted = {**body, "prompts": {"a": {"instructions": "Be brief."}}}
        for more in ({"checkpoint": midway}, prompted):  # no further span
            _, new = await gateway.call("POST", "/v1/models/calc/versions", json=more)
        await gateway.ask("hi")
        train, chat = await receiver.find("train calc@1"), await receiver.find("chat calc@1")
    (link,) = chat.links
    assert (link.trace_id, link.span_id) == (train.trace_id, train.span_id)
    assert attributes(chat)["cray_agents.job"] == attributes(train)["cray_agents.job"] == "job-9"
    assert train.end_time_unix_nano - train.start_time_unix_nano == 4_000_000_000
    spans = [span.name for span in receiver.spans if span.name.startswith("train ")]
    assert new["id"] == "calc@3" and spans == ["train calc@1"]


async def test_a_failed_call_and_one_that_waited(tmp_path: Path, receiver: Receiver) -> None:
    admission = Admission(1, 5)
    options: dict[str, Any] = {"traces": LiveTraces(receiver.url), "admission": admission}
    async with served(tmp_path, Paced(echo), **options) as gateway:
        ticket = admission.enter("first")
        waits = asyncio.create_task(gateway.ask("explode", headers={"X-Run-Id": "run-8"}))
        async with asyncio.timeout(120):
            while not admission.waiting():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        ticket.release()
        assert (await waits).status == 502
        chat, queue = await receiver.find("chat calc@1"), await receiver.find("cray.queue")
    assert chat.status.code == 2 and attributes(chat)["error.type"]
    assert queue.parent_span_id == chat.span_id
    assert queue.end_time_unix_nano - queue.start_time_unix_nano > 40_000_000


async def test_content_is_sent_as_it_is_stored(tmp_path: Path, receiver: Receiver) -> None:
    traces = LiveTraces(receiver.url, content=True)
    async with served(tmp_path, traces=traces) as gateway:
        gateway.store._redactor = Redactor(["email"], {})
        await gateway.ask("write to ann@example.org")
        found = attributes(await receiver.find("chat calc@1"))
    (asked,) = orjson.loads(found["gen_ai.input.messages"])
    assert asked["role"] == "user" and asked["parts"][0]["content"].startswith("write to")
    assert "ann@example.org" not in str(found)


@pytest.mark.slow
async def test_no_collector_costs_no_call(tmp_path: Path) -> None:
    async with served(tmp_path, traces=LiveTraces("http://127.0.0.1:9")) as gateway:
        assert (await gateway.ask("hi")).text == "hi"


async def test_vllm_gets_the_calls_own_context(receiver: Receiver) -> None:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", receiver.take)
    exchange = EngineCall("/v1/chat/completions", {}, "x", traceparent=f"00-{TRACE}-{ABOVE}-01")
    async with at_socket(application) as url:
        engine = VllmEngine(url, "m", "secret")
        with pytest.raises(Exception, match="no"):
            async for _ in engine.answer(exchange):
                pass
        await engine.close()
    assert receiver.headers[0]["traceparent"] == f"00-{TRACE}-{ABOVE}-01"


@pytest.mark.parametrize(
    "header",
    ["", "00-1-2-01", f"ff-{TRACE}-{ABOVE}-01", f"00-{'0' * 32}-{ABOVE}-01", f"00-{TRACE}-{ABOVE}"],
)
def test_a_header_that_is_no_context_begins_a_new_trace(header: str) -> None:
    assert parse_traceparent(header) is None
    assert parse_traceparent(f"00-{TRACE}-{ABOVE}-00") is not None


def test_a_wrong_endpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load_config({"otlp_endpoint": "localhost:4318"}, tmp_path)
