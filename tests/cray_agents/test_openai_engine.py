"""The engine over HTTP, against a real server on loopback that misbehaves as told."""

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from cray_agents import Agent
from cray_agents.agent import OpenAIEngine
from cray_agents.agent.stream_events import RunEnded, TextDelta
from cray_agents.engines import plain_http
from cray_agents.engines.openai_engine import WIDTH
from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable, StoreError
from cray_agents.records import digest
from cray_agents.tools.calculator import calculator
from tests.support.waiting import until

ASK = {"model": "calc", "messages": [{"role": "user", "content": "hi"}]}


def answer(text: str = "ok", exact: bool = True) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    if not exact:
        return {"id": "c1", "model": "gpt", "choices": [choice]}
    choice |= {"token_ids": [4, 5], "logprobs": {"content": [{"logprob": -0.5}] * 2}}
    return {"id": "c1", "model": "calc@1", "prompt_token_ids": [1], "choices": [choice]}


def refusal(status: int, message: str = "no", **headers: str) -> Response:
    error = {"message": message, "type": "x", "param": "messages", "code": "some_code"}
    return JSONResponse({"error": error}, status, headers=headers)


async def test_what_is_sent_and_what_comes_back(server):
    server.answer = lambda body: answer()
    engine = OpenAIEngine(server.url)
    request = {**ASK, "top_k": 5, "temperature": 0.5, "extra_headers": {"X-Run-Id": "run_7"}}
    assert await engine.chat(request) == answer()
    assert server.run_ids == ["run_7"]
    assert server.requests == [
        {**ASK, "top_k": 5, "temperature": 0.5, "logprobs": True, "return_token_ids": True,
             "return_samples": True,
         "stream": False},
    ]  # fmt: skip
    assert engine.exact_tokens is True


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_urls(url, monkeypatch):
    assert OpenAIEngine(url).base_url == "http://h:1/v1"
    monkeypatch.setenv("CRAY_AGENTS_URL", url)
    assert OpenAIEngine().base_url == "http://h:1/v1"
    assert OpenAIEngine("http://h/runs/r1/v1").base_url == "http://h/runs/r1/v1"


# ---- servers that know no exact tokens


async def test_a_server_that_refuses_the_fields(server):
    def strict(body: dict[str, Any]) -> Any:
        if "return_token_ids" in body:
            return refusal(400, "Unrecognized request argument: return_token_ids")
        return answer(exact=False)

    server.answer = strict
    engine = OpenAIEngine(server.url)
    for _ in range(2):
        assert (await engine.chat(ASK))["id"] == "c1"
    assert len(server.requests) == 3 and engine.exact_tokens is False


async def test_a_server_that_ignores_the_fields(server):
    server.answer, server.gateway = lambda body: answer(exact=False), False
    engine = OpenAIEngine(server.url)
    run = await Agent(name="a", engine=engine).run("hi")
    assert (run.output, run.model, run.calls[0].token_ids) == ("ok", "gpt", [])
    await engine.chat(ASK)
    assert "return_token_ids" not in server.requests[1]


async def test_a_request_that_is_refused_for_itself(server):
    server.answer = lambda body: refusal(400, "context too long")
    engine = OpenAIEngine(server.url)
    with pytest.raises(EngineError, match="context too long") as caught:
        await engine.chat(ASK)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "messages", "some_code")
    assert engine.exact_tokens is None
    run = await Agent(name="a", engine=engine).run("hi")
    assert run.stop_reason == "error" and run.error is not None and not run.error.infrastructure


# ---- servers that fail


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_failures_that_pass_are_retried(server, status):
    replies = [refusal(status, **{"retry-after-ms": "20"}) for _ in range(3)]
    server.answer = lambda body: replies.pop() if replies else answer()
    assert (await OpenAIEngine(server.url).chat(ASK))["id"] == "c1"
    assert len(server.requests) == 4


