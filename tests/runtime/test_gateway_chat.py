"""Chat completions in one piece: the official client's view, and the record."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError
from cray_agents.exact_json import sendable
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import canonical
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.gateway.model_calls.apis import SamplingApi, tool_call
from cray_agents.runtime.gateway.model_calls.apis.messages import MESSAGES
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES
from tests.support.scripted_gateway import (
    CHAT,
    TOOL,
    Gateway,
    Paced,
    block,
    checkpoint,
    says,
    served,
    until,
)


async def test_chat_answers_and_records_the_exact_call(gateway: Gateway) -> None:
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="calc",
        messages=says("two plus two"),
        temperature=0.7,
        seed=3,
        extra_body={"top_k": 5},
        extra_headers={"X-Run-Id": "run_a"},
    )
    answer = raw.parse()
    assert raw.headers["x-run-id"] == "run_a"
    assert (answer.model, answer.choices[0].message.content) == ("calc@1", "two plus two")
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].logprobs is None and "token_ids" not in raw.text
    (call,) = gateway.calls("run_a")
    assert (call.id, call.model, call.run_id) == (answer.id, "calc@1", "run_a")
    assert (call.api, call.messages) == (CHAT, says("two plus two"))
    assert bytes(call.prompt_token_ids) == canonical(says("two plus two"))
    assert bytes(call.token_ids) == b"two plus two" and call.logprobs == [-0.5] * 12
    assert call.message == {"role": "assistant", "content": "two plus two"}
    assert call.sampling == {"temperature": 0.7, "seed": 3, "top_k": 5}
    assert call.finish_reason == "stop" and call.started > time.time() - 60 and call.seconds > 0


async def test_the_engine_gets_the_request_as_it_came(gateway: Gateway) -> None:
    odd: dict[str, Any] = {"top_k": 5, "unheard_of": {"a": [None, 1.5]}, "metadata": {"x": "y"}}
    reply = await gateway.ask("hi", **odd)
    (request,) = gateway.engine.requests
    assert request == {"model": "calc", "messages": says("hi"), **odd}
    assert gateway.calls(reply.run_id)[0].sampling == odd


async def test_tokens_are_given_to_who_asks_and_n_gives_a_call_each(gateway: Gateway) -> None:
    for stream in (False, True):
        reply = await gateway.ask(
            "a b",
            path=f"/runs/run_{stream}{CHAT}",
            n=2,
            logprobs=True,
            return_token_ids=True,
            stream=stream,
        )
        first, second = gateway.calls(f"run_{stream}")
        assert second.id == f"{first.id}-1"
        assert bytes(first.token_ids) == bytes(second.token_ids) == b"a b"
        assert first.message == second.message == {"role": "assistant", "content": "a b"}
        assert len(first.logprobs) == len(second.logprobs) == 3
        if not stream:
            assert [c["token_ids"] for c in reply.json["choices"]] == [list(b"a b")] * 2
            assert bytes(reply.json["prompt_token_ids"]) == bytes(first.prompt_token_ids)
            assert reply.json["id"] == first.id


async def test_exact_samples_are_given_to_who_asks(gateway: Gateway) -> None:
    for stream in (False, True):
        for key in ({}, {"Idempotency-Key": f"{stream}"}, {"Idempotency-Key": f"{stream}"}):
            reply = await gateway.ask(
                "a b", n=2, return_samples=True, return_token_ids=True, stream=stream, headers=key
            )
            if stream:
                *_, samples, done, _ = reply.body.split(b"\n\n")
                assert done == b"data: [DONE]"
                answer = json.loads(samples[6:])
                assert (answer["choices"], answer["model"]) == ([], "calc@1")
            else:
                answer = reply.json
            calls = gateway.calls(reply.run_id)
            assert [tuple(sample.values()) for sample in answer["samples"]] == [
                (call.prompt_token_ids, call.token_ids, call.logprobs) for call in calls
            ]
            assert list(answer["samples"][0]) == ["prompt_token_ids", "token_ids", "logprobs"]
            assert len(calls) == 2 and bytes(calls[1].token_ids) == b"a b"
            assert "return_samples" not in gateway.engine.requests[-1]
    assert len(gateway.engine.requests) == 4


class Completing(ScriptedEngine):
    """An engine that answers completions, with as many logprobs as requested."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        exchange.samples = [SampledSequence([1], [7], [-0.5], "stop")]
        logprobs = {"top_logprobs": [{"b": -0.5}] * (exchange.request.get("logprobs") or 0)}
        yield json.dumps({"choices": [{"index": 0, "text": "b", "logprobs": logprobs}]}).encode()


