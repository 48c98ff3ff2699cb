"""The gateway as its clients see it: the official OpenAI client and plain HTTP, over a socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import uvicorn

from cray_agents.errors import EngineError, EngineUnavailable, NotFound, SwapError
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.records import JobSpec, JobStatus, ProbePrompt, ProbeReport
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Pool as Port
from cray_agents.runtime.gateway.services import Services, Wanted
from cray_agents.runtime.pool import Pool
from cray_agents.runtime.registry import Registry
from cray_agents.runtime.seat import Resident
from cray_agents.runtime.store import Store
from cray_agents.scripted import ScriptedEngine, tool_call
from cray_agents.trainers.scripted_trainer import ScriptedTrainer

TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}
PROMPT = [7, 8, 9]


def tool_calls(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "calculator", "arguments": arguments}
    return [{"id": "call_1", "type": "function", "function": function}]


@dataclass
class WordPool:
    """Answers with the last message's words, a token each, in the shapes that vLLM answers in."""

    held: str = "calc@1"
    ready: bool = True
    bad_versions: set[str] = field(default_factory=set)
    delay: float = 0.0
    pause: float = 0.0
    active: int = 0
    swaps: list[str] = field(default_factory=list)
    waiting: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, version: Wanted, request: dict[str, Any]) -> dict[str, Any]:
        served = await self._admit(version, request)
        words = self._words(request)
        message: dict[str, Any] = {"role": "assistant", "content": " ".join(words), "refusal": None}
        reason = "stop"
        if request.get("tools"):
            message |= {"content": None, "tool_calls": tool_calls('{"expression": "2+2"}')}
            reason = "tool_calls"
        choices = [
            {
                "index": index,
                "message": dict(message),
                "finish_reason": reason,
                "token_ids": list(range(len(words))),
                "logprobs": {"content": [self._logprob(word) for word in words]},
            }
            for index in range(request.get("n") or 1)
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 9}
        head = {"id": "engine-1", "object": "chat.completion", "created": 1, "model": served}
        return {**head, "choices": choices, "usage": usage, "prompt_token_ids": PROMPT}

    async def stream(
        self, version: Wanted, request: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        self.active += 1
        try:
            served = await self._admit(version, request)
            first = self._chunk(served, {"role": "assistant", "content": ""})
            yield {**first, "prompt_token_ids": PROMPT}
            words = self._words(request)
            for number, word in enumerate(words):
                await asyncio.sleep(self.pause)
                if word == "explode":
                    raise EngineError("the engine died", status=500)
                last = number == len(words) - 1
                yield self._chunk(
                    served,
                    {} if word == "silent" else {"content": word if last else word + " "},
                    finish_reason="stop" if last else None,
                    token_ids=[number],
                    logprobs={"content": [self._logprob(word)]},
                )
            yield {
                **self._chunk(served, {}),
                "choices": [],
                "usage": {"completion_tokens": len(words)},
            }
        finally:
            self.active -= 1

    async def swap(self, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> ProbeReport:
        if version in self.bad_versions:
            raise SwapError(f"{version} could not be proven")
        assert (checkpoint / "manifest.json").is_file()
        self.held = version
        self.swaps.append(version)
        return ProbeReport(
            version=version, prompts=0, tokens=0, max_logprob_diff=0, tolerance=1e-3, passed=True
        )

    def status(self) -> list[dict[str, Any]]:
        return [{"version": self.held, "state": "ready"}]

    def wake(self) -> None:
        self.woken.set()

    async def _admit(self, version: Wanted, request: dict[str, Any]) -> str:
        await asyncio.sleep(self.delay)
        if self.waiting:
            await self.woken.wait()
        if not self.ready:
            raise EngineUnavailable("no replica")
        if request.get("temperature", 0) > 2:
            raise EngineError("temperature must be at most 2", status=400, param="temperature")
        assert request["return_token_ids"] and request["logprobs"]
        return version if isinstance(version, str) else version()

    def _words(self, request: dict[str, Any]) -> list[str]:
        return str(request["messages"][-1]["content"]).split()

    def _logprob(self, word: str) -> dict[str, Any]:
        return {"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []}

    def _chunk(self, version: str, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        head = {"id": "engine-1", "object": "chat.completion.chunk", "created": 1, "model": version}
        return {**head, "choices": [choice]}


@dataclass
class FolderTrainer:
    """Jobs that are done at once, with the files a job leaves."""

    home: Home
    jobs: dict[str, JobSpec] = field(default_factory=dict)

    def submit(self, spec: JobSpec) -> JobStatus:
        self.jobs[spec.id] = spec
        folder = self.home.job(spec.id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
        (folder / "log.txt").write_text("one\ntwo\nthree\n")
        return self.status(spec.id)

    def status(self, job_id: str) -> JobStatus:
        if job_id not in self.jobs:
            raise NotFound(f"no job {job_id!r}")
        return JobStatus(id=job_id, state="succeeded")

    def cancel(self, job_id: str) -> JobStatus:
        return self.status(job_id)


@dataclass
class Gateway:
    url: str
    pool: WordPool
    services: Services
    http: aiohttp.ClientSession

    @property
    def store(self) -> Store:
        return self.services.store

    def client(self, path: str = "/v1", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.url + path, api_key="none", max_retries=0, timeout=20, **options
        )

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as response:
            assert response.headers["x-request-id"]
            text = await response.text()
            if response.content_type != "application/json":
                assert response.status < 400, text
                return response.status, text
            value = json.loads(text)
            if response.status >= 400:
                assert set(value) == {"error"}
                assert set(value["error"]) == {"message", "type", "param", "code"}
                assert value["error"]["message"]
            return response.status, value


def checkpoint(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


@asynccontextmanager
async def served(
    directory: Path, pool: Port, trainer: Callable[[Home], Trainer]
) -> AsyncIterator[tuple[str, Services]]:
    """A gateway on a free port over a home whose `calc@1` is promoted."""
    home = Home(directory / "home")
    registry = Registry(home)
    registry.register("calc", *registry.import_checkpoint(checkpoint(directory / "model")))
    registry.promote("calc", 1, who="test")
    services = Services(
        home=home,
        store=Store(home),
        registry=registry,
        trainer=trainer(home),
        pool=pool,
        platform={"version": "0.1.0"},
        code="code-1",
        keep_alive=0.1,
        max_body=200_000,
    )
    config = uvicorn.Config(create_app(services), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it by this flag alone
        await asyncio.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", services
    finally:
        server.should_exit = True
        await task
        await services.store.close()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    pool = WordPool()
    async with (
        served(tmp_path, pool, FolderTrainer) as (url, services),
        aiohttp.ClientSession() as http,
    ):
        yield Gateway(url, pool, services, http)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


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
    assert answer.choices[0].logprobs is None
    assert not {"token_ids", "prompt_token_ids"} & set(raw.text) and "token_ids" not in raw.text
    (call,) = gateway.store.run("run_a").calls
    assert (call.id, call.model, call.run_id) == (answer.id, "calc@1", "run_a")
    assert (call.prompt_token_ids, call.token_ids) == (PROMPT, [0, 1, 2])
    assert call.logprobs == [-0.5] * 3
    assert call.message == {"role": "assistant", "content": "two plus two"}
    assert call.sampling == {"temperature": 0.7, "seed": 3, "top_k": 5}
    assert call.finish_reason == "stop" and call.started > time.time() - 60 and call.seconds > 0


async def test_tokens_are_given_to_who_asks_and_n_gives_a_call_each(gateway: Gateway) -> None:
    answer = await gateway.client("/runs/run_b/v1").chat.completions.create(
        model="calc@1",
        messages=says("a b"),
        n=2,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    assert answer.model_dump()["prompt_token_ids"] == PROMPT
    assert answer.choices[1].model_dump()["token_ids"] == [0, 1]
    assert answer.choices[0].logprobs is not None
    calls = gateway.store.run("run_b").calls
    assert {call.id for call in calls} == {answer.id, f"{answer.id}-1"}


async def test_tools(gateway: Gateway) -> None:
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="calc", messages=says("2+2"), tools=[TOOL]
    )
    call = (raw.parse().choices[0].message.tool_calls or [])[0]
    assert call.type == "function" and call.function.arguments == '{"expression": "2+2"}'
    (recorded,) = gateway.store.run(raw.headers["x-run-id"]).calls
    assert recorded.tools == [TOOL]
    assert recorded.message["tool_calls"] == tool_calls('{"expression": "2+2"}')
    assert recorded.finish_reason == "tool_calls"


async def test_stream(gateway: Gateway) -> None:
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="calc", messages=says("one silent two"), stream=True
    )
    chunks = [chunk async for chunk in raw.parse()]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two"
    assert {c.model for c in chunks} == {"calc@1"} and len({c.id for c in chunks}) == 1
    assert len(chunks) == 3  # the token without a text is recorded, not shown
    (call,) = gateway.store.run(raw.headers["x-run-id"]).calls
    assert (call.id, call.token_ids, call.logprobs) == (chunks[0].id, [0, 1, 2], [-0.5] * 3)
    assert call.prompt_token_ids == PROMPT
    assert call.message == {"role": "assistant", "content": "one two"}


async def test_usage_comes_to_who_asks(gateway: Gateway) -> None:
    stream = await gateway.client().chat.completions.create(
        model="calc", messages=says("a b"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2


async def test_a_waiting_stream_is_kept_alive(gateway: Gateway) -> None:
    gateway.pool.delay = 0.35
    body = {"model": "calc", "messages": says("hello"), "stream": True}
    _, text = await gateway.call("POST", "/v1/chat/completions", json=body)
    assert text.count(": keep-alive\n\n") >= 2
    assert text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_is_recorded_and_ends_the_request(gateway: Gateway) -> None:
    gateway.pool.pause = 0.05
    body = {"model": "calc", "messages": says("word " * 200), "stream": True}
    headers = {"X-Run-Id": "run_gone"}
    url = f"{gateway.url}/v1/chat/completions"
    async with gateway.http.post(url, json=body, headers=headers) as response:
        async for line in response.content:
            if b"word" in line:
                break
        response.close()
    async with asyncio.timeout(5):
        while gateway.pool.active or not gateway.store.runs():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (call,) = gateway.store.run("run_gone").calls
    assert call.finish_reason == "cancelled"
    assert 0 < len(call.token_ids) == len(call.logprobs) < 100
    assert gateway.store.run("run_gone").stop_reason == "cancelled"


async def test_errors_before_and_in_mid_stream(gateway: Gateway) -> None:
    client = gateway.client()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="calc", messages=says("a"), temperature=3, stream=True
        )
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    raw = await client.chat.completions.with_raw_response.create(
        model="calc", messages=says("one two explode"), stream=True
    )
    with pytest.raises(openai.APIError, match="the engine died"):
        [chunk async for chunk in raw.parse()]
    (call,) = gateway.store.run(raw.headers["x-run-id"]).calls
    assert (call.finish_reason, call.token_ids) == ("error", [0, 1])
    gateway.pool.ready = False
    with pytest.raises(openai.InternalServerError) as down:
        await client.chat.completions.create(model="calc", messages=says("a"))
    assert (down.value.status_code, down.value.code) == (503, "engine_unavailable")
    assert (await gateway.call("GET", "/health/ready"))[0] == 503
    assert (await gateway.call("GET", "/health"))[0] == 200


async def test_unknown_model(gateway: Gateway) -> None:
    for model in ("gpt-9", "calc@2", "calc@x", "../calc", "@", ""):
        with pytest.raises(openai.NotFoundError) as missing:
            await gateway.client().chat.completions.create(model=model, messages=says("a"))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


CHAT = "/v1/chat/completions"


REFUSALS = [
    ("GET", "/nowhere", b"", 404, "unknown_url"),
    ("GET", "/v1/models/", b"", 404, "unknown_url"),
    ("DELETE", CHAT, b"", 405, "method_not_allowed"),
    ("POST", CHAT, b"{", 400, "invalid_json"),
    ("POST", CHAT, b"", 400, "invalid_json"),
    ("POST", CHAT, b"[1]", 400, "invalid_json"),
    ("POST", CHAT, b'{"model": "\xff"}', 400, "invalid_json"),
    ("POST", CHAT, b"[" * 5000, 400, "invalid_json"),
    ("POST", CHAT, b'"' + b"a" * 300_000 + b'"', 413, "body_too_large"),
    ("POST", CHAT, b"{}", 400, "invalid_value"),
    ("POST", CHAT, b'{"model": "calc", "messages": "hi"}', 400, "invalid_value"),
    ("POST", CHAT, b'{"model": "calc", "messages": [1]}', 400, "invalid_value"),
    ("GET", "/v1/trajectories?limit=1001", b"", 400, "invalid_value"),
    ("GET", "/v1/trajectories?lop=x", b"", 400, "unknown_parameter"),
    ("GET", "/v1/trajectories/run_none", b"", 404, "not_found"),
    ("POST", "/v1/trajectories/r/events", b'{"events": [1]}', 400, "invalid_value"),
    ("POST", "/v1/datasets", b'{"lop": "x"}', 400, "invalid_value"),
    ("POST", "/v1/datasets", b"{}", 400, "empty_dataset"),
    ("GET", "/v1/datasets/ds-none", b"", 404, "not_found"),
    ("GET", "/v1/jobs/job-none", b"", 404, "not_found"),
    ("GET", "/v1/jobs/..%2f..%2fmodels/logs", b"", 404, "unknown_url"),
    ("GET", "/v1/models/nobody", b"", 404, "model_not_found"),
    ("POST", "/v1/models/calc/promote", b'{"version": true}', 400, "invalid_value"),
    ("POST", "/v1/models/calc/promote", b'{"version": 9}', 404, "model_not_found"),
    ("POST", "/v1/models/calc/versions", b'{"checkpoint": "/none"}', 404, "not_found"),
]


async def test_every_refusal_is_an_envelope(gateway: Gateway) -> None:
    for method, path, body, status, code in REFUSALS:
        found, answer = await gateway.call(method, path, data=body or None)
        assert (found, answer["error"]["code"]) == (status, code), (method, path, body[:60])


async def test_a_chunked_body_has_the_same_limit(gateway: Gateway) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"a" * 10_000

    status, answer = await gateway.call("POST", CHAT, data=endless())
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_request_ids(gateway: Gateway) -> None:
    for given, kept in (("my-id-1", True), ("bad id \t<x>", False)):
        url = f"{gateway.url}/health"
        async with gateway.http.get(url, headers={"x-request-id": given}) as response:
            assert (response.headers["x-request-id"] == given) is kept


async def test_a_run_id_must_be_plain(gateway: Gateway) -> None:
    body = {"model": "calc", "messages": says("a")}
    status, answer = await gateway.call("POST", CHAT, json=body, headers={"X-Run-Id": "a b"})
    assert (status, answer["error"]["param"]) == (400, "X-Run-Id")


async def test_trajectories_page_and_join(gateway: Gateway) -> None:
    for number in range(5):
        run_id = f"run_{number}"
        chat = await gateway.client(f"/runs/{run_id}/v1").chat.completions.create(
            model="calc", messages=says("a b")
        )
        run = {
            "agent": "calc",
            "model": "calc",
            "input": "a b",
            "stop_reason": "completed",
            "loop": "l",
            "generation": number // 3,
            "trajectory": {"turns": [{"call_id": chat.id}]},
        }
        events = [
            {"kind": "run", "body": run},
            {"kind": "reward", "body": {"name": "correct", "value": 1.0}},
        ]
        path = f"/v1/trajectories/{run_id}/events"
        status, answer = await gateway.call("POST", path, json={"events": events})
        assert (status, answer) == (200, {"appended": 2, "duplicates": 0})
        status, answer = await gateway.call("POST", path, json={"events": events})
        assert answer == {"appended": 0, "duplicates": 2}
    seen, after = [], ""
    while True:
        _, page = await gateway.call("GET", f"/v1/trajectories?loop=l&limit=2{after}")
        assert page["object"] == "list"
        seen += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert [run["id"] for run in seen] == [f"run_{n}" for n in range(5)]
    assert seen[0]["trajectory"]["turns"][0]["call"]["token_ids"] == []
    assert (seen[0]["reward"], seen[0]["usage"]["completion_tokens"]) == (1.0, 2)
    _, page = await gateway.call("GET", "/v1/trajectories?generation=1&tokens=true")
    assert [run["id"] for run in page["data"]] == ["run_3", "run_4"]
    assert page["data"][0]["trajectory"]["turns"][0]["call"]["token_ids"] == [0, 1]
    _, run = await gateway.call("GET", "/v1/trajectories/run_4")
    assert run["trajectory"]["turns"][0]["call"]["prompt_token_ids"] == PROMPT

    status, made = await gateway.call("POST", "/v1/datasets", json={"loop": "l"})
    assert (status, made["accepted_runs"], made["samples"]) == (200, 1, 1)
    assert made["rejected"] == {"duplicate": 4}
    _, manifest = await gateway.call("GET", f"/v1/datasets/{made['id']}")
    assert [line["reason"] for line in manifest["runs"]] == [None] + ["duplicate"] * 4


async def test_a_client_cannot_say_what_was_sampled(gateway: Gateway) -> None:
    call = {"id": "c", "run_id": "r", "model": "m", "messages": [], "message": {}}
    turn = {"call_id": "c", "call": {**call, "token_ids": [1]}}
    run = {"agent": "a", "model": "m", "input": "", "stop_reason": "completed"}
    event = {"kind": "run", "body": {**run, "trajectory": {"turns": [turn]}}}
    await gateway.call("POST", "/v1/trajectories/r/events", json={"events": [event]})
    assert gateway.store.run("r").trajectory.turns[0].call is None


async def test_versions_staging_and_promotion(gateway: Gateway, tmp_path: Path) -> None:
    await gateway.call("POST", "/v1/models/calc/versions", json={"checkpoint": "calc@1"})
    new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
    for _ in range(2):
        status, version = await gateway.call("POST", "/v1/models/calc/versions", json=new)
        assert (status, version["id"], version["number"]) == (200, "calc@2", 2)
    status, report = await gateway.call("POST", "/v1/models/calc/versions/2/stage", json={})
    assert (status, report["passed"], gateway.pool.held) == (200, True, "calc@2")
    models = {model.id async for model in gateway.client().models.list()}
    assert models == {"calc", "calc@1", "calc@2"}
    assert (await gateway.client().models.retrieve("calc@2")).owned_by == "cray-agents"
    body = {"version": 2, "who": "me", "reason": "better"}
    status, promotion = await gateway.call("POST", "/v1/models/calc/promote", json=body)
    assert (promotion["number"], promotion["version"], gateway.pool.swaps) == (2, 2, ["calc@2"])
    await gateway.call("POST", "/v1/models/calc/promote", json={"version": 1})
    assert gateway.pool.held == "calc@1"
    _, history = await gateway.call("GET", "/v1/models/calc/promotions")
    assert [p["version"] for p in history["data"]] == [1, 2, 1]
    gateway.pool.bad_versions.add("calc@2")
    for path in ("/v1/models/calc/versions/2/stage", "/v1/models/calc/promote"):
        status, failed = await gateway.call("POST", path, json={"version": 2})
        assert (status, failed["error"]["code"]) == (409, "swap_failed")
    _, versions = await gateway.call("GET", "/v1/models/calc/versions")
    assert [v["promoted"] for v in versions["data"]] == [True, False]


async def test_a_request_that_waits_through_a_promotion_gets_the_new_version(
    gateway: Gateway, tmp_path: Path
) -> None:
    new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
    await gateway.call("POST", "/v1/models/calc/versions", json=new)
    gateway.pool.waiting = True
    create = gateway.client().chat.completions.create
    waiting = asyncio.create_task(create(model="calc", messages=says("a b")))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
    answer = await waiting
    assert answer.model == "calc@2"
    (run,) = gateway.store.runs()
    assert run.calls[0].model == "calc@2"


async def test_a_corrupt_checkpoint_is_refused_by_name(gateway: Gateway) -> None:
    version = gateway.services.registry.resolve("calc@1")
    weights = gateway.services.home.checkpoint(version.checkpoint) / "model.safetensors"
    weights.write_bytes(b"weightz")
    body = {"checkpoint": version.checkpoint}
    status, answer = await gateway.call("POST", "/v1/models/calc/versions", json=body)
    assert (status, answer["error"]["code"]) == (422, "corrupt")
    assert "model.safetensors" in answer["error"]["message"]


async def test_jobs(gateway: Gateway) -> None:
    body: dict[str, Any] = {"dataset": "ds-1", "parent": "calc", "hyperparameters": {"steps": 2}}
    status, answer = await gateway.call("POST", "/v1/jobs", json=body)
    assert (status, answer["error"]["param"]) == (400, "dataset")
    gateway.services.home.dataset("ds-1").mkdir(parents=True)
    status, job = await gateway.call("POST", "/v1/jobs", json=body)
    assert (status, job["state"]) == (200, "succeeded")
    trainer = gateway.services.trainer
    assert isinstance(trainer, FolderTrainer)
    spec, version = trainer.jobs[job["id"]], gateway.services.registry.resolve("calc")
    assert spec.parent == str(gateway.services.home.checkpoint(version.checkpoint))
    assert (spec.parent_sha256, spec.code) == (version.weights_sha256, "code-1")
    path = f"/v1/jobs/{job['id']}"
    assert (await gateway.call("GET", path))[1] == job
    assert (await gateway.call("GET", "/v1/jobs"))[1] == {"data": [job]}
    _, events = await gateway.call("GET", f"{path}/events?after=1")
    assert events == {"data": [{"step": 2}], "last": 2}
    assert (await gateway.call("GET", f"{path}/logs?tail=2"))[1] == "two\nthree\n"
    assert (await gateway.call("POST", f"{path}/cancel"))[1] == job
    bad = {**body, "hyperparameters": {"steps": 2, "bach_size": 1}}
    status, answer = await gateway.call("POST", "/v1/jobs", json=bad)
    assert (status, answer["error"]["param"]) == (400, "hyperparameters.bach_size")


async def test_loops_keep_the_first_record(gateway: Gateway) -> None:
    for number, value in ((1, "a"), (0, "b"), (1, "c")):
        path = f"/v1/loops/l/generations/{number}"
        assert (await gateway.call("POST", path, json={"value": value}))[0] == 200
    _, answer = await gateway.call("GET", "/v1/loops/l/generations")
    assert answer == {"data": [{"value": "b"}, {"value": "a"}]}


async def test_platform_and_pool(gateway: Gateway) -> None:
    assert (await gateway.call("GET", "/v1/platform"))[1] == {"version": "0.1.0"}
    _, pool = await gateway.call("GET", "/v1/pool")
    assert pool == {"data": [{"version": "calc@1", "state": "ready"}]}


async def test_a_hundred_streams_and_answers_at_once(gateway: Gateway) -> None:
    async def one(number: int) -> str:
        body = {"model": "calc", "messages": says(f"q {number}"), "stream": number % 2 == 0}
        url = f"{gateway.url}/runs/run_{number}{CHAT}"
        async with gateway.http.post(url, json=body) as response:
            return await response.text()

    started = time.monotonic()
    texts = await asyncio.gather(*(one(number) for number in range(400)))
    assert time.monotonic() - started < 20
    assert all(str(number) in text for number, text in enumerate(texts))
    assert len(gateway.store.runs()) == 400


async def test_from_a_run_to_a_version_through_the_shipped_parts(tmp_path: Path) -> None:
    """The real pool around a scripted engine, and the scripted trainer."""
    engine = ScriptedEngine([tool_call("calculator", expression="2 + 2"), "The result is 4."])
    pool = Pool([Resident(engine)])
    async with (
        served(tmp_path, pool, ScriptedTrainer) as (url, services),
        aiohttp.ClientSession() as http,
    ):
        first = services.registry.resolve("calc")
        await pool.start(services.home.checkpoint(first.checkpoint), first.id, [])
        gateway = Gateway(url, WordPool(), services, http)
        await _talk(gateway)
        reward = {"kind": "reward", "body": {"name": "correct", "value": 1.0}}
        await gateway.call("POST", "/v1/trajectories/run_x/events", json={"events": [reward]})
        _, made = await gateway.call("POST", "/v1/datasets", json={})
        calls = gateway.store.run("run_x").calls
        assert made["trained_tokens"] == sum(len(call.token_ids) for call in calls) > 20
        job = {"dataset": made["id"], "parent": "calc@1", "hyperparameters": {"steps": 1}}
        _, done = await gateway.call("POST", "/v1/jobs", json=job)
        body = {"checkpoint": done["checkpoint"]}
        _, version = await gateway.call("POST", "/v1/models/calc/versions", json=body)
        assert (version["id"], version["job"]) == ("calc@2", done["id"])
        status, report = await gateway.call("POST", "/v1/models/calc/versions/2/stage", json={})
        assert (status, report["error"]["code"]) == (409, "swap_failed")  # it has no probe
        assert (await gateway.call("GET", "/v1/pool"))[1]["data"][0]["version"] == "calc@1"
        await pool.stop()


async def _talk(gateway: Gateway) -> None:
    """A turn with a tool call, and a streamed one with its result."""
    client = gateway.client("/runs/run_x/v1")
    chat = await client.chat.completions.create(model="calc", messages=says("2 + 2?"), tools=[TOOL])
    assert (chat.choices[0].finish_reason, chat.model) == ("tool_calls", "calc@1")
    asked: Any = [*says("2 + 2?"), chat.choices[0].message.model_dump(exclude_none=True)]
    asked.append({"role": "tool", "content": "4", "tool_call_id": "call"})
    stream = await client.chat.completions.create(
        model="calc", messages=asked, tools=[TOOL], stream=True
    )
    text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "The result is 4."
