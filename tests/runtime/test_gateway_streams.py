"""Streams: the client's view, the record, and all ways to end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from cray_agents.engines.scripted import ScriptedEngine, tool_call
from cray_agents.errors import EngineError, EngineUnavailable
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.runtime.gateway.model_calls.admission import Admission
from tests.support.scripted_gateway import (
    CHAT,
    TOOL,
    Gateway,
    Paced,
    block,
    checkpoint,
    echo,
    says,
    served,
    until,
)

DONE = b"data: [DONE]\n\n"


def streamed(gateway: Gateway, text: str, run: str = "", **fields: Any) -> Any:
    """The response, to be read as it comes."""
    body = {"model": "calc", "messages": says(text), "stream": True, **fields}
    return gateway.http.post(f"{gateway.url}{run}{CHAT}", json=body)


async def test_stream(gateway: Gateway) -> None:
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="calc", messages=says("one and two and three"), stream=True
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    chunks = [chunk async for chunk in raw.parse()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "one and two and three" and len(chunks) > 3
    assert {c.model for c in chunks} == {"calc@1"} and len({c.id for c in chunks}) == 1
    assert chunks[-1].choices[0].finish_reason == "stop"
    (call,) = gateway.calls(raw.headers["x-run-id"])
    assert (call.id, bytes(call.token_ids).decode()) == (chunks[0].id, text)
    assert call.logprobs == [-0.5] * len(text) and call.prompt_token_ids
    assert call.message == {"role": "assistant", "content": text}
    assert (call.finish_reason, call.sampling) == ("stop", {})


async def test_a_streamed_tool_call_is_recorded_whole(tmp_path: Path) -> None:
    two = [tool_call("add", a=1, b=2), tool_call("add", a=3, b=4)]
    async with served(tmp_path, ScriptedEngine([two])) as gateway:
        reply = await gateway.ask("add", stream=True, tools=[TOOL])
        (call,) = gateway.calls(reply.run_id)
        functions = [made["function"] for made in call.message["tool_calls"]]
        assert [f["arguments"] for f in functions] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
        assert {f["name"] for f in functions} == {"add"}
        assert all(made["id"] and made["type"] == "function" for made in call.message["tool_calls"])
        assert call.finish_reason == "tool_calls"


async def test_usage_comes_to_who_asks(gateway: Gateway) -> None:
    options: Any
    for options in (None, {"include_usage": True}):
        stream = await gateway.client().chat.completions.create(
            model="calc", messages=says("a b"), stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        usage = chunks[-1].usage
        assert usage.completion_tokens == 3 if options and usage else usage is None


def held(go: asyncio.Event) -> ScriptedEngine:
    """Says nothing as calc@1 until `go` is set."""

    async def say(request: dict[str, Any], version: str) -> str:
        if version == "calc@1":
            await go.wait()
        return f"I am {version}"

    return ScriptedEngine(say)


async def test_a_waiting_stream_is_kept_alive(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with (
        served(tmp_path, held(go), keep_alive=0.1) as gateway,
        streamed(gateway, "hello") as response,
    ):
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        go.set()
        assert (await response.read()).endswith(DONE)


@pytest.mark.slow
async def test_a_stream_that_a_swap_holds_is_kept_alive(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with served(tmp_path, held(go), keep_alive=0.01) as gateway:
        new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
        await gateway.call("POST", "/v1/models/calc/versions", json=new)
        first = asyncio.create_task(gateway.ask("who?", stream=True))
        await until(lambda: gateway.engine.requests)
        promote = gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
        promotion = asyncio.create_task(promote)
        await until(lambda: gateway.pool.status()[0]["state"] == "swapping")
        async with streamed(gateway, "who?") as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go.set()
            head, _, rest = (await response.read()).partition(b"data: ")
        assert (await promotion)[0] == 200
        assert b"I am cal" in (await first).body and b'"calc@1"' in (await first).body
        assert b"data" not in head
        assert b'"calc@2"' in rest and b'"calc@1"' not in rest and rest.endswith(DONE)


async def test_a_client_that_leaves_is_recorded_and_ends_the_request(tmp_path: Path) -> None:
    engine = Paced(echo, pause=0.02)
    async with served(tmp_path, engine, admission=Admission(1)) as gateway:
        async with streamed(gateway, "word " * 200, "/runs/run_gone") as response:
            async for line in response.content:
                if b"word" in line:
                    break
            response.close()
        await until(lambda: engine.active == 0 and gateway.store.runs())
        (call,) = gateway.calls("run_gone")
        assert (engine.cancelled, call.finish_reason) == (1, "cancelled")
        assert 0 < len(call.token_ids) == len(call.logprobs) < 900
        assert ("word " * 200).startswith(call.message["content"])
        assert bytes(call.token_ids).decode() == call.message["content"]
        assert gateway.store.run("run_gone").stop_reason == "cancelled"
        assert gateway.pool.status()[0]["in_flight"] == 0
        engine.pause = 0.0
        assert (await gateway.ask("next")).text == "next"  # the slot is free


async def test_an_error_in_mid_stream(tmp_path: Path) -> None:
    async with served(tmp_path, Paced(echo)) as gateway:
        raw = await gateway.client().chat.completions.with_raw_response.create(
            model="calc", messages=says("one two explode, and more"), stream=True
        )
        with pytest.raises(openai.APIError, match="the engine died"):
            [chunk async for chunk in raw.parse()]
        (call,) = gateway.calls(raw.headers["x-run-id"])
        assert call.finish_reason == "error" and call.message["content"] == "one two "
        assert gateway.services.admission.inside() == 0


class Dying(ScriptedEngine):
    """An engine that dies after some text: what it sampled is not known, as it comes last."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        for events in EVENTS[exchange.path]:
            yield events
        raise EngineUnavailable("the replica of calc@1: the connection to it broke off")