async def test_failures_that_stay(server):
    server.answer = lambda body: refusal(503, "starting", **{"retry-after-ms": "10"})
    with pytest.raises(EngineUnavailable, match="starting") as caught:
        await OpenAIEngine(server.url, retries=2).chat(ASK)
    assert caught.value.status == 503 and len(server.requests) == 3


async def test_nobody_there():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = held.getsockname()[1]
        engine = OpenAIEngine(f"http://127.0.0.1:{port}", retries=1)
        run = await Agent(name="a", engine=engine).run("hi")
    assert run.stop_reason == "error" and run.error is not None
    assert (run.error.type, run.error.infrastructure) == ("EngineUnavailable", True)
    assert f"nobody answers at http://127.0.0.1:{port}/v1" in run.error.message
    assert "cray-agents up" in run.error.message


async def test_too_late(server):
    async def sleepy(body: Any) -> Any:
        await asyncio.sleep(5)
        return answer()

    server.answer = sleepy
    with pytest.raises(EngineTimeout, match="did not answer in time"):
        await OpenAIEngine(server.url, retries=0, timeout=0.1).chat(ASK)


@pytest.mark.parametrize("text", ["<html>", "[]", "", '"x"'])
async def test_no_json(server, text):
    server.answer = lambda body: Response(text, media_type="application/json")
    with pytest.raises(EngineError, match="answered with no JSON"):
        await OpenAIEngine(server.url).chat(ASK)


# ---- streams


def events(*chunks: Any, cut: bool = False, done: bool = True) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f": a comment\n\ndata: {json.dumps(chunk)}\n\n"
        if cut:
            raise ConnectionAbortedError("the server dies in mid-stream")
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def chunk(delta: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "model": "calc@1", "choices": [{"index": 0, "delta": delta, **more}]}


HEAD = {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1]}
FOUR = chunk({"content": "4"}, token_ids=[4], logprobs={"content": [{"logprob": -0.5}]})
END = chunk(
    {"content": "2"}, token_ids=[5], logprobs={"content": [{"logprob": -1}]}, finish_reason="stop"
)


async def test_stream(server):
    server.answer = lambda body: events(HEAD, FOUR, END)
    got = [event async for event in Agent(name="a", engine=OpenAIEngine(server.url)).stream("hi")]
    assert got[1:3] == [TextDelta("4"), TextDelta("2")]
    assert isinstance(got[-1], RunEnded)
    run = got[-1].run
    assert run.output == "42" and run.stop_reason == "completed"
    call = run.calls[0]
    assert (call.id, call.model, call.finish_reason) == ("c1", "calc@1", "stop")
    assert (call.prompt_token_ids, call.token_ids, call.logprobs) == ([1], [4, 5], [-0.5, -1])
    assert server.requests[0]["stream"] is True
    assert server.events[0]["body"]["stop_reason"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda: events(HEAD, FOUR, cut=True), "EngineUnavailable"),
        (lambda: events(HEAD, FOUR, {"error": {"message": "gone", "code": 503}}),
         "EngineUnavailable"),
        (lambda: events(HEAD, FOUR, {"error": {"message": "gone", "code": "x"}}), "EngineError"),
        (lambda: events(HEAD, FOUR, done=False), "EngineError"),
        (lambda: refusal(503, **{"x-should-retry": "false"}), "EngineUnavailable"),
    ],
)  # fmt: skip
async def test_broken_streams(server, reply, kind):
    server.answer = lambda body: reply()
    got = [event async for event in Agent(name="a", engine=OpenAIEngine(server.url)).stream("hi")]
    run = got[-1].run
    assert run.stop_reason == "error" and run.output is None
    assert (run.error.type, run.error.infrastructure) == (kind, True)


# ---- records


