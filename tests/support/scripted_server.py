"""A process with vLLM's routes whose golden probe follows from its checkpoint: no vLLM needed.

    python -m tests.support.scripted_server PARENT_PID --model DIR [--uds PATH] ...

It takes the place of vllm_plugins/server.py (`EngineSettings.program`). It says its version and the
last message; "slow" in that makes it take its time, "very slow" 60 times that. "call NAME
ARGUMENTS" asks for a tool's call. A pause without `keep` breaks its answers off. While it sleeps it
scores nothing, and after level 2 it has no weights. With `--headless` it only lives. Weights that
contain `NOT_TRAINED` give other logprobs than their probe.
"""

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from cray_agents.processes import die_with_parent
from cray_agents.runtime.vllm_plugins import proof
from cray_agents.runtime.vllm_plugins.lock import VersionGuard, refusal_of
from cray_agents.runtime.vllm_plugins.wire import (
    BODY,
    CAPTURE,
    EVENT,
    EXPECT,
    GUARD,
    HEADER,
    PROBE,
    SOCKET,
    START,
    VARIABLE,
    VERSION,
)

ROOT = Path(__file__).parents[2]
PROGRAM = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.scripted_server")
NOT_TRAINED = b"not what was trained"
MALFORMED = "CRAY_TEST_MALFORMED"  # variable: a file of JSON, routes and what they answer instead
SLOW = float(os.environ.get("CRAY_TEST_SLOW", "1"))  # seconds


