"""Changes of what a name means, disturbed: by requests, by each other, by lost files and kills."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

from cray_agents.paths import Home
from cray_agents.runtime.seat import Resident
from cray_agents.scripted import ScriptedEngine
from tests.runtime.gateways import Gateway, checkpoint, served, until
from tests.scripted_gateway import gateway as gateway_process
from tests.scripted_platform import platform

MODELS = "/v1/models/calc"


def says_version(request: dict[str, Any], version: str) -> str:
    return version


class Slow(ScriptedEngine):
    """Loads a version when it is told to; `waiting`: which one it was asked for."""

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
    _, found = await gateway.call("GET", f"{MODELS}/history")
    return [(event["number"], event["kind"], event["version"]) for event in found["data"]]


def held(gateway: Gateway) -> list[str]:
    return sorted(replica["version"] for replica in gateway.pool.status())


async def test_the_name_is_answered_while_each_replica_changes(tmp_path: Path) -> None:
    engines = [Slow(), Slow()]
    async with served(tmp_path, engines[0], others=[Resident(engines[1])]) as gateway:
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
            await until(lambda other=other: other.waiting)
            assert (await gateway.ask("hi")).text == new
            other.go.set()
            await changing
            assert held(gateway) == [new, new]


async def test_a_canary_makes_room_and_comes_back_if_nothing_is_promoted(tmp_path: Path) -> None:
    engines = [Slow(), Slow()]
    async with served(tmp_path, engines[0], others=[Resident(engines[1])]) as gateway:
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
        assert await answers() == {"calc@3"} and held(gateway) == ["calc@3", "calc@3"]
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
    async with served(tmp_path, engines[0], others=[Resident(engines[1])]) as gateway:
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
        assert (await gateway.ask("hi")).text == "calc@1" and held(gateway) == ["calc@1"] * 2
        assert await history(gateway) == before


async def test_changes_at_once_are_done_one_after_the_other(tmp_path: Path) -> None:
    engines = [ScriptedEngine(says_version) for _ in range(3)]
    others = [Resident(engine) for engine in engines[1:]]
    async with served(tmp_path, engines[0], others=others) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        changes = [("promote", {"version": n}) for n in (2, 3, 2, 3)] + [("rollback", {})] * 2
        asking = asyncio.create_task(_ask_on(gateway))
        replies = await asyncio.gather(
            *(gateway.call("POST", f"{MODELS}/{act}", json=body) for act, body in changes)
        )
        asking.cancel()
        assert [status for status, _ in replies[:4]] == [200] * 4
        happened = await history(gateway)
        assert [number for number, _, _ in happened] == list(range(1, len(happened) + 1))
        now = f"calc@{happened[-1][2]}"
        assert (await gateway.ask("hi")).text == now and held(gateway) == [now] * 3


async def _ask_on(gateway: Gateway) -> None:
    while True:
        assert (await gateway.ask("hi")).status == 200


def test_a_gateway_killed_in_a_change_serves_what_the_history_says(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    weights = str(checkpoint(tmp_path / "second", b"second"))
    events = home.models / "m" / "history"
    with gateway_process(home.root) as (url, process):
        _post(url, "/v1/models/m/versions", {"checkpoint": weights})
        assert _post(url, "/v1/models/m/promote", {"version": 2})["number"] == 2
        rolling_back = threading.Thread(target=_try_post, args=(url, "/v1/models/m/rollback", {}))
        rolling_back.start()
        while not (events / "3.json").exists():  # killed as soon as it is written down
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
    with urllib.request.urlopen(url + path, timeout=20) as reply:
        return json.load(reply)


def _post(url: str, path: str, body: Any) -> Any:
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=20) as reply:
        return json.load(reply)


def _try_post(url: str, path: str, body: Any) -> None:
    with contextlib.suppress(OSError):  # it is killed meanwhile
        _post(url, path, body)