async def test_the_platform_gets_the_run(server):
    def play(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return answer("432")
        reply = answer("")
        function = {"name": "calculator", "arguments": '{"expression": "47+385"}'}
        call = {"id": "t1", "type": "function", "function": function}
        reply["choices"][0]["message"]["tool_calls"] = [call]
        return reply

    server.answer = play
    agent = Agent(name="a", tools=[calculator], engine=OpenAIEngine(server.url), output_type=int)
    run = await agent.run("hi", run_id="run_1", loop="l", iteration=1, attempt=0)
    assert run.output == 432
    [event] = server.events
    assert (event["id"], event["kind"]) == (f"run_1.run.{digest(event['body'])}", "run")
    turns = event["body"]["trajectory"]["turns"]
    assert [turn["call"] for turn in turns] == [None, None]
    assert turns[0]["call_id"] == "c1" and turns[0]["tool_calls"][0]["result"] == 432
    assert event["body"]["loop"] == "l" and len(event["body"]["trajectory"]["messages"]) == 4


async def test_other_servers_get_nothing_and_none_turns_it_off(server):
    engine = OpenAIEngine(server.url)
    server.answer = lambda body: answer()
    await Agent(name="a", engine=engine, recorder=None).run("hi")
    assert server.events == []
    server.gateway = False
    await Agent(name="a", engine=engine).run("hi")
    assert server.events == [] and engine.gateway is False


async def test_a_record_that_is_not_taken_is_an_error(server):
    server.answer, server.record_status = lambda body: answer(), 500
    agent = Agent(name="a", engine=OpenAIEngine(server.url, retries=1))
    with pytest.raises(StoreError, match=r"run run_1 ended \(completed\) but http://127"):
        await agent.run("hi", run_id="run_1")


async def test_a_cancelled_run_is_posted(server):
    async def never(body: Any) -> Any:
        await asyncio.Event().wait()

    server.answer = never
    task = asyncio.create_task(Agent(name="a", engine=OpenAIEngine(server.url)).run("hi"))
    await until(lambda: server.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [event["body"]["stop_reason"] for event in server.events] == ["cancelled"]


# ---- connections


@pytest.mark.slow
async def test_two_hundred_runs_at_once(server):
    many = asyncio.Event()

    async def play(body: Any) -> Any:
        if len(server.requests) > 10:  # not one after another
            many.set()
        async with asyncio.timeout(120):
            await many.wait()
        return answer(body["messages"][0]["content"])

    server.answer = play
    agent = Agent(name="a", engine=OpenAIEngine(server.url), output_type=int)
    runs = await asyncio.gather(*(agent.run(str(n)) for n in range(200)))
    assert [run.output for run in runs] == list(range(200))
    assert sorted(server.run_ids) == sorted(run.id for run in runs)
    assert len(server.events) == 200


def test_one_engine_in_many_loops(server, monkeypatch):
    server.answer = lambda body: answer()
    monkeypatch.setenv("CRAY_AGENTS_URL", server.url)
    agent = Agent(name="a")
    for _ in range(3):
        assert agent.run_sync("hi").output == "ok"
        assert asyncio.run(agent.run("hi")).output == "ok"
    assert len(server.events) == 6


async def test_few_share_a_connection_and_many_have_clients_of_few_connections_each(server):
    server.answer = lambda body: answer()
    engine = OpenAIEngine(server.url)
    for _ in range(5):
        await engine.chat(ASK)
    assert len(set(server.ports)) == 1

    together = asyncio.Event()

    async def when_all_are_there(body: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) == 5 + 3 * WIDTH:
            together.set()
        async with asyncio.timeout(120):
            await together.wait()
        return answer()

    server.answer = when_all_are_there
    with contextlib.ExitStack() as held:
        with engine.connections.borrow() as first:
            more = [held.enter_context(engine.connections.borrow()) for _ in range(2 * WIDTH - 1)]
        assert len(set(map(id, [first, *more]))) == 2
        with engine.connections.borrow() as client:
            assert client is first, "it has room again, however many there are"
    await asyncio.gather(*(engine.chat(ASK) for _ in range(3 * WIDTH)))
    assert len(set(server.ports[5:])) == 3 * WIDTH and server.ports[0] in server.ports[5:]
    with engine.connections.borrow() as client:
        assert client is first, "none of them is counted any more"
    await engine.close()
    with engine.connections.borrow() as client:
        assert client is not first
    await engine.close()


def test_a_client_of_an_ended_event_loop_says_nothing(server, caplog):
    """Two calls of `asyncio.run` without `close`, as scripts make them."""
    server.answer = lambda body: answer()

    async def ask_once() -> None:
        engine = OpenAIEngine(server.url)
        await engine.chat(ASK)

    async def collect() -> None:
        gc.collect()
        await asyncio.sleep(0)
        gc.collect()  # of tasks that ended with an error

    asyncio.run(collect())
    caplog.clear()  # of what other tests have left
    asyncio.run(ask_once())
    asyncio.run(collect())
    assert not caplog.records


# ---- a gateway, asked directly


def chunked() -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield json.dumps(answer()).encode()

    return StreamingResponse(body(), media_type="application/json")


async def test_a_gateway_is_asked_directly_over_few_connections(server, monkeypatch):
    monkeypatch.setattr(plain_http, "KEPT", 600.0)
    server.answer = lambda body: answer(body["messages"][0]["content"] + "é")
    engine = OpenAIEngine(server.url, api_key=key)
    engine.gateway = True
    run = {"X-Run-Id": "run_7"}
    for text in ("short", "long " * 100_000):
        asked = {"model": "m", "messages": [{"role": "user", "content": text}]}
        told = await engine.chat({**asked, "seed": 10**30, "extra_headers": run})
        assert told == answer(text + "é")
        assert server.requests.pop()["seed"] == 10**30
    assert server.run_ids == ["run_7"] * 2 and len(set(server.ports)) == 1
    assert all("x-stainless-lang" not in headers for headers in server.headers)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-late"}
    await engine.close()
    assert (await engine.chat(ASK))["id"] == "c1" and len(set(server.ports)) == 2


async def key() -> str:
    return "sk-late"


@pytest.mark.parametrize(
    "odd",
    [lambda: refusal(503), lambda: refusal(429), chunked, lambda: Response(status_code=204)],
    ids=["unavailable", "too many", "without a length", "no answer"],
)
async def test_what_a_gateway_does_not_answer_the_openai_client_asks_again(server, odd):
    replies = [odd()]
    server.answer = lambda body: replies.pop() if replies else answer()
    engine = OpenAIEngine(server.url, retries=1)
    engine.gateway = True
    assert (await engine.chat(ASK)) == answer()
    first, second = server.headers
    assert "x-stainless-lang" not in first and second["x-stainless-retry-count"] == "1"


async def test_a_gateway_that_closes_its_connections_or_refuses(server):
    engine = OpenAIEngine(server.url)
    engine.gateway = True
    server.answer = lambda body: JSONResponse(answer(), headers={"connection": "close"})
    for _ in range(3):
        assert (await engine.chat(ASK)) == answer()
        await asyncio.sleep(0.05)  # until the end of the connection is seen
    assert len(set(server.ports)) == 3 and len(server.requests) == 3
    server.answer = lambda body: refusal(400, "context too long")
    with pytest.raises(EngineError, match="context too long") as caught:
        await engine.chat(ASK)
    assert (caught.value.status, caught.value.code) == (400, "some_code")
    engine = OpenAIEngine(server.url, retries=0)
    engine.gateway = True
    with pytest.raises(EngineError):  # what HTTP cannot carry is refused in the client's words
        await engine.chat({**ASK, "extra_headers": {"X-Run-Id": "a\r\nX-Other: b"}})
    assert "b" not in {headers.get("x-other") for headers in server.headers}


async def test_a_cancelled_call_leaves_the_gateway(server):
    left = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def until_left(body: Any) -> Any:
        while (await server.request.receive())["type"] != "http.disconnect":
            pass
        loop.call_soon_threadsafe(left.set)
        return answer()

    server.answer = until_left
    engine = OpenAIEngine(server.url)
    engine.gateway = True
    task = asyncio.create_task(engine.chat(ASK))
    await until(lambda: server.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(120):
        await left.wait()