async def test_samples_do_not_stand_for_a_completions_logprobs(tmp_path: Path) -> None:
    async with served(tmp_path, Completing()) as gateway:
        request = {"prompt": "a", "logprobs": 1, "return_samples": True}
        reply = await gateway.ask("a", path="/v1/completions", **request)
        assert reply.json["samples"][0]["token_ids"] == [7]
        assert reply.json["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.5}]


async def test_tools(gateway: Gateway) -> None:
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="calc", messages=says("2+2"), tools=[TOOL]
    )
    call = (raw.parse().choices[0].message.tool_calls or [])[0]
    assert call.type == "function" and call.function.arguments == '{"expression": "2+2"}'
    (recorded,) = gateway.calls(raw.headers["x-run-id"])
    assert recorded.tools == [TOOL]
    assert recorded.message == {
        "role": "assistant", "content": None, "tool_calls": [call.model_dump()]
    }  # fmt: skip
    assert recorded.finish_reason == "tool_calls"


async def test_numbers_keep_their_digits_and_half_a_character_ends_no_conversation(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    big = 123456789012345678901234567890
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": big}}}
    asked = json.dumps({"model": "calc", "messages": says("half \ud83d"), "tools": [tool]})
    assert "\\ud83d" in asked
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    replies = []
    for _ in range(2):  # the repeat compares the requests
        async with gateway.http.post(gateway.url + CHAT, data=asked, headers=headers) as response:
            replies.append((response.status, response.headers["x-run-id"], await response.read()))
    assert replies[0] == replies[1] and replies[0][0] == 200
    (request,) = gateway.engine.requests
    assert request["tools"] == [tool] and request["messages"] == says("half ?")
    run = replies[0][1]
    (call,) = gateway.calls(run)
    assert (call.tools, call.messages) == ([tool], says("half ?"))
    for path in (f"/v1/trajectories/{run}", f"/v1/trajectories/{run}/turns"):
        async with gateway.http.get(gateway.url + path) as response:
            assert response.status == 200 and f'"const":{big}' in await response.text(), path
    assert "half a character" in caplog.text
    again = [*says("half \ud83d"), json.loads(replies[0][2])["choices"][0]["message"]]
    assert (await gateway.ask([*again, *says("on")], tools=[tool])).run_id == run


async def test_a_malformed_call_is_sent_back_as_an_agents_own_is_and_counted(
    tmp_path: Path,
) -> None:
    function = {"name": "calculator", "arguments": "{broken"}
    broken = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": function}]}  # fmt: skip
    async with served(tmp_path, ScriptedEngine([broken, "so?"])) as gateway:
        first = await gateway.ask("2+2", tools=[TOOL])
        result = {"role": "tool", "tool_call_id": "c", "content": "no JSON"}
        second = await gateway.ask([*says("2+2"), broken, result], tools=[TOOL])
        assert first.run_id == second.run_id
        call, later = gateway.calls(first.run_id)
        assert call.message["tool_calls"][0]["function"] == function  # as it was sampled
        assert gateway.engine.requests[1]["messages"] == later.messages
        assert later.messages[1] == sendable(broken) != broken
        _, text = await gateway.call("GET", "/metrics")
        counted = [line for line in text.splitlines() if "malformed_tool_calls_total{" in line]
        assert len(counted) == 1 and 'version="calc@1"' in counted[0] and counted[0].endswith("1.0")


PARTS: list[dict[str, Any]] = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
UNPARSED = '{"unparsed": "{x"}'


@pytest.mark.parametrize(
    ("api", "body", "recorded"),
    [
        (MESSAGES, {"messages": [said]}, [said])
        for said in ({"role": role, "content": PARTS} for role in ("user", "assistant"))
    ]
    + [
        (
            MESSAGES,
            {"system": PARTS, "messages": [{"role": "user", "content": PARTS[:1]}]},
            [{"role": "system", "content": "AB"}, {"role": "user", "content": "A"}],
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": PARTS}]}]},
            [{"role": "tool", "tool_call_id": "t", "content": PARTS}],
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [
                {**part, "type": "input_text"} for part in PARTS]}]},
            [{"role": "user", "content": PARTS}],
        ),
        (
            RESPONSES,
            {"input": [
                {"role": "assistant", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{x"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ]},
            [
                {"role": "assistant", "content": "one"},
                {"role": "assistant", "content": "two",
                 "tool_calls": [tool_call("c", "f", UNPARSED)]},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
            ],
        ),
    ],
)  # fmt: skip
def test_the_record_holds_what_the_engine_is_sent(
    api: SamplingApi, body: dict[str, Any], recorded: list[Any]
) -> None:
    assert api.parse_request(body) == recorded
    if api is RESPONSES:
        assert "{x" not in [item.get("arguments") for item in body["input"]]


async def test_a_list_tells_what_a_foreign_client_asked_and_was_answered(gateway: Gateway) -> None:
    first = await gateway.ask("one")
    answered = [*says("one"), {"role": "assistant", "content": "one"}, *says("two")]
    assert (await gateway.ask(answered)).run_id == first.run_id
    _, page = await gateway.call("GET", "/v1/trajectories?view=summary")
    (row,) = page["data"]
    assert (row["described"], row["input"], row["output"]) == (False, "one", "two")


async def test_what_the_engine_refuses_is_told_and_not_recorded(tmp_path: Path) -> None:
    def refuse(request: dict[str, Any]) -> Any:
        if request.get("temperature") == 3:
            return EngineError("temperature must be at most 2", status=400, param="temperature")
        return EngineError("it broke", status=500)

    async with served(tmp_path, ScriptedEngine(refuse)) as gateway:
        create = gateway.client().chat.completions.create
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="at most 2") as refused:
                await create(model="calc", messages=says("a"), temperature=3, stream=stream)
            assert refused.value.param == "temperature"
            assert refused.value.type == "invalid_request_error"
            with pytest.raises(openai.InternalServerError) as broken:
                await create(model="calc", messages=says("a"), stream=stream)
            assert broken.value.status_code == 502
        assert gateway.store.runs() == []
        assert gateway.services.admission.inside() == 0


async def test_a_pool_that_is_down_is_unavailable(tmp_path: Path) -> None:
    async with served(tmp_path, ScriptedEngine(lambda request: "hi")) as gateway:
        gateway.pool.wait_timeout = 0.1
        await gateway.pool.stop()
        with pytest.raises(openai.InternalServerError) as down:
            await gateway.client().chat.completions.create(model="calc", messages=says("a"))
        assert (down.value.status_code, down.value.code) == (503, "engine_unavailable")
        assert (await gateway.call("GET", "/health/ready"))[0] == 503
        assert (await gateway.call("GET", "/health"))[0] == 200


class Otherwise(ScriptedEngine):
    """An engine whose answers give another reason for their end than the sampler does, as vLLM's.

    That of a named tool is `stop`; a call that `max_tokens` ends is one of `tool_calls`.
    """

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        reason = "length" if exchange.request.get("max_tokens") else "stop"
        exchange.samples = [SampledSequence([1], [2], [-0.5], reason)]
        if exchange.path == "/v1/messages":
            use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
            yield orjson.dumps({"content": [use], "stop_reason": "tool_use"})
            return
        told = {"finish_reason": "tool_calls" if reason == "length" else "stop"}
        calls = [{"id": "t", "index": 0, "function": {"name": "add", "arguments": "{}"}}]
        said = {"role": "assistant", "tool_calls": calls}
        if exchange.streams:
            choice = {"index": 0, "delta": said, **told}
            yield b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\ndata: [DONE]\n\n"
        else:
            yield orjson.dumps({"choices": [{"index": 0, "message": said, **told}]})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 9}, "tool_calls"),
        ({"max_tokens": 9, "path": "/v1/messages"}, "tool_calls"),
        ({"stream": True}, "stop"),
        ({}, "stop"),
    ],
)
async def test_the_clients_finish_reason_is_recorded(
    tmp_path: Path, fields: Any, reason: str
) -> None:
    async with served(tmp_path, Otherwise()) as gateway:
        reply = await gateway.ask("hi", **fields)
        (call,) = gateway.calls(reply.run_id)
        assert call.finish_reason == reason and call.message["tool_calls"]