class ScriptedServer:
    """A server started on a checkpoint."""

    def __init__(self, checkpoint: str, names: list[str]) -> None:
        self.root = self.checkpoint = checkpoint
        self.names = names
        self.label = ""
        self.asleep = False
        self.proven = asyncio.Event()
        self.secret = os.environ[VARIABLE]
        self.guard = VersionGuard()
        self.answering: set[asyncio.Task[Any]] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == proof.PATH and request.transport is not None:
            place = request.transport.get_extra_info("sockname")
            answer = proof.proof_of(self.secret, request.query.get("nonce", ""), *place[:2])
            return web.json_response(text=json.dumps({"proof": answer}, separators=(",", ":")))
        if request.headers.get(HEADER) != self.secret:
            return web.json_response({"error": {"message": "not yours"}}, status=403)
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if MALFORMED in os.environ and (file := Path(os.environ[MALFORMED])).exists():
            malformed = json.loads(file.read_text())
            if request.path in malformed:
                return web.Response(body=malformed[request.path].encode("latin-1"))
        if (expected := request.headers.get(EXPECT)) is None:
            return await self.route(request, body)
        if not self.guard.enter(expected):
            return web.json_response(refusal_of(expected), status=409)
        try:
            return await self.route(request, body)
        finally:
            self.guard.leave(expected)

    async def route(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        match request.path:
            case path if path == GUARD:
                return web.json_response(self.guard.follow(body))
            case path if path == START:
                return web.json_response({"imported": 1.0, "built": 3.5})
            case "/v1/models":
                return web.json_response({"data": [{"id": self.names[0], "root": self.root}]})
            case "/collective_rpc":
                if body["method"] == "reload_weights":
                    self.checkpoint = body["kwargs"]["weights_path"]
                return web.json_response({"results": [None]})
            case "/start_weight_update":
                self.checkpoint = ""  # until files are read, it has no weights that it could prove
            case "/sleep":
                self.asleep = True
                self.checkpoint = self.checkpoint if request.query["level"] == "1" else ""
            case "/wake_up":
                self.asleep = False
            case "/v1/completions" if self.asleep:
                return web.json_response({"error": {"message": "asleep"}}, status=500)
            case "/pause" if request.query["mode"] == "abort":
                for task in self.answering:
                    task.cancel()
            case "/update_weight_version":
                self.label = body["new_version"]
                self.proven.clear()
            case "/resume":
                self.proven.set()
            case "/v1/completions":
                return web.json_response({"choices": self.score(body)})
            case "/v1/chat/completions":
                task = asyncio.ensure_future(self.chat(body, request))
                self.answering.add(task)
                task.add_done_callback(self.answering.discard)
                return await task
        return web.json_response({"success": True})

    def score(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        assert PROBE in body["vllm_xargs"]
        if "prompt_logprobs" not in body:
            return []
        manifest = json.loads((Path(self.checkpoint) / "manifest.json").read_text())
        known = {tuple(p["token_ids"]): p["logprobs"] for p in manifest["probe"]}
        weights = Path(self.checkpoint) / "model.safetensors"
        off = 1.0 if weights.exists() and NOT_TRAINED in weights.read_bytes() else 0.0
        return [
            {"index": number, "prompt_logprobs": [None, *(
                {str(token): {"logprob": value - off, "rank": 1}}
                for token, value in zip(ids[1:], known[tuple(ids)], strict=True)
            )]}
            for number, ids in enumerate(body["prompt"])
        ]  # fmt: skip

    async def chat(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await self.proven.wait()
        text = body["messages"][-1]["content"]
        words = f"{self.label.partition(' ')[0]}: {text}".split(" ")
        pause = SLOW * (60 if "very slow" in text else "slow" in text) / len(words)
        name, tokens, versions = f"chatcmpl-{request.headers['X-Request-Id']}", 0, [[0, self.label]]
        stream = None
        if body.get("stream"):
            stream = web.StreamResponse(
                headers={"content-type": "text/event-stream", VERSION: self.label}
            )
            await stream.prepare(request)
        said = []
        for number, word in enumerate(words):
            await self.proven.wait()
            if versions[-1][1] != self.label:
                versions.append([tokens, self.label])
            said.append(word if not number else f" {word}")
            tokens += len(said[-1].encode())
            if stream is not None:
                await stream.write(self.event(name, body["model"], {"content": said[-1]}, None))
            await asyncio.sleep(pause)
        sample = {
            "prompt_token_ids": [1], "token_ids": list("".join(said).encode()),
            "logprobs": [-0.5] * tokens, "finish_reason": "stop", "name": "x", "versions": versions,
        }  # fmt: skip
        samples = json.dumps([sample]).encode()
        if stream is not None:
            await stream.write(self.event(name, body["model"], {}, "stop") + b"data: [DONE]\n\n")
            if CAPTURE in request.headers:
                await stream.write(EVENT + samples + b"\n\n")
            return stream
        message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
        word, _, wanted = text.partition(" ")
        if body.get("tools") and word == "call":
            name_of_tool, _, arguments = wanted.partition(" ")
            function = {"name": name_of_tool, "arguments": arguments}
            call = {"id": f"call_{name}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer = json.dumps({
            "id": name, "object": "chat.completion", "created": 0, "model": body["model"],
            "usage": {}, "choices": [
                {"index": 0, "message": message,
                 "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
            ],
        }, separators=(",", ":")).encode()  # fmt: skip
        if CAPTURE not in request.headers:
            return web.Response(body=answer, content_type="application/json")
        return web.Response(
            body=answer + samples, headers={BODY: str(len(answer))}, content_type="application/json"
        )

    def event(self, name: str, model: str, delta: dict[str, Any], finish: str | None) -> bytes:
        chunk = {
            "id": name, "object": "chat.completion.chunk", "created": 0, "model": model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }  # fmt: skip
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    flags = sys.argv[2:]
    if "--headless" in flags:
        signal.pause()

    def value(flag: str) -> str:
        return flags[flags.index(flag) + 1]

    at = flags.index("--served-model-name") + 1
    server = ScriptedServer(value("--model"), flags[at : at + 2])
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", server.answer)
    context = None
    if "--ssl-certfile" in flags:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(value("--ssl-certfile"), value("--ssl-keyfile"))
    listener = None
    if handle := os.environ.get(SOCKET):
        listener = socket.socket(fileno=int(handle))
    web.run_app(
        application, sock=listener, path=None if listener else value("--uds"), print=None,
        access_log=None, ssl_context=context,
    )  # fmt: skip


if __name__ == "__main__":
    main()