EVENTS = {
    CHAT: [b'data: {"choices": [{"index": 0, "delta": {"content": "one two"}}]}\n\n'],
    "/v1/responses": [
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
        b'"response":{"id":"r","output":[]}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        b'"sequence_number":1,"delta":"one two"}\n\n',
    ],
    "/v1/messages": [
        b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
        b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        b'"content_block":{"type":"text","text":""}}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"one two"}}\n\n',
    ],
}


@pytest.mark.parametrize("path", EVENTS)
async def test_a_stream_that_its_engine_breaks_off_can_be_found(tmp_path: Path, path: str) -> None:
    async with served(tmp_path, Dying()) as gateway:
        reply = await gateway.ask("hi", path=path, input="hi", max_tokens=9, stream=True)
        head, _, last = reply.body.strip().rpartition(b"\n\n")[2].rpartition(b"data: ")
        event = orjson.loads(last)
        assert "broke off" in event["error"]["message"]
        assert (head == b"event: error\n") == (path != CHAT) == (event.get("type") == "error")
        status, run = await gateway.call("GET", f"/v1/trajectories/{reply.run_id}")
        (call,) = gateway.calls(reply.run_id)
        assert (status, run["stop_reason"], call.finish_reason) == (200, "error", "error")
        assert call.error == run["error"]["message"] == event["error"]["message"]
        assert call.messages == says("hi") and call.message["content"] == "one two"
        assert call.token_ids == call.logprobs == []
        if path != CHAT:
            return
    async with served(tmp_path, Dying()) as gateway:  # as the responses API says it
        with pytest.raises(openai.APIError, match="broke off") as caught:
            client = gateway.client()
            stream = await client.responses.create(model="calc", input="hi", stream=True)
            seen = [event async for event in stream]
            assert len(seen) == 2
        assert caught.value.code == "engine_unavailable"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_reward_may_follow_the_finish_reason(tmp_path: Path, n: int) -> None:
    """A client need not read on: the call is on record by then."""
    async with served(tmp_path, ScriptedEngine(echo)) as gateway:
        for number in range(5):
            async with streamed(gateway, "one two three", f"/runs/run_{number}", n=n) as response:
                left = n
                async for line in response.content:
                    left -= b'"finish_reason":"stop"' in line
                    if not left:
                        break
                path = f"/v1/trajectories/run_{number}/rewards"
                assert (await gateway.call("POST", path, json={"value": 1}))[0] == 200