async def test_a_refusal_in_a_responses_history_is_no_fault_of_the_engine(gateway: Gateway) -> None:
    refusal = {"type": "refusal", "refusal": "no"}
    items = [*says("hi"), {"type": "message", "role": "assistant", "content": [refusal]}]
    reply = await gateway.ask("", path="/v1/responses", input=[*items, *says("why?")])
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    assert "input[1]" in reply.json["error"]["message"] and not gateway.engine.requests


async def test_unknown_model(gateway: Gateway) -> None:
    for model in ("gpt-9", "calc@2", "calc@x", "../calc", "@", ""):
        with pytest.raises(openai.NotFoundError) as missing:
            await gateway.client().chat.completions.create(model=model, messages=says("a"))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    cancelled: list[str] = []

    async def slow(request: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(request["messages"][-1]["content"])
            raise
        return "too late"

    engine = ScriptedEngine(slow)
    async with served(tmp_path, engine, admission=Admission(1)) as gateway:
        for number in range(2):  # of the one slot
            asking = asyncio.create_task(gateway.ask(f"{number}"))
            await until(lambda: len(engine.requests) == len(cancelled) + 1)
            assert gateway.pool.status()[0]["in_flight"] == 1
            asking.cancel()
            await until(lambda: len(engine.requests) == len(cancelled))
        await until(lambda: gateway.services.admission.inside() == 0)
        assert gateway.pool.status()[0]["in_flight"] == 0 and cancelled == ["0", "1"]
        assert gateway.store.runs() == []  # no token came


async def test_a_swap_under_load_refuses_nobody(tmp_path: Path) -> None:
    engine = Paced(lambda request, version: version, pause=0.002, delay=0.02)
    admission = Admission(4, 4, swapping=lambda: gateway.pool.swapping)
    replies = []
    async with served(tmp_path, engine, admission=admission) as gateway:
        new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
        await gateway.call("POST", "/v1/models/calc/versions", json=new)
        ended = asyncio.Event()

        async def client(number: int) -> None:
            while not ended.is_set():
                replies.append(await gateway.ask("who?", stream=number % 2 == 0))

        async def more_replies(count: int) -> None:
            await until(lambda: len(replies) >= count)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for version in (2, 1, 2):
            await more_replies(len(replies) + 11)
            body = {"version": version}
            status, _ = await gateway.call("POST", "/v1/models/calc/promote", json=body)
            assert status == 200
        ended.set()
        await asyncio.gather(*clients)
        assert {reply.status for reply in replies} == {200} and len(replies) > 30
        calls = [call for reply in replies for call in gateway.calls(reply.run_id)]
        assert {call.model for call in calls} == {"calc@1", "calc@2"}
        assert all(bytes(call.token_ids).decode() == call.model for call in calls)
        assert len(calls) == len(replies)


async def test_the_queue_is_bounded_when_nothing_is_swapped(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slow(request: dict[str, Any]) -> str:
        await gate.wait()
        return "hi"

    async with served(tmp_path, ScriptedEngine(slow), admission=Admission(1, 1)) as gateway:
        requests = [asyncio.create_task(gateway.ask("hi")) for _ in range(2)]
        await until(lambda: gateway.services.admission.waiting() == 1)
        refused = await gateway.ask("hi")
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after-ms"]) > 0
        gate.set()
        assert [(await reply).status for reply in requests] == [200, 200]


async def test_a_call_that_cannot_be_recorded_is_not_answered(gateway: Gateway) -> None:
    block(gateway.services.home)
    for stream in (False, True):
        reply = await gateway.ask("two plus two", stream=stream)
        assert b"cannot write" in reply.body and b"[DONE]" not in reply.body
        assert reply.status == (200 if stream else 503)
