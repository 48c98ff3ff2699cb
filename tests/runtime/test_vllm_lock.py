"""The lock before a replica's server, set by vllm_process.py; test_vllm.py asks vLLM itself."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cray_agents.errors import EngineUnavailable, VersionClosed
from cray_agents.runtime.pool.vllm_http import Http, to_engine_error
from cray_agents.runtime.pool.vllm_process import EngineSettings, bind, command
from cray_agents.runtime.vllm_plugins.lock import Locked, VersionGuard
from cray_agents.runtime.vllm_plugins.wire import EXPECT, GUARD, HEADER, VARIABLE

OPEN = {"type": "opened"}
SECRET = "s3cret"


async def answers_to(monkeypatch: pytest.MonkeyPatch, kind: str, *secrets: bytes) -> list[Any]:
    """What comes back when a request has these values of the header."""
    monkeypatch.setenv(VARIABLE, SECRET)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(OPEN)

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), *((HEADER.encode(), value) for value in secrets)]
    scope = {"type": kind, "path": "/health", "headers": headers}
    await Locked(app)({"type": "lifespan"} if kind == "lifespan" else scope, receive, send)
    return sent


@pytest.mark.parametrize("secrets", [[], [b""], [b"s3cre"], [b"S3CRET"], [b"s3cret "], [b"\xff"]])
async def test_a_request_without_the_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, secrets: list[bytes]
) -> None:
    head, body = await answers_to(monkeypatch, "http", *secrets)
    assert (head["type"], head["status"]) == ("http.response.start", 403)
    assert "platform" in str(to_engine_error(403, body["body"]))
    assert SECRET not in json.dumps(str(body))
    assert await answers_to(monkeypatch, "websocket", *secrets) == [{"type": "websocket.close"}]


async def test_at_a_port_it_proves_that_it_knows_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    with bind("127.0.0.1") as listener:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        server = uvicorn.Server(uvicorn.Config(Locked(app), log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for secret in (SECRET, "another"):
            http = Http(url, secret, 60)
            asking = http.answer("GET", "/health")
            if secret == SECRET:
                while not server.started:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                async with asking as response:
                    assert response.status == 204
            else:
                with pytest.raises(EngineUnavailable, match="does not prove"):
                    await asking.__aenter__()
            await http.close()
        server.should_exit = True
        await serving


async def test_one_with_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("http", "websocket"):
        assert await answers_to(monkeypatch, kind, SECRET.encode()) == [OPEN]
    assert await answers_to(monkeypatch, "lifespan") == [OPEN]


class GuardedServer:
    """A server whose requests last until `end`."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.locked = Locked(self.app)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await send(OPEN)
        await self.end.wait()

    async def ask(self, path: str, body: bytes = b"{}", expect: str = "") -> list[Any]:
        """What comes back."""
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(HEADER.encode(), SECRET.encode())]
        headers += [(EXPECT.encode(), expect.encode())] if expect else []
        await self.locked({"type": "http", "path": path, "headers": headers}, receive, send)
        return sent

    async def order(self, **order: str) -> dict[str, int]:
        head, body = await self.ask(GUARD, json.dumps(order).encode())
        assert head["status"] == 200
        in_flight: dict[str, int] = json.loads(body["body"])["in_flight"]
        return in_flight


async def test_only_admitted_versions_are_answered_and_counted_to_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    server = GuardedServer()

    async def refusal(version: str) -> None:
        head, body = await server.ask("/v1/chat/completions", expect=version)
        assert isinstance(to_engine_error(head["status"], body["body"]), VersionClosed)

    await refusal("m@1")
    for version in ("m@1", "m@2"):
        assert await server.order(admit=version) == {}
    asked = [
        asyncio.create_task(server.ask("/v1/chat/completions", expect=version))
        for version in ("m@1", "m@2", "m@2")
    ]
    while sum((await server.order()).values()) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await server.order(refuse="m@2") == {"m@1": 1, "m@2": 2}
    await refusal("m@2")
    assert await server.order(refuse="") == {"m@1": 1, "m@2": 2}
    await refusal("m@1")
    asked.pop().cancel()  # its client has left
    server.end.set()
    assert await asyncio.gather(*asked) == [[OPEN], [OPEN]]
    assert await server.order() == {}
    assert await server.ask("/v1/completions") == [OPEN]  # a probe expects no version


def test_orders_of_a_controller_that_was_followed_are_not_carried_out() -> None:
    guard = VersionGuard()
    guard.follow({"admit": "m@1", "term": 2})
    for late in ({"refuse": "", "term": 1}, {"admit": "m@2"}):
        assert guard.follow(late) == {"superseded": 2}
    assert guard.enter("m@1") and not guard.enter("m@2")
    assert guard.follow({"refuse": "m@1", "term": 3}) == {"in_flight": {"m@1": 1}}
    assert not guard.enter("m@1")


def test_without_a_secret_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(KeyError, match=VARIABLE):
        Locked(lambda *_: None)  # type: ignore[arg-type, return-value]


def test_a_request_meets_it_before_all_else() -> None:
    """vLLM's last middleware is the outermost, whatever the user has added."""
    settings = EngineSettings(engine_args=("--middleware", "mine.Own"))
    line = command(Path("/model"), ("m",), settings)
    assert line[-2:] == ["--middleware", f"{Locked.__module__}.{Locked.__name__}"]