class Unfinished(ScriptedEngine):
    """An engine with error events of its own, as vLLM sends in the APIs other than chat."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().answer(exchange)) as pieces:
            async for piece in pieces:
                yield b'event: error\ndata: {"type":"error"}\n\n' if piece == DONE else piece


class Uneven(ScriptedEngine):
    """An engine that breaks off after text for only the second of three choices."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        exchange.samples = [
            SampledSequence([1], [], []),
            SampledSequence([1], [7], [-0.5]),
            SampledSequence([1], [], []),
        ]
        choice = (
            {"text": "b"} if exchange.path == "/v1/completions" else {"delta": {"content": "b"}}
        )
        yield b"data: " + orjson.dumps({"choices": [{"index": 1, **choice}]}) + b"\n\n"
        raise EngineError("the engine died", status=500)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_texts_of_a_cut_stream_are_their_own_sequences(tmp_path: Path, path: str) -> None:
    async with served(tmp_path, Uneven()) as gateway:
        reply = await gateway.ask("hi", path=path, prompt="hi", n=3, stream=True)
        recorded = [
            (call.token_ids, call.message["content"]) for call in gateway.calls(reply.run_id)
        ]
        assert recorded == [([], None), ([7], "b"), ([], None)]


async def test_a_stream_without_its_last_event_has_failed(tmp_path: Path) -> None:
    async with served(tmp_path, Unfinished(echo)) as gateway:
        key = {"Idempotency-Key": "k"}
        for _ in range(2):
            reply = await gateway.ask("one two three", stream=True, headers=key)
            assert reply.body.endswith(b'event: error\ndata: {"type":"error"}\n\n')
            (call,) = gateway.calls(reply.run_id)
            assert (call.finish_reason, call.message["content"]) == ("error", "one two three")
        assert len(gateway.engine.requests) == 2  # not kept as an answer


async def test_all_is_well_is_said_when_it_is_recorded_and_not_before(tmp_path: Path) -> None:
    async with served(tmp_path, Paced(echo, pause=0.01)) as gateway:
        for number in range(5):
            asked = f"what is {number}?"
            async with streamed(gateway, asked, f"/runs/run_{number}") as response:
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        break
                assert f'"run_{number}"' in _on_disk(gateway)


def _on_disk(gateway: Gateway) -> str:
    return "".join(path.read_text() for path in gateway.services.home.segments.glob("*.jsonl"))


async def test_a_store_that_fails_in_mid_stream_ends_it_with_an_error(tmp_path: Path) -> None:
    engine = Paced(echo, pause=0.05)
    async with served(tmp_path, engine) as gateway:
        request = asyncio.create_task(gateway.ask("one two three", stream=True))
        await until(lambda: engine.active)
        block(gateway.services.home)
        reply = await request
        *chunks, last = reply.body.strip().split(b"\n\n")
        assert b"one two " in b"".join(chunks) and DONE not in reply.body
        assert b'"finish_reason":"stop"' not in reply.body
        assert b'"code":"store_error"' in last and b"cannot write" in last


async def test_a_client_that_reads_slowly_holds_up_nobody(tmp_path: Path) -> None:
    async with (
        served(tmp_path, ScriptedEngine(echo)) as gateway,
        streamed(gateway, "x" * 100_000) as response,
    ):
        assert (await gateway.ask("quick")).text == "quick"
        await until(lambda: len(gateway.store.runs()) == 2)  # recorded before it is read
        assert (await response.read()).endswith(DONE)


async def test_what_is_no_stream_option_is_refused(gateway: Gateway) -> None:
    for fields in ({"stream": "yes"}, {"stream": True, "stream_options": [1]}):
        reply = await gateway.ask("hi", **fields)
        assert (reply.status, reply.json["error"]["param"]) == (400, list(fields)[-1])
    assert gateway.engine.requests == []


async def test_a_null_is_no_stream(gateway: Gateway) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"model": "calc", "messages": says("hi"), "stream": None, "stream_options": None}
        async with http.post(gateway.url + CHAT, json=body) as response:
            assert (await response.json())["object"] == "chat.completion"
