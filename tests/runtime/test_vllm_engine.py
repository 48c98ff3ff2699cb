"""VllmEngine against a server that answers like vLLM with capture.py, and breaks off like vLLM."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from aiohttp import web

from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import UNIX, to_engine_error
from tests.support.delta_checkpoints import bfloat16, changed, full, with_changes
from tests.support.unix_servers import at_socket

CHUNK = b'data: {"model":"m","choices":[{"delta":{"content":"\\"model\\":\\"m\\""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
SAMPLE = {
    "name": "x1",
    "prompt_token_ids": [1, 2],
    "token_ids": [3, 4],
    "logprobs": [-0.5, -1.0],
    "finish_reason": "stop",
}
TOLD = b"event: cray.samples\ndata: " + json.dumps([SAMPLE]).encode() + b"\n\n"


@dataclass
class Wire:
    """What a server sends, piece by piece, to each request but those of `/cray`; None: it dies."""

    url: str = ""
    head: bytes = b"content-type: text/event-stream"
    status: int = 200
    pieces: list[bytes | None] = field(default_factory=list)
    pause: float = 0.0
    asked: list[bytes] = field(default_factory=list)
    aborts: list[bytes] = field(default_factory=list)
    unlocked: bool = True
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.unlocked &= b"x-cray-secret: s3cret\r\n" in head.lower()
        (length,) = [
            int(line[15:])
            for line in head.split(b"\r\n")
            if line[:15].lower() == b"content-length:"
        ]
        body = await reader.readexactly(length)
        if head.startswith(b"POST /cray/"):
            self.aborts.append(head.split()[1])
            self.aborted.set()
            writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        else:
            self.asked.append(head + body)
            await self._answer(writer)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 %d OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n%s\r\n\r\n"
        if b"/json" in self.head:  # a whole answer
            body = b"".join(self.pieces)
            head = head.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(body))
            writer.write(head % (self.status, self.head) + body)
            return
        writer.write(head % (self.status, self.head))
        for piece in self.pieces:
            if piece is None:
                return
            if piece == b"wait":
                await self.aborted.wait()
                continue
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(self.pause)
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def wired(**wire: Any) -> AsyncIterator[tuple[VllmEngine, Wire]]:
    server_side = Wire(**wire)
    with TemporaryDirectory() as folder:
        server = await asyncio.start_unix_server(server_side.serve, f"{folder}/http")
        engine = VllmEngine(f"{UNIX}{folder}/http", "m", "s3cret", timeout=120)
        try:
            yield engine, server_side
            assert server_side.unlocked, "each request must have the secret"
        finally:
            await engine.close()
            server.close()


def streaming(**fields: Any) -> EngineCall:
    request = {"model": "m@7", "messages": [], "stream": True, **fields}
    return EngineCall("/v1/chat/completions", request, "x1", "m@7")


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_is_given_in_whole_events_however_it_is_cut(size: int) -> None:
    text = CHUNK * 3 + DONE + TOLD
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    async with wired(pieces=cut) as (engine, wire):
        exchange = streaming()
        pieces = [piece async for piece in engine.answer(exchange)]
        assert all(piece.endswith(b"\n\n") for piece in pieces)
        # the model's name is the version; a text that looks like it stays as it is
        assert b"".join(pieces) == CHUNK.replace(b'{"model":"m"', b'{"model":"m@7"') * 3 + DONE
        (sample,) = exchange.samples
        assert (sample.prompt_token_ids, sample.token_ids) == ([1, 2], [3, 4])
        assert (sample.logprobs, sample.finish_reason) == ([-0.5, -1.0], "stop")
        assert b'"model":"m"' in wire.asked[0] and b"x-cray-capture: x1" in wire.asked[0].lower()


async def test_samples_of_several_prompts_are_in_the_order_of_the_prompts() -> None:
    names = ["x-10", "x-2", "x-2", "x-0"]
    samples = [SAMPLE | {"name": name, "token_ids": [i]} for i, name in enumerate(names)]
    body = b'{"model":"m"}' + json.dumps(samples).encode()
    head = b"content-type: application/json\r\nx-cray-body: 13"
    async with wired(head=head, pieces=[body]) as (engine, _):
        exchange = EngineCall("/v1/completions", {"prompt": ["a"] * 11}, "x1", "m@7")
        assert [piece async for piece in engine.answer(exchange)] == [b'{"model":"m@7"}']
        assert [sample.token_ids for sample in exchange.samples] == [[3], [1], [2], [0]]


@pytest.mark.parametrize("pieces", [[CHUNK, None], [CHUNK, DONE], [None]])
async def test_a_stream_that_has_no_end_is_unavailable(pieces: list[bytes | None]) -> None:
    async with wired(pieces=pieces) as (engine, _):
        seen = []
        with pytest.raises(EngineUnavailable) as caught:
            async for piece in engine.answer(streaming()):
                seen.append(piece)
        assert b"".join(seen).count(b"choices") == pieces.count(CHUNK)
        # a client reads no address, and no library's words
        assert re.fullmatch(r"the replica of m@7: [a-z ]* broke off", str(caught.value))


@pytest.mark.parametrize("first", [True, False])
async def test_an_error_in_a_stream_is_raised(first: bool) -> None:
    error = {"error": {"message": "it broke", "type": "InternalServerError", "code": 500}}
    event = b"data: " + json.dumps(error).encode() + b"\n\n"
    before = b"" if first else CHUNK
    async with wired(pieces=[before + event + DONE + TOLD] if before else [event, DONE, TOLD]) as (
        engine,
        _,
    ):
        seen = []
        with pytest.raises(EngineError, match="it broke") as caught:
            async for piece in engine.answer(streaming()):
                seen.append(piece)
        assert caught.value.status == 500 and b"error" not in b"".join(seen)
        assert len(seen) == (0 if first else 1)


async def test_a_refusal_keeps_its_status_and_parameter() -> None:
    error = {"error": {"message": "too hot", "param": "body.temperature", "code": 400}}
    head = b"content-type: application/json"
    async with wired(status=400, head=head, pieces=[json.dumps(error).encode()]) as (engine, _):
        for stream in (True, False):
            with pytest.raises(EngineError, match=r"^too hot$") as caught:
                [piece async for piece in engine.answer(streaming(stream=stream))]
            assert (caught.value.status, caught.value.param) == (400, "temperature")


async def test_who_leaves_a_stream_aborts_it_and_learns_what_was_sampled() -> None:
    async with wired(pieces=[CHUNK, b"wait", TOLD]) as (engine, wire):
        exchange = streaming()
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.answer(exchange):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert wire.aborts == [b"/cray/abort/x1"]
        (sample,) = exchange.samples
        assert sample.token_ids == [3, 4]


async def test_a_server_that_is_not_there_or_says_nothing() -> None:
    async with wired(pieces=[CHUNK, b"wait"]) as (engine, wire):
        engine._http.timeout = 0.1
        with pytest.raises(EngineTimeout):
            [piece async for piece in engine.answer(streaming())]
        wire.aborted.set()
        url = engine.url
    gone = VllmEngine(url, "m", "s3cret")
    with pytest.raises(EngineUnavailable):
        [piece async for piece in gone.answer(streaming())]
    await gone.close()


PYDANTIC = """22 validation errors:
  {'type': 'string_type', 'loc': 'body.messages.0.ChatCompletionUserMessageParam.content', \
'msg': 'Input should be a valid string', 'input': '5'}
  {'type': 'literal_error', 'loc': 'body.messages.0.ChatCompletionSystemMessageParam.role', \
'msg': "Input should be 'system'", 'input': 'user', 'ctx': {'expected': "'system'"}}
  {'type': 'iterable_type', 'loc': 'body.messages.0.ChatCompletionSystemMessageParam.content', \
'msg': 'Input should be iterable', 'input': '5'}"""


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (PYDANTIC, "messages.0.content: Input should be a valid string", "messages.0.content"),
        (
            "1 validation error:\n  {'type': 'value_error', 'loc': 'body.max_tokens', 'msg': "
            "'Value error, max_tokens must be positive', 'input': '-1', 'ctx': {'error': "
            "ValueError('max_tokens must be positive')}}",
            "max_tokens: max_tokens must be positive",
            "max_tokens",
        ),
        (
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "temperature must be non-negative, got -1.0.",
            "temperature",
        ),
        ("You said: 1 validation error: 'loc'", "You said: 1 validation error: 'loc'", None),
    ],
)
def test_a_refusal_in_the_clients_words(raw: str, message: str, param: str | None) -> None:
    error = to_engine_error(400, json.dumps({"error": {"message": raw, "code": 400}}).encode())
    assert (str(error), error.param) == (message, param)


# ---- changes in place
@pytest.mark.parametrize(
    ("held", "answer", "whole"),
    [
        ("parent", {"results": [{"patched": True}] * 2}, False),
        ("parent", {"results": [{"patched": True}, {"patched": False}]}, True),  # such as a CPU
        ("parent", {"error": {"message": "no final copy", "code": 500}}, True),
        ("other", {"results": [{"patched": True}]}, True),
    ],
)
async def test_changes_are_put_into_the_weights_they_are_of_else_all_are_loaded(
    tmp_path: Path, held: str, answer: dict[str, Any], whole: bool
) -> None:
    methods: list[str] = []

    async def vllm(request: web.Request) -> web.Response:
        body = await request.json()
        methods.append(body.get("method", request.path))
        if methods[-1] == "patch_weights":
            assert body["kwargs"]["folder"] == str(checkpoint / "delta")
            assert list(body["kwargs"]["files"]) == ["model.safetensors"]
            return web.json_response(answer, status=500 if "error" in answer else 200)
        return web.json_response({"success": True})

    home = Home(tmp_path / "home")
    weights = bfloat16(100)
    parent = full(home, "parent", {"model.safetensors": {"x": weights}})
    full(home, "other", {"model.safetensors": {"x": weights + 1}})
    changes = {"model.safetensors": {"x": with_changes(weights, 0.1)}}
    checkpoint, _ = changed(home, "child", "parent", changes)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", vllm)
    async with at_socket(application) as url:
        engine = VllmEngine(url, "m", "s3cret", timeout=120)
        await engine.prepare(home.checkpoint(held), "m@1")
        methods.clear()
        await engine.load(checkpoint, "m@2")
        asked = ["patch_weights"] if held == "parent" else []
        asked += ["reload_weights", "repack_kept_weights"] if whole else []
        assert methods[1:-1] == [*asked, "/reset_prefix_cache"]
        # a second try, as after a probe that did not match, loads all
        methods.clear()
        await engine.load(checkpoint, "m@2")
        assert "patch_weights" not in methods and "reload_weights" in methods
        methods.clear()
        await engine.load(parent, "m@1")
        assert "reload_weights" in methods
        await engine.close()
