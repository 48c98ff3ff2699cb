"""Version switches, disturbed by requests, by each other, by lost files and kills."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from tests.support.gateway_process import gateway as gateway_process
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, checkpoint, served, until
from tests.support.scripted_platform import platform

MODELS = "/v1/models/calc"


def says_version(request: dict[str, Any], version: str) -> str:
    return version


class Slow(ScriptedEngine):
    """An engine that loads a version once `go` is set. `waiting` is the version to load."""

    def __init__(self) -> None:
        super().__init__(says_version)
        self.go = asyncio.Event()
        self.go.set()
        self.waiting = ""

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        self.waiting = version
        await self.go.wait()
        self.waiting = ""
        return await super().load(checkpoint, version, keep=keep)


async def register(gateway: Gateway, folder: Path, *weights: bytes) -> None:
    for content in weights:
        made = {"checkpoint": str(checkpoint(folder / content.decode(), content))}
        assert (await gateway.call("POST", f"{MODELS}/versions", json=made))[0] == 200


async def change(gateway: Gateway, act: str, **body: Any) -> dict[str, Any]:
    status, event = await gateway.call("POST", f"{MODELS}/{act}", json=body)
    assert status == 200, event
    return dict(event)


async def history(gateway: Gateway) -> list[tuple[int, str, int]]:
    _, history = await gateway.call("GET", f"{MODELS}/history")
    return [(event["number"], event["kind"], event["version"]) for event in history["data"]]


def versions_on(gateway: Gateway) -> list[str]:
    return sorted(replica["version"] for replica in gateway.pool.status())


async def test_the_name_is_answered_while_each_replica_changes(tmp_path: Path) -> None:
    engines = [Slow(), Slow()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"new")
        for act, old, new in (("promote", "calc@1", "calc@2"), ("rollback", "calc@2", "calc@1")):
            for engine in engines:
                engine.go.clear()
            body = {"version": 2} if act == "promote" else {}
            changing = asyncio.create_task(change(gateway, act, **body))
            await until(lambda: any(engine.waiting for engine in engines))
            first = next(engine for engine in engines if engine.waiting)
            assert (await gateway.ask("hi")).text == old
            first.go.set()
            other = engines[1 - engines.index(first)]
            await until(partial(getattr, other, "waiting"))
            assert (await gateway.ask("hi")).text == new
            other.go.set()
            await changing
            assert versions_on(gateway) == [new, new]


async def test_a_canary_makes_room_and_comes_back_if_nothing_is_promoted(tmp_path: Path) -> None:
    engines = [Slow(), Slow()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        await change(gateway, "canary", version=2, share=0.5)
        sessions = [f"s-{n}" for n in range(40)]

        async def answers() -> set[str]:
            named = [{"X-Session-Id": session} for session in sessions]
            replies = await asyncio.gather(*(gateway.ask("hi", headers=one) for one in named))
            return {reply.text for reply in replies}

        assert await answers() == {"calc@1", "calc@2"}
        (theirs,) = [engine for engine in engines if engine.version == "calc@2"]
        theirs.go.clear()
        promoting = asyncio.create_task(change(gateway, "promote", version=3))
        await until(lambda: theirs.waiting)
        assert await answers() == {"calc@1"}  # nobody waits for the canary's replica
        theirs.go.set()
        await promoting
        assert await answers() == {"calc@3"} and versions_on(gateway) == ["calc@3", "calc@3"]
        assert [kind for _, kind, _ in await history(gateway)][-2:] == ["canary_ended", "promoted"]

        await change(gateway, "canary", version=2, share=0.5)
        status, refused = await gateway.call("POST", f"{MODELS}/reject", json={"version": 2})
        assert (status, refused["error"]["code"]) == (400, "canary_running")
        await change(gateway, "reject", version=1, reason="another one")
        gone = gateway.services.registry.resolve("calc@1").checkpoint
        shutil.rmtree(gateway.services.home.checkpoint(gone))
        assert (await gateway.call("POST", f"{MODELS}/promote", json={"version": 1}))[0] >= 400
        assert await answers() == {"calc@2", "calc@3"}


async def test_what_has_no_checkpoint_any_more_is_not_promoted(tmp_path: Path) -> None:
    engines = [ScriptedEngine(says_version) for _ in range(2)]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"new")
        gone = gateway.services.registry.resolve("calc@2").checkpoint
        shutil.rmtree(gateway.services.home.checkpoint(gone))
        before = await history(gateway)
        for act, body in (
            ("promote", {"version": 2}),
            ("rollback", {"to": 2, "force": True}),
            ("canary", {"version": 2}),
            ("versions/2/stage", {}),
        ):
            status, refused = await gateway.call("POST", f"{MODELS}/{act}", json=body)
            assert 400 <= status < 500 and gone in refused["error"]["message"]
        assert (await gateway.ask("hi")).text == "calc@1" and versions_on(gateway) == ["calc@1"] * 2
        assert await history(gateway) == before


async def test_changes_at_once_are_done_one_after_the_other(tmp_path: Path) -> None:
    engines = [ScriptedEngine(says_version) for _ in range(3)]
    more = [InProcessEngine(engine) for engine in engines[1:]]
    async with served(tmp_path, engines[0], others=more) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        changes = [("promote", {"version": n}) for n in (2, 3, 2, 3)] + [("rollback", {})] * 2
        asking = asyncio.create_task(_ask_on(gateway))
        replies = await asyncio.gather(
            *(gateway.call("POST", f"{MODELS}/{act}", json=body) for act, body in changes)
        )
        asking.cancel()
        for status, reply in replies[:4]:
            assert status == 200 or "a rollback came first" in reply["error"]["message"]
        happened = await history(gateway)
        assert [number for number, _, _ in happened] == list(range(1, len(happened) + 1))
        now = f"calc@{happened[-1][2]}"
        assert (await gateway.ask("hi")).text == now and versions_on(gateway) == [now] * 3


class Holding(Slow):
    """An engine that keeps streams open until `end` is set, and answers other requests at once."""

    def __init__(self) -> None:
        super().__init__()
        self.end = asyncio.Event()

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().answer(exchange)) as pieces:
            async for piece in pieces:
                yield piece
                if exchange.streams:
                    await self.end.wait()


@asynccontextmanager
async def streaming(gateway: Gateway, *engines: Holding, streams: int = 1) -> AsyncIterator[None]:
    """Keep streams open during the block; afterwards they end whole."""
    open_ = [asyncio.create_task(gateway.ask("hi", stream=True)) for _ in range(streams)]
    await until(lambda: sum(r["in_flight"] for r in gateway.pool.status()) == streams)
    try:
        async with asyncio.timeout(60):  # fails if a change waits for the streams
            yield
    finally:
        for engine in engines:
            engine.end.set()
        for reply in await asyncio.gather(*open_):
            assert reply.body.endswith(b"data: [DONE]\n\n")


def states(gateway: Gateway) -> set[str]:
    return {replica["state"] for replica in gateway.pool.status()}


async def test_a_rollback_does_not_wait_for_a_promotion_that_drains(tmp_path: Path) -> None:
    engines = [Holding(), Holding()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second")
        async with streaming(gateway, *engines):
            promoting = asyncio.create_task(change(gateway, "promote", version=2))
            await until(lambda: versions_on(gateway) == ["calc@1", "calc@2"])
            await until(lambda: "swapping" in states(gateway))
            assert (await gateway.ask("hi")).text == "calc@2"
            rolled_back = await change(gateway, "rollback", who="me")
            assert (await gateway.ask("hi")).text == "calc@1" and versions_on(gateway) == [
                "calc@1"
            ] * 2
            assert (await promoting)["version"] == 2 and rolled_back["version"] == 1
            assert await history(gateway) == [
                (1, "promoted", 1),
                (2, "promoted", 2),
                (3, "rolled_back", 1),
            ]


async def test_a_rollback_takes_a_promotion_back_that_has_not_come_so_far(tmp_path: Path) -> None:
    engine = Holding()
    async with served(tmp_path, engine) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        await change(gateway, "promote", version=2)
        async with streaming(gateway, engine):
            body = {"version": 3}
            promoting = asyncio.create_task(gateway.call("POST", f"{MODELS}/promote", json=body))
            await until(lambda: states(gateway) == {"swapping"})
            assert (await change(gateway, "rollback"))["version"] == 2
            assert (await gateway.ask("hi")).text == "calc@2"
            status, refused = await promoting
            assert status >= 400 and "a rollback came first" in refused["error"]["message"]
        assert (await change(gateway, "rollback"))["version"] == 1
        assert [kind for _, kind, _ in await history(gateway)][2:] == ["rolled_back"] * 2


async def test_a_candidate_is_staged_after_the_rollback_that_overtook_it(tmp_path: Path) -> None:
    engines = [Holding(), Holding()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        await change(gateway, "promote", version=2)
        async with streaming(gateway, *engines, streams=2):
            staging = asyncio.create_task(change(gateway, "versions/3/stage"))
            await until(lambda: "swapping" in states(gateway))
            first = [replica["state"] for replica in gateway.pool.status()].index("swapping")
            engines[1 - first].end.set()
            await until(lambda: gateway.pool.status()[1 - first]["in_flight"] == 0)
            rolling_back = asyncio.create_task(change(gateway, "rollback"))
            await until(lambda: gateway.services.registry.resolve("calc").number == 1)
            assert (await gateway.ask("hi")).text == "calc@1" and not staging.done()
        assert (await rolling_back)["version"] == 1
        assert (await staging)["passed"] and versions_on(gateway) == ["calc@1", "calc@3"]


@pytest.mark.parametrize("to", [99, 3])
async def test_a_rollback_that_comes_to_nothing_stops_no_promotion(tmp_path: Path, to: int) -> None:
    engines = [Holding(), Holding()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        async with streaming(gateway, *engines):
            promoting = asyncio.create_task(change(gateway, "promote", version=2))
            await until(lambda: versions_on(gateway) == ["calc@1", "calc@2"])
            await until(lambda: "swapping" in states(gateway))
            gone = gateway.services.registry.resolve("calc@3").checkpoint
            shutil.rmtree(gateway.services.home.checkpoint(gone))
            body = {"to": to, "force": True}
            status, _ = await gateway.call("POST", f"{MODELS}/rollback", json=body)
            assert status >= 400
        assert (await promoting)["version"] == 2
        await until(lambda: versions_on(gateway) == ["calc@2", "calc@2"])
        assert [kind for _, kind, _ in await history(gateway)] == ["promoted", "promoted"]


@asynccontextmanager
async def almost_promoted(
    gateway: Gateway, version: int, engines: Sequence[Holding]
) -> AsyncIterator[None]:
    """Keep the last session that a canary's promotion needs in flight during the block."""
    body = {"version": version, "share": 0.5, "promote_after": 2}
    await change(gateway, "canary", **body)
    canary = gateway.services.versions.live.canary("calc")
    assert canary is not None
    ours = [session for session in map(str, range(100)) if canary.draws(session)]
    assert (await gateway.ask("hi", headers={"X-Session-Id": ours[0]})).text == canary.version
    last = {"X-Session-Id": ours[1]}
    stream = asyncio.create_task(gateway.ask("hi", stream=True, headers=last))
    await until(lambda: sum(r["in_flight"] for r in gateway.pool.status()) == 1)
    yield
    for engine in engines:
        engine.end.set()
    assert (await stream).body.endswith(b"data: [DONE]\n\n")


