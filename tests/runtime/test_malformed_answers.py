"""Malformed answers: what an engine, a supervisor, a controller or Slurm says is never trusted.

Each kind of malformed answer on each route is a typed error: of a probe, after which the engine is
started again, or of one request. A place that takes no connection is noticed, too.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cray_agents.env_worker.leased_runs import EnvironmentWorker
from cray_agents.errors import (
    CrayError,
    EngineError,
    EngineUnavailable,
    NoController,
    SchedulerError,
)
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.runtime.background import FAILURES
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.further_gateway import (
    MOST_NOTES,
    ControllerLink,
    ControllerReports,
)
from cray_agents.runtime.pool.job_lease import SupervisorClient
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_process import VllmProcess
from cray_agents.runtime.scheduler.slurm import node_names, node_states, read_job, read_node
from cray_agents.runtime.vllm_plugins import proof
from cray_agents.runtime.vllm_plugins.wire import BODY
from tests.support.bare_models import bare_model
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import CHAT, served, until
from tests.support.scripted_server import MALFORMED
from tests.support.shared_gateways import SETTINGS, TOKEN, shared_site

KINDS = {
    "no choices": b'{"choices": [], "data": [], "results": [], "in_flight": {}}',
    "empty": b"",
    "no JSON": b"<html>busy</html>",
    "cut off": b'{"choices": [{"index": 0',
    "no object": b"[1, 2]",
    "null": b"null",
    "other types": b'{"choices": 7, "data": {"a": 1}, "results": 7, "in_flight": [1],'
    b' "success": [], "serial": "x", "share": []}',
    "other items": b'{"choices": [7], "data": ["x"], "results": "x", "in_flight": {"m": "x"}}',
    "no fields": b'{"choices": [{}], "data": [{}]}',
    "NaN": b'{"choices": [{"index": 0, "prompt_logprobs": [null, {"2": {"logprob": NaN}}]}]}',
    "null logprob": b'{"choices": [{"index": 0, "prompt_logprobs": [null, {"2": {"logprob": null,'
    b' "rank": 1}}]}]}',
    "huge": b'{"choices": [{"index": 0, "prompt_logprobs": [null, {"2": {"logprob": 1'
    + b"0" * 400
    + b', "rank": 1}}]}], "serial": 1'
    + b"0" * 400
    + b"}",
    "deep": b'{"choices": ' + b"[" * 5000,
    "binary": b"\xff\xfe\x00{",
}


@asynccontextmanager
async def answering(
    content: bytes, status: int = 200, headers: dict[str, str] | None = None, proves: str = "secret"
) -> AsyncIterator[str]:
    """The URL of a server that answers everything so. `proves`: but for the proof of this key."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if request.path == proof.PATH and proves:
            assert request.transport is not None
            port = request.transport.get_extra_info("sockname")[1]
            shown = proof.proof_of(proves, request.query["nonce"], "127.0.0.1", port)
            return web.Response(body=f'{{"proof":"{shown}"}}'.encode())
        return web.Response(body=content, status=status, headers=headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@contextmanager
def taking_no_connection() -> Iterator[str]:
    """The URL of a socket whose backlog is full: to a client it is a node that is gone."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for one in waiting:
            one.close()


# ---- every route of an engine
async def call(engine: VllmEngine, **fields: Any) -> list[bytes]:
    exchange = EngineCall(CHAT, {"messages": [], **fields}, "x")
    return [piece async for piece in engine.answer(exchange)]


ROUTES: dict[str, Callable[[VllmEngine, Path], Awaitable[Any]]] = {
    "probe": lambda engine, model: engine.score([[1, 2]]),
    "bare probe": lambda engine, model: engine.score([]),
    "health": lambda engine, model: engine.check_alive(),
    "models": lambda engine, model: engine.model_root(),
    "metrics": lambda engine, model: engine.metrics(60),
    "load": lambda engine, model: engine.load(model, "m@1"),
    "take over": lambda engine, model: engine.take_over(model, "m@1"),
    "prepare": lambda engine, model: engine.prepare(model, "m@1"),
    "marks": lambda engine, model: engine.marks(),
    "admit": lambda engine, model: engine.admit("m@1"),
    "refuse": lambda engine, model: engine.refuse(),
    "resume": lambda engine, model: engine.resume(),
    "sleep": lambda engine, model: engine.sleep(1),
    "wake": lambda engine, model: engine.wake(model, "m@1"),
    "adapter": lambda engine, model: engine.load_adapter(model, "m@2"),
    "call": lambda engine, model: call(engine),
    "stream": lambda engine, model: call(engine, stream=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 302, 409, 500])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_fails_by_a_typed_error_on_every_route(
    tmp_path: Path, kind: str, status: int
) -> None:
    model = bare_model(tmp_path / "model")
    async with answering(KINDS[kind], status, {"location": "http://[", BODY: "0"}) as url:
        engine = VllmEngine(url, "m", "secret", timeout=60)
        for name, ask in ROUTES.items():
            with suppress(CrayError):  # some do not care what is answered
                await ask(engine, model)
                assert status == 200, name
        for name in ("probe", "models"):
            with pytest.raises(EngineError) as raised:
                await ROUTES[name](engine, model)
            assert url in str(raised.value) or status != 200 or kind == "null logprob"
        await engine.close()


@pytest.mark.parametrize("size", ["x", "9" * 5000, "nan"])
async def test_a_size_that_is_no_number_is_a_typed_error(size: str) -> None:
    async with answering(b"{}", headers={BODY: size}) as url:
        engine = VllmEngine(url, "m", "secret", timeout=60)
        with pytest.raises(EngineError, match="unknown form"):
            await call(engine)
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_supervisor_fails_by_a_typed_error(kind: str) -> None:
    async with answering(KINDS[kind]) as url:
        supervisor = SupervisorClient(url, "secret", 60, lambda: 1)
        with pytest.raises(EngineError, match=f"{url}/state"):
            await supervisor.state()
        with pytest.raises(EngineError, match=f"{url}/start"):
            await supervisor.start(60)
        await supervisor.order("note")
        await supervisor.close()


@pytest.mark.parametrize("kind", [*KINDS, "no run"])
async def test_a_slot_of_environments_leases_nothing_then(kind: str) -> None:
    content = KINDS.get(kind, b'{"rollout": {"run_id": "r", "seconds": 1}}')
    async with answering(content) as url:
        worker = EnvironmentWorker("e", [], url, "key", slots=1, lease=60.0)
        worker.stopping.set()  # it does not wait until it asks again
        assert await asyncio.to_thread(worker._leased) is None


# ---- a whole gateway
@dataclass
class Faults:
    """The routes of scripted servers that are malformed now."""

    file: Path

    def set(self, **routes: bytes) -> None:
        written = {route: content.decode("latin-1") for route, content in routes.items()}
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(written))
        draft.rename(self.file)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setenv(MALFORMED, str(tmp_path / "malformed.json"))
    FAILURES.by_task.clear()
    return Faults(tmp_path / "malformed.json")


@pytest.mark.slow
async def test_after_malformed_answers_to_probes_the_engine_is_started_until_it_behaves(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    host = VllmProcess("calc", SETTINGS, tmp_path / "replica.log")
    async with served(tmp_path, host=host) as gateway:
        watch = gateway.pool._slots[0]
        for route, kind in (
            ("/v1/completions", "no JSON"),
            ("/v1/models", "no choices"),
            ("/cray/guard", "other types"),
            ("/update_weight_version", "cut off"),
        ):
            faults.set(**{route: KINDS[kind]})
            host.settings = replace(SETTINGS, start_timeout=3)
            before = watch.restarts
            assert host._process is not None
            host._process.kill()
            await until(lambda before=before: watch.restarts >= before + 1)  # type: ignore[misc]
            assert (await gateway.call("GET", "/health/ready"))[0] == 503
            host.settings = SETTINGS
            faults.set()
            async with asyncio.timeout(100):
                while (await gateway.http.get(f"{gateway.url}/health/ready")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await gateway.ask("hello")).status == 200
    assert FAILURES.by_task == {}
    assert "never retrieved" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_malformed_answer_fails_one_request_and_no_other(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    host = VllmProcess("calc", SETTINGS, tmp_path / "replica.log")
    async with served(tmp_path, host=host) as gateway:
        for kind, content in KINDS.items():
            sent = b"data: " + content + b"\n\ndata: [DONE]\n\n" if stream else content
            faults.set(**{CHAT: sent})
            reply = await gateway.ask("hello", stream=stream)
            assert reply.status >= 500 or b'"error"' in reply.body, kind
        for sample in (b"{", b"[7]", b'[{"token_ids": 7}]', b'[{"prompt_token_ids": [], "logprobs":'
                       b' [], "token_ids": ["x"]}]'):  # fmt: skip
            faults.set(**{CHAT: b"event: cray.samples\ndata: " + sample + b"\n\n"})
            reply = await gateway.ask("hello", stream=True)
            assert reply.status >= 500 or b'"error"' in reply.body
        faults.set()
        assert (await gateway.ask("hello", stream=stream)).status == 200
        assert host.pid == gateway.pool.status()[0]["pid"]
    assert FAILURES.by_task == {}
    # a client of an earlier test may be tidied up only now
    logged = [one for one in caplog.records if "httpx" not in one.getMessage()]
    assert [one for one in logged if one.levelno >= logging.ERROR and one.exc_info] == []


# ---- places that take no connection
@pytest.mark.slow
async def test_a_request_goes_to_another_replica_where_one_takes_no_connection(
    tmp_path: Path,
) -> None:
    model = bare_model(tmp_path / "model")
    with taking_no_connection() as gone:
        async with answering(b'{"success": true}') as url:
            hosts = [
                InProcessEngine(VllmEngine(each, "m", "secret", timeout=600)) for each in (url, url)
            ]
            pool = Pool(hosts)
            await pool.start(model, "m@1", [])
            await until(lambda: pool.serving == 2)
            hosts[0].engine = engine = VllmEngine(gone, "m", "secret", timeout=600)
            async with asyncio.timeout(60):  # the kernel would try for two minutes
                exchange = EngineCall(CHAT, {"messages": []}, "x")
                pieces = [piece async for piece in pool.answer("m@1", exchange)]
                assert pieces == [b'{"success": true}']
                with pytest.raises(EngineUnavailable, match="no connection within"):
                    await engine.check_alive()
            await pool.stop()


@pytest.mark.slow
async def test_a_controller_that_takes_no_connection_is_none(tmp_path: Path) -> None:
    async with shared_site(tmp_path, gateways=0, replicas=1) as site:
        with taking_no_connection() as gone:
            site.claim(gone)
            link = ControllerLink(site.home)
            await link.look()
            async with asyncio.timeout(60):
                with pytest.raises(NoController):
                    await link.ask("/v1/gateways", {})
            await link.close()


# ---- a further gateway and its controller
NO_SHARES = ("NaN", "1e999", '"1"', "0.0", "-0.5", "2.0", "true", "[]", "null")
SHARES = {f"share {text}": b'{"share": %s}' % text.encode() for text in NO_SHARES}


@pytest.mark.parametrize("kind", [*KINDS, *SHARES])
async def test_a_controller_fails_by_a_typed_error(tmp_path: Path, kind: str) -> None:
    home = Home(tmp_path)
    async with answering((KINDS | SHARES)[kind], proves=TOKEN) as url:
        claim = {"url": url, "elsewhere": None, "host": socket.gethostname(), "token": TOKEN}
        home.platform.write_bytes(checksums.with_crc(json.dumps(claim).encode()))
        link = ControllerLink(home)
        await link.look()
        reports = ControllerReports("g", link)
        reports.note_reward("run-1")
        with pytest.raises(NoController) as raised:
            await reports.send()
        assert "prove" not in str(raised.value)
        assert list(reports._notes["rewarded"]) == ["run-1"]
        with suppress(NoController):  # nothing is read of this answer but its status
            await link.ask("/v1/gateways/load", {})
        await link.close()


async def test_of_too_many_notes_the_oldest_are_dropped(tmp_path: Path) -> None:
    link = ControllerLink(Home(tmp_path))
    reports = ControllerReports("g", link)
    for number in range(MOST_NOTES):
        reports.note_reward(f"old-{number}")
    sending = asyncio.create_task(reports.send())
    await asyncio.sleep(0)  # it has taken the notes
    for number in range(10):
        reports.note_reward(f"new-{number}")
    with pytest.raises(NoController):
        await sending
    kept = list(reports._notes["rewarded"])
    assert len(kept) == MOST_NOTES
    assert kept[-10:] == [f"new-{number}" for number in range(10)]


# ---- Slurm
NO_LINES = ["", "squeue: error: x", "\x1f" * 5, "x\x1f\x1f\x1f\x1f", "\ufffd"]
NO_LINES += ["1\x1f\x1f\x1fname\x1f", "9" * 5000 + "\x1fRUNNING\x1f\x1f\x1f"]


@pytest.mark.parametrize("text", NO_LINES)
def test_what_is_not_slurms_is_a_typed_error(text: str) -> None:
    for read in (read_job, read_node):
        with pytest.raises(SchedulerError, match="is not Slurm's"):
            read(text)


def test_nodes_that_are_not_slurms_are_a_typed_error() -> None:
    for read, text in (
        (node_names, "n[a-b]"),
        (node_names, "n[1-2,]"),
        (node_states, "n1 idle\nnonsense"),
        (read_node, "n1 idle 1/2/x gpu:1 gpu:0"),
        (read_node, "n1 idle 12 gpu:1 gpu:0"),
    ):
        with pytest.raises(SchedulerError, match="is not Slurm's"):
            read(text)
