"""Each API over a real vLLM, through the gateway: what is answered, and that what is recorded is
exactly what vLLM itself says it sampled, where its answer can be made to say it."""

import asyncio
import itertools
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from cray_agents import Agent, tool
from cray_agents.agent import ConstrainedEngine, OpenAIEngine
from cray_agents.agent.tool import as_tool, perform
from cray_agents.engines.chat_completions import Assembly, tidy
from cray_agents.errors import EngineError
from cray_agents.ports import EngineCall
from cray_agents.records import ModelCall, new_id
from cray_agents.runtime.gateway.model_calls.relay import KEEP_ALIVE
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.vllm_plugins.wire import HEADER
from tests.runtime.conftest import QUESTION, SYSTEM, TOOL
from tests.support.fuzz.cases import request
from tests.support.fuzz.sampling import PLAIN, sampling_body
from tests.support.fuzz.wire import Reply as WireReply
from tests.support.fuzz.wire import Wire
from tests.support.import_server import process_of
from tests.support.scripted_gateway import CHAT, Gateway, Reply, served, until
from tests.support.unix_servers import socket_of
from tests.support.vllm_pool import at_replica, secret_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

ASK: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
USER: Any = ASK[1:]
# more than 64 tokens: their logprobs leave the engine core in pieces of so many
LONG = {"max_tokens": 150, "ignore_eos": True, "seed": 11}
# a random model would fill all its JSON with blanks
COMPACT = (
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
LOOPS_IF_TOLD = (
    "{% if messages[-1].content == 'loop' %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
CASES = 500 * int(os.environ.get("CRAY_TEST_FUZZ", "1"))  # random requests
SEED = 1
SAY_ALL: dict[str, Any] = {"return_token_ids": True, "logprobs": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    model = tiny_model(folder / "model", tie=False, seed=1, teach=True)
    template = model / "chat_template.jinja"
    template.write_text(LOOPS_IF_TOLD + template.read_text())
    host = VllmProcess(
        "calc", EngineSettings(kv_cache_gib=0.125, engine_args=COMPACT), folder / "replica.log"
    )
    async with served(folder, host=host, model=model, keep_alive=60) as gateway:
        yield gateway


async def test_a_template_that_loops_fails_its_own_request(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    """And leaves nothing behind that goes on looping."""
    ask: Any = [{"role": "user", "content": "loop"}]
    with pytest.raises(openai.BadRequestError, match="the chat template took more than 5 s"):
        await client.chat.completions.create(model="calc", messages=ask)
    await client.chat.completions.create(model="calc", messages=USER, max_tokens=2)
    threads = ["ps", "-L", "-o", "stat=", "-p", str(process_of(gateway.pool.status()[0]["pid"]))]
    await until(lambda: "R" not in subprocess.check_output(threads, text=True))


@pytest.fixture
def client(gateway: Gateway) -> openai.AsyncOpenAI:
    return gateway.client()


def data(reply: Reply) -> list[Any]:
    """The objects of a stream's events."""
    lines = reply.body.split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def logprobs(choice: Any) -> list[float]:
    return [at["logprob"] for at in choice["logprobs"]["content"]]


def check(call: ModelCall, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    assert call.model == "calc@1"
    assert call.prompt_token_ids == prompt and len(prompt) > 0
    assert call.token_ids == tokens and len(tokens) > 0
    assert call.logprobs == logprobs


@pytest.mark.parametrize(
    "fields",
    [
        LONG,
        {"stop": ["385"], "max_tokens": 150, "seed": 4},
        LONG | {"stop": ["never said"]},
        LONG | {"n": 2},
        {"n": 2, "max_tokens": 80, "temperature": 1.5},
        {"tools": [TOOL], "temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 2, "max_tokens": 90},
    ],
    ids=["long", "stop", "stop-unmet", "n", "n-unseeded", "tools", "top"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_is_recorded_as_vllm_says_it_was(
    gateway: Gateway, fields: dict[str, Any], stream: bool
) -> None:
    reply = await gateway.ask(ASK, stream=stream, **SAY_ALL, **fields)
    assert reply.status == 200
    parts = data(reply) if stream else [reply.json]
    assert {part["model"] for part in parts} == {"calc@1"} and len({p["id"] for p in parts}) == 1
    calls = gateway.calls(reply.run_id)
    assert len(calls) == fields.get("n", 1)
    for index, call in enumerate(sorted(calls, key=lambda call: call.id)):
        choices = [c for part in parts for c in part["choices"] if c["index"] == index]
        prompt = next(part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids"))
        tokens = [token for choice in choices for token in choice.get("token_ids") or []]
        given = [v for choice in choices if choice.get("logprobs") for v in logprobs(choice)]
        check(call, prompt, tokens, given)
        assert call.finish_reason == choices[-1]["finish_reason"]
        assert call.id == parts[0]["id"] + (f"-{index}" if index else "")
    # the same, when nobody asks vLLM to say it: another way through it
    plain = await gateway.ask(ASK, stream=stream, **fields)
    assert b'token_ids":[' not in plain.body
    for call, again in zip(calls, gateway.calls(plain.run_id), strict=True):
        assert again.prompt_token_ids == call.prompt_token_ids
        assert len(again.logprobs) == len(again.token_ids) > 0
        if "seed" in fields or fields.get("temperature") == 0:
            assert again.token_ids == call.token_ids
            assert again.logprobs == pytest.approx(call.logprobs, abs=1e-4)
            assert again.finish_reason == call.finish_reason


async def test_many_at_once_are_not_mixed_up(gateway: Gateway) -> None:
    async def one(number: int) -> tuple[Reply, dict[str, Any]]:
        fields: dict[str, Any] = {"max_tokens": 60 + number, "seed": number, "ignore_eos": True}
        fields |= SAY_ALL if number % 3 == 0 else {}
        return await gateway.ask(f"{number} + 1?", stream=number % 2 == 0, **fields), fields

    for reply, fields in await asyncio.gather(*(one(number) for number in range(24))):
        (call,) = gateway.calls(reply.run_id)
        assert len(call.token_ids) == len(call.logprobs) == fields["max_tokens"]
        assert max(call.logprobs) <= 0
        alone = await gateway.ask(call.messages, **fields)
        (again,) = gateway.calls(alone.run_id)
        assert again.prompt_token_ids == call.prompt_token_ids
        assert again.token_ids == call.token_ids
        assert again.logprobs == pytest.approx(call.logprobs, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_several_prompts(gateway: Gateway, stream: bool) -> None:
    raw = await gateway.client().completions.with_raw_response.create(
        model="calc",
        prompt=["one", "and two"],
        n=2,
        max_tokens=80,
        seed=3,
        logprobs=0,
        stream=stream,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    parsed: Any = raw.parse()
    parts = [c.model_dump() async for c in parsed] if stream else [parsed.model_dump()]
    assert {part["model"] for part in parts} == {"calc@1"}
    calls = gateway.calls(raw.headers["x-run-id"])
    assert [call.id.removeprefix(parts[0]["id"]) for call in calls] == ["", "-1", "-2", "-3"]
    for index, call in enumerate(calls):
        choices = [c for part in parts for c in part["choices"] if c["index"] == index]
        prompt = next(c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids"))
        tokens = [token for choice in choices for token in choice["token_ids"]]
        given = [v for choice in choices for v in choice["logprobs"]["token_logprobs"]]
        check(call, prompt, tokens, given)
        text = "".join(choice["text"] for choice in choices)
        assert call.message == {"role": "assistant", "content": text}
        assert call.messages == [{"role": "user", "content": ["one", "and two"]}]
    assert calls[0].prompt_token_ids == calls[1].prompt_token_ids != calls[2].prompt_token_ids


async def test_completions_of_token_ids(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    raw = await client.completions.with_raw_response.create(
        model="calc@1", prompt=[5, 6, 7], max_tokens=4
    )
    assert raw.parse().model == "calc@1"
    assert gateway.calls(raw.headers["x-run-id"])[0].prompt_token_ids == [5, 6, 7]


RESPONSE_TOOL: Any = {"type": "function", "strict": False, **TOOL["function"]}


async def test_responses(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    asked: dict[str, Any] = {
        "model": "calc",
        "instructions": SYSTEM,
        "input": QUESTION,
        "tools": [RESPONSE_TOOL],
        "temperature": 0,
        "max_output_tokens": 80,
    }
    chat = await gateway.ask(ASK, tools=[TOOL], temperature=0)
    (same,) = gateway.calls(chat.run_id)
    raw = await client.responses.with_raw_response.create(**asked)
    answer = raw.parse()
    (item,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(item.arguments) == {"expression": "47 + 385"}
    assert answer.model == "calc@1" and answer.usage is not None
    (call,) = gateway.calls(raw.headers["x-run-id"])
    assert (call.id, call.api, call.messages) == (answer.id, "/v1/responses", ASK)
    assert call.prompt_token_ids == same.prompt_token_ids and call.token_ids == same.token_ids
    assert call.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    assert len(call.token_ids) == answer.usage.output_tokens
    (said,) = call.message["tool_calls"]
    assert (said["id"], said["function"]["name"]) == (item.call_id, "calculator")

    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.model == events[0].response.model == "calc@1"
    (streamed,) = [
        c for run in gateway.store.runs() for c in run.calls if c.id == events[0].response.id
    ]
    assert streamed.token_ids == call.token_ids
    assert streamed.message["tool_calls"][0]["function"] == said["function"]

    named = await client.responses.create(**asked, metadata={"model": "calc", "n": "1"})
    assert named.metadata == {"model": "calc", "n": "1"}, "a client's own words stay as they are"

    result = {"type": "function_call_output", "call_id": item.call_id, "output": "432"}
    again = asked | {"input": [*USER, item.model_dump(exclude_none=True), result]}
    raw = await client.responses.with_raw_response.create(**again)
    first, second = gateway.calls(raw.headers["x-run-id"])  # it goes on with the conversation
    assert first.id == answer.id and second.messages[-1]["content"] == "432"


async def test_anthropics_messages(gateway: Gateway) -> None:
    tool = {"name": "calculator", "input_schema": TOOL["function"]["parameters"]}
    asked = {"max_tokens": 80, "system": SYSTEM, "tools": [tool], "temperature": 0}
    chat = await gateway.ask(ASK, tools=[TOOL], temperature=0)
    (same,) = gateway.calls(chat.run_id)
    reply = await gateway.ask(USER, path="/v1/messages", **asked)
    answer = reply.json
    assert (answer["type"], answer["model"], answer["stop_reason"]) == (
        "message", "calc@1", "tool_use"
    )  # fmt: skip
    (use,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (use["name"], use["input"]) == ("calculator", {"expression": "47 + 385"})
    (call,) = gateway.calls(reply.run_id)
    assert (call.id, call.messages) == (answer["id"], ASK)
    assert call.token_ids == same.token_ids
    assert len(call.token_ids) == len(call.logprobs) == answer["usage"]["output_tokens"]
    assert call.finish_reason == "tool_calls"
    (said,) = call.message["tool_calls"]
    assert (said["id"], json.loads(said["function"]["arguments"])) == (use["id"], use["input"])

    stream = await gateway.ask(USER, path="/v1/messages", stream=True, **asked)
    events = data(stream)
    assert events[0]["message"]["model"] == "calc@1"
    assert events[-1]["type"] == "message_stop"
    (streamed,) = gateway.calls(stream.run_id)
    assert streamed.token_ids == call.token_ids
    function = streamed.message["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == use["input"]

    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "432"}
    turns = [
        *USER,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    again = await gateway.ask(turns, path="/v1/messages", **asked)
    assert again.run_id == reply.run_id  # it goes on with the conversation
    counted = await gateway.ask(USER, path="/v1/messages/count_tokens", system=SYSTEM, tools=[tool])
    assert counted.json["input_tokens"] == len(call.prompt_token_ids)


class Leg(BaseModel):
    direction: Literal["left", "right"]
    far: bool = False


@tool
def go(first: Leg, then: Leg | None = None) -> str:
    """Go somewhere."""
    return f"went {first.direction}, then {then and then.direction}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_knows_no_tools_calls_them_under_a_schema(
    gateway: Gateway, stream: bool
) -> None:
    engine = ConstrainedEngine(OpenAIEngine(gateway.url))
    forced = {"tools": [as_tool(go).schema], "tool_choice": "required", "model": "calc"}
    sampling = {"temperature": 0, "max_tokens": 300}
    request = {"messages": USER, **forced, **sampling, "extra_headers": {"X-Run-Id": f"r{stream}"}}
    if stream:
        assembly = Assembly()
        async for chunk in engine.stream(request):
            assembly.add(chunk)
        answer = assembly.completion()
    else:
        answer = await engine.chat(request)
    message = answer["choices"][0]["message"]
    (asked,) = message["tool_calls"]
    call = await perform({"go": as_tool(go)}, asked)
    assert call.error is None and str(call.result).startswith("went ")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (recorded,) = gateway.calls(f"r{stream}")
    assert recorded.message["content"] == message["written"] and recorded.tools == []
    # what it wrote, word for word, is what it goes on from
    tool_message = {"role": "tool", "tool_call_id": asked["id"], "content": call.result}
    again = {**request, "messages": [*USER, tidy(message), tool_message]}
    await engine.chat({**again, "extra_headers": {"X-Run-Id": f"again{stream}"}})
    (later,) = gateway.calls(f"again{stream}")
    prompt, wrote, result = len(recorded.messages), recorded.message["content"], later.messages[-1]
    assert later.messages[:prompt] == recorded.messages
    assert later.messages[prompt] == {"role": "assistant", "content": wrote}
    assert result == {"role": "user", "content": f"Result of go: {call.result}"}


async def test_what_the_official_client_may_ask_besides(
    client: openai.AsyncOpenAI, gateway: Gateway
) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="calc",
        messages=USER,
        logprobs=True,
        top_logprobs=3,
        seed=9,
        stop=["\n\n\n\n"],
        max_completion_tokens=5,
        user="ann",
        metadata={"a": "b"},
        extra_body={"min_p": 0.01, "unheard_of": 1},
    )
    choice = raw.parse().choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(len(at.top_logprobs) >= 3 for at in choice.logprobs.content)
    (call,) = gateway.calls(raw.headers["x-run-id"])
    assert [at.logprob for at in choice.logprobs.content] == call.logprobs
    assert call.sampling["min_p"] == 0.01 and call.sampling["unheard_of"] == 1

    stream = await client.chat.completions.create(
        model="calc",
        messages=USER,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None and 0 < usage.completion_tokens <= 5
    assert {chunk.model for chunk in chunks} == {"calc@1"}


async def running(gateway: Gateway) -> float:
    """How many requests vLLM itself says it runs."""
    replica = gateway.pool.status()[0]
    headers = {HEADER: secret_of(replica["pid"])}
    async with (
        at_replica(replica["pid"], headers=headers) as http,
        http.get("http://engine/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_is_left_is_recorded_and_ends_in_vllm(
    gateway: Gateway, path: str
) -> None:
    body = {"model": "calc", "stream": True, "ignore_eos": True, "seed": 8, "max_tokens": 900}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    elif path == "/v1/messages":
        del body["ignore_eos"], body["seed"]
        body |= {"max_tokens": 900, "messages": [{"role": "user", "content": "one?"}]}
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    content: Any = USER if field == "messages" else QUESTION
    for attempt in range(5):
        run_id = f"run_left{attempt}{path.replace('/', '-')}"
        seen = b""
        async with gateway.http.post(
            f"{gateway.url}/runs/{run_id}{path}", json=body | {field: content}
        ) as response:
            assert response.status == 200
            async for piece in response.content.iter_any():
                seen += piece
                if seen.count(b"\n\n") > 8:
                    break
            response.close()
        await until(lambda: gateway.pool.status()[0]["in_flight"] == 0)
        await until(lambda: {run.id for run in gateway.store.runs()} >= {run_id})  # noqa: B023
        (call,) = gateway.calls(run_id)
        if call.finish_reason == "cancelled":
            break  # else it was whole before we left it
    else:
        assert path == "/v1/messages", call.finish_reason  # which cannot be told to go on
        return
    assert gateway.store.run(run_id).stop_reason == "cancelled"
    assert call.prompt_token_ids and 3 < len(call.token_ids) < 900
    assert len(call.logprobs) == len(call.token_ids)
    async with asyncio.timeout(120):
        while await running(gateway):  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(0.05)
    if path == CHAT:  # what was told of is what came
        fields: Any = {k: v for k, v in body.items() if k not in ("model", "stream")}
        whole = await gateway.ask(USER, **fields)
        (rest,) = gateway.calls(whole.run_id)
        assert rest.token_ids[: len(call.token_ids)] == call.token_ids
        assert call.logprobs == pytest.approx(rest.logprobs[: len(call.logprobs)], abs=1e-3)
        assert whole.text.startswith(call.message["content"]) and call.message["content"]


async def test_an_answer_that_is_left_ends_in_vllm(gateway: Gateway) -> None:
    fields: Any = {"ignore_eos": True, "seed": 8, "max_tokens": 900, "n": 64}
    async with asyncio.timeout(120):
        for attempt in itertools.count():  # while all answers were quicker than our look
            path = f"/runs/run_left{attempt}{CHAT}"
            asking = asyncio.create_task(gateway.ask(USER, path=path, **fields))
            while not (asking.done() or await running(gateway)):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            if asking.cancel():
                break
        while await running(gateway):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until(lambda: gateway.pool.status()[0]["in_flight"] == 0)
    assert f"run_left{attempt}" not in {run.id for run in gateway.store.runs()}  # nobody saw it


async def test_a_repeat_under_a_key_is_the_same_answer(gateway: Gateway) -> None:
    for number, (path, fields) in enumerate(
        (
            (CHAT, {"messages": USER, "max_tokens": 10}),
            (CHAT, {"messages": USER, "max_tokens": 10, "stream": True}),
            ("/v1/completions", {"prompt": "one", "max_tokens": 10, "n": 2}),
            ("/v1/responses", {"input": QUESTION, "max_output_tokens": 10}),
            ("/v1/responses", {"input": QUESTION, "max_output_tokens": 10, "stream": True}),
            ("/v1/messages", {"messages": USER, "max_tokens": 10, "stream": True}),
        )
    ):
        headers = {"Idempotency-Key": f"key {number}"}
        body = {"model": "calc", **fields}
        bodies, runs = [], []
        for _ in range(2):
            async with gateway.http.post(
                gateway.url + path, json=body, headers=headers
            ) as response:
                # a slow machine gets comments between the events, which no record holds
                events = (await response.read()).replace(KEEP_ALIVE, b"")
                bodies.append((response.status, events))
                runs.append(response.headers["x-run-id"])
        assert bodies[0] == bodies[1] and bodies[0][0] == 200, (path, fields)
        assert runs[0] == runs[1] and len(gateway.calls(runs[0])) == body.get("n", 1)


async def test_too_long_a_context_is_told_as_openai_tells_it(
    client: openai.AsyncOpenAI, gateway: Gateway
) -> None:
    long = "1" * 2000
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 1024"
        ) as caught:
            await client.chat.completions.create(
                model="calc", messages=[{"role": "user", "content": long}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.type == "invalid_request_error"
        assert not str(caught.value.body["message"]).startswith("{")  # type: ignore[index]
    for path, fields in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/responses", {"input": long}),
        ("/v1/messages", {"messages": [{"role": "user", "content": long}], "max_tokens": 5}),
    ):
        status, answer = await gateway.call("POST", path, json={"model": "calc", **fields})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), path


async def test_more_than_the_model_reads_becomes_no_tokens(gateway: Gateway) -> None:
    """Refused by its length: nobody waits until it is tokens."""
    long, engine = "1 " * 1_000_000, gateway.services.pool
    for path, fields in (
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/detokenize", {"tokens": [5] * 100_000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
    ):
        exchange = EngineCall(path, {"model": "calc", **fields}, new_id("x")[2:], capture=False)
        with pytest.raises(EngineError, match="maximum context length is 1024") as refusal:
            [piece async for piece in engine.answer("calc@1", exchange)]
        assert refusal.value.status == 400


async def test_a_schema_that_takes_long_holds_up_no_other(gateway: Gateway) -> None:
    """Here one that the gateway would refuse."""

    def ask(**constraint: Any) -> "asyncio.Task[list[bytes]]":
        body = {
            "model": "calc",
            "messages": USER,
            "max_tokens": 3,
            "structured_outputs": constraint,
        }
        exchange = EngineCall(CHAT, body, new_id("x")[2:])

        async def answered() -> list[bytes]:
            return [piece async for piece in gateway.pool.answer("calc@1", exchange)]

        return asyncio.create_task(answered())

    async with asyncio.timeout(300):
        slow = ask(choice=[f"{number:06}" for number in range(25_000)])
        await asyncio.sleep(1)
        for number in range(5):
            await ask(json={"enum": [number]})
        assert not slow.done()
        await slow


async def test_heads_at_a_replica_are_bounded(gateway: Gateway) -> None:
    """Whoever reaches its socket sends them, without its secret."""
    path = socket_of(gateway.pool.status()[0]["pid"])
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
    async with asyncio.timeout(100):
        assert b" 431 " in await reader.readuntil(b"\r\n")
    writer.close()


async def test_models_tell_the_length_of_their_context(client: openai.AsyncOpenAI) -> None:
    models = [model.to_dict() async for model in client.models.list()]
    assert {(one["id"], one["root"], one["max_model_len"]) for one in models} == {
        ("calc", "calc@1", 1024),
        ("calc@1", "calc@1", 1024),
    }


async def test_what_samples_nothing_is_passed_on(
    client: openai.AsyncOpenAI, gateway: Gateway
) -> None:
    runs = len(gateway.store.runs())
    with pytest.raises(openai.BadRequestError, match="cannot do this") as caught:
        await client.embeddings.create(model="calc", input="x")
    assert (caught.value.code, caught.value.param) == ("unsupported_model", "model")
    body: dict[str, Any] = {"model": "calc", "prompt": "47 + 385"}
    status, tokens = await gateway.call("POST", "/v1/tokenize", json=body)
    assert status == 200 and len(tokens["tokens"]) == tokens["count"] > 0
    body = {"model": "calc@1", "tokens": tokens["tokens"]}
    _, back = await gateway.call("POST", "/runs/run_t/v1/detokenize", json=body)
    assert back["prompt"] == "47 + 385"
    _, chat = await gateway.call("POST", "/v1/tokenize", json={"model": "calc", "messages": ASK})
    (call,) = gateway.calls((await gateway.ask(ASK, max_tokens=1)).run_id)
    assert chat["tokens"] == call.prompt_token_ids
    for path in ("/v1/tokenize", "/v1/embeddings"):
        body = {"model": "gpt-9", "prompt": "a", "input": "a"}
        status, answer = await gateway.call("POST", path, json=body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert len(gateway.store.runs()) == runs + 1


async def test_an_agents_output_type_is_kept_to(gateway: Gateway) -> None:
    ask = Agent(name="a", model="calc", engine=OpenAIEngine(gateway.url), output_type=Leg,
                max_tokens=200, temperature=0.0, output_retries=0)  # fmt: skip
    run = await ask.run("Where?")
    assert isinstance(run.output, Leg) and run.calls[0].sampling["response_format"]
    run = await ask.override(tools=[go], output_retries=1).run("Where?")
    first, second = run.calls
    assert "response_format" not in first.sampling and isinstance(run.output, Leg)
    assert second.sampling["tool_choice"] == "none"
    limited = ask.override(max_total_tokens=1, on_limit="answer", tools=[go], output_retries=1)
    ended = [event async for event in limited.stream("Where?")][-1].run
    assert (ended.stop_reason, type(ended.output)) == ("max_tokens", Leg)


LOOPS: Any = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_no_text_fits_is_the_requests_fault(
    gateway: Gateway, stream: bool
) -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": loop}}}
        for loop in LOOPS
    ]
    asked += [
        {"structured_outputs": {"json": LOOPS[0]}},
        {"structured_outputs": {"grammar": "root ::= root"}},
    ]
    for fields in asked:
        reply = await gateway.ask(USER, stream=stream, max_tokens=8, **fields)
        assert (reply.status, reply.code) == (400, "invalid_value"), fields
        assert "schema or grammar" in reply.json["error"]["message"]
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}}  # one that text does fit
    fits = {"type": "json_schema", "json_schema": {"name": "x", "schema": node}}
    reply = await gateway.ask(USER, stream=stream, max_tokens=8, response_format=fits)
    assert reply.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_the_last_token_completes(gateway: Gateway, stream: bool) -> None:
    """The request is at its limit and at its stop string at once: the client is told "stop"."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    first = await gateway.ask(USER, max_tokens=24, **fields)
    said = first.text
    met = 0
    for length in range(4, 24):
        until = await gateway.ask(USER, max_tokens=length, **fields)
        stop = until.text[-1:]
        if not stop.isascii() or stop in until.text[:-1] or not said.startswith(until.text):
            continue
        reply = await gateway.ask(USER, max_tokens=length, stop=[stop], stream=stream, **fields)
        choices = [c for part in (data(reply) if stream else [reply.json]) for c in part["choices"]]
        (call,) = gateway.calls(reply.run_id)
        assert call.finish_reason == choices[-1]["finish_reason"] == "stop"
        assert len(call.token_ids) == length
        met += 1
    assert met


async def test_refusals_are_in_the_clients_words(gateway: Gateway) -> None:
    """Neither pydantic's dumps nor the names that replicas call their models by."""
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/y.png"}}]
    asked: list[tuple[dict[str, Any], str | None]] = [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": image}]}, None),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs.a"),
    ]
    for fields, param in asked:
        reply = await gateway.ask(USER, **fields) if "messages" not in fields else None
        if reply is None:
            reply = await gateway.ask(fields["messages"])
        error = reply.json["error"]
        assert (reply.status, error["param"]) == (400, param), fields
        for raw in ("validation error", "'loc'", "Param.", "(parameter=", "calc-"):
            assert raw not in error["message"], error


async def test_no_parameter_makes_vllm_fail(gateway: Gateway) -> None:
    """Sampling parameters that only vLLM can check: a 4xx in OpenAI's envelope."""
    statuses: Counter[tuple[str, int]] = Counter()
    wire = Wire(int(gateway.url.rpartition(":")[2]))

    async def send(path: str, content: bytes) -> WireReply:
        kind = {"content-type": "application/json"}
        reply = await wire.ask(request("POST", path, content, kind))
        assert reply.status < 500, (path, content, reply)
        assert reply.status < 400 or reply.error, (path, content)
        assert b'data: {"error"' not in reply.body, (path, content, reply)
        return reply

    async def blamed(path: str, field: str, value: Any) -> str | None:
        body = json.dumps({"model": "calc", **PLAIN[path], field: value}).encode()
        reply = await send(path, body)
        param: str | None = reply.error["param"]
        return param

    for number in range(CASES):
        rng = Random(f"{SEED}-{number}")
        path = rng.choice(list(PLAIN))
        statuses[path, (await send(path, sampling_body(rng, path, "calc"))).status] += 1
    for value in ([], 1, "x", True):  # vLLM itself answers 500
        assert await blamed(CHAT, "structured_outputs", value) == "structured_outputs"
    assert await blamed(CHAT, "min_p", 2) == "min_p"
    assert await blamed("/v1/messages", "top_p", -1) == "top_p"
    # what vLLM says of itself when it is dead
    assert await blamed(CHAT, "temperature", "EngineCore EngineDeadError") == "temperature"
    assert [status["state"] for status in gateway.pool.status()] == ["serving"]
    wire.close()
    assert (await gateway.ask("hi", max_tokens=3)).status == 200
    assert gateway.store.problems == []
    for path in PLAIN.keys() - {"/v1/embeddings"}:  # this model has none
        assert {200, 400} <= {status for asked_path, status in statuses if asked_path == path}, (
            statuses
        )