async def test_a_canary_that_was_stopped_is_not_promoted(tmp_path: Path) -> None:
    engines = [Holding(), Holding()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second")
        async with almost_promoted(gateway, 2, engines):
            stopping = asyncio.create_task(gateway.call("DELETE", f"{MODELS}/canary"))
            await until(lambda: gateway.services.registry.canary("calc") is None)
        assert (await stopping)[0] == 200
        await until(lambda: versions_on(gateway) == ["calc@1", "calc@1"])
        kinds = [kind for _, kind, _ in await history(gateway)]
        assert kinds == ["promoted", "canary_started", "canary_ended"]


async def test_a_canary_does_not_undo_a_rollback_that_was_first(tmp_path: Path) -> None:
    engines = [Holding(), Holding()]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        await change(gateway, "promote", version=2)
        async with almost_promoted(gateway, 3, engines):
            rolling_back = asyncio.create_task(change(gateway, "rollback"))
            await until(lambda: "swapping" in states(gateway))
        assert (await rolling_back)["version"] == 1
        assert (await gateway.ask("hi")).text == "calc@1" and versions_on(gateway) == ["calc@1"] * 2
        kinds = [kind for _, kind, _ in await history(gateway)]
        assert kinds[2:] == ["canary_started", "canary_ended", "rolled_back"]


async def _ask_on(gateway: Gateway) -> None:
    while True:
        assert (await gateway.ask("hi")).status == 200


@pytest.mark.slow
def test_a_gateway_killed_in_a_change_serves_what_the_history_says(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    weights = str(checkpoint(tmp_path / "second", b"second"))
    events = home.models / "m" / "history"
    with gateway_process(home.root) as (url, process):
        _post(url, "/v1/models/m/versions", {"checkpoint": weights})
        assert _post(url, "/v1/models/m/promote", {"version": 2})["number"] == 2
        rolling_back = threading.Thread(target=_try_post, args=(url, "/v1/models/m/rollback", {}))
        rolling_back.start()
        while not (events / "3.json").exists():  # kill it as soon as the event is on disk
            rolling_back.join(0.001)
            assert rolling_back.is_alive() or (events / "3.json").exists()
        os.kill(process.pid, signal.SIGKILL)
        rolling_back.join()
    with platform(home.root, ScriptedEngine(says_version)) as restarted:
        url = restarted.url
        data = _get(url, "/v1/models/m/history")["data"]
        happened = [(event["number"], event["kind"], event["version"]) for event in data]
        assert happened == [(1, "promoted", 1), (2, "promoted", 2), (3, "rolled_back", 1)]
        assert _post(url, "/v1/chat/completions", ASK)["model"] == "m@1"


ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=120) as reply:
        return json.load(reply)


def _post(url: str, path: str, body: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def _try_post(url: str, path: str, body: Any) -> None:
    with contextlib.suppress(OSError, HTTPException):  # it is killed meanwhile
        _post(url, path, body)
