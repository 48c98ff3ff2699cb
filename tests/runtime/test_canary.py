"""Canaries over a real gateway with two scripted replicas: who gets which, and how it ends."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.runtime.registry.canary import Canary, Side
from cray_agents.runtime.registry.registry import ModelEvent
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, Reply, checkpoint, served, until

CANARY = "/v1/models/calc/canary"
WIDTH = 32  # requests at a time


class Script:
    """Says which version answers; calc@2 fails while `broken`."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, request: dict[str, Any], version: str) -> str:
        if self.broken and version == "calc@2":
            raise EngineError("the weights are broken", status=500)
        return version


@pytest.fixture
def script() -> Script:
    return Script()


@asynccontextmanager
async def two(tmp_path: Path, script: Script) -> AsyncIterator[Gateway]:
    """A gateway with two replicas, which knows calc@2."""
    other = InProcessEngine(ScriptedEngine(script))
    async with served(tmp_path, ScriptedEngine(script), others=[other]) as gateway:
        if not (tmp_path / "new").exists():
            new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
            await gateway.call("POST", "/v1/models/calc/versions", json=new)
        yield gateway


async def ask_all(gateway: Gateway, sessions: list[str], **fields: Any) -> dict[str, Reply]:
    """What each session is answered."""
    places = asyncio.Semaphore(WIDTH)

    async def ask(session: str) -> Reply:
        async with places:
            return await gateway.ask("hi", headers={"X-Session-Id": session}, **fields)

    replies = await asyncio.gather(*(ask(session) for session in sessions))
    return dict(zip(sessions, replies, strict=True))


async def versions(gateway: Gateway, sessions: list[str]) -> dict[str, str]:
    return {session: reply.text for session, reply in (await ask_all(gateway, sessions)).items()}


def named(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{n}" for n in range(count)]


async def start(gateway: Gateway, **test: Any) -> dict[str, Any]:
    status, event = await gateway.call("POST", CANARY, json={"version": 2, "who": "me", **test})
    assert status == 200, event
    return dict(event)


async def kinds(gateway: Gateway) -> list[str]:
    _, history = await gateway.call("GET", "/v1/models/calc/history")
    return [event["kind"] for event in history["data"]]


def loaded_versions(gateway: Gateway) -> list[str]:
    return sorted(replica["version"] for replica in gateway.pool.status())


@pytest.mark.slow
async def test_a_share_of_the_sessions_stays_with_the_candidate(
    tmp_path: Path, script: Script
) -> None:
    async with two(tmp_path, script) as gateway:
        before = await start(gateway, share=0.2)
        assert (before["kind"], before["version"], before["who"]) == ("canary_started", 2, "me")
        canary = gateway.services.versions.live.canary("calc")
        assert canary is not None
        drawn = sum(canary.draws(session) for session in named("s", 20_000))
        assert abs(drawn - 4000) < 4 * math.sqrt(20_000 * 0.2 * 0.8)
        sessions = named("s", 400)
        first = await versions(gateway, sessions)
        assert first == {s: "calc@2" if canary.draws(s) else "calc@1" for s in sessions}
        assert await versions(gateway, sessions[:200]) == {s: first[s] for s in sessions[:200]}

        stays = {first[s] for s in sessions[:50]}
        assert stays == {"calc@1", "calc@2"}
        for session in sessions[:50]:  # the `user` names a session too, the header before it
            reply = await gateway.ask("hi", user=session)
            assert reply.text == first[session]
            reply = await gateway.ask("hi", user="x", headers={"X-Session-Id": session})
            assert reply.text == first[session]
        path = "/runs/one/v1/chat/completions"
        turns = {(await gateway.ask(f"turn {n}", path=path)).text for n in range(10)}
        assert len(turns) == 1  # of what names no session the run is one
        for model in ("calc@1", "calc@2"):
            answers = await ask_all(gateway, named("any", 20), model=model)
            assert {reply.text for reply in answers.values()} == {model}

        _, seen = await gateway.call("GET", CANARY)
        assert seen["seen"]["canary"]["answered"] + seen["seen"]["control"]["answered"] > 400
        status, ended = await gateway.call("DELETE", CANARY + "?who=me&reason=enough")
        assert (status, ended["kind"], ended["reason"]) == (200, "canary_ended", "enough")
        assert ended["numbers"]["canary"]["failed"] == 0
        assert set((await versions(gateway, sessions[:50])).values()) == {"calc@1"}
        assert loaded_versions(gateway) == ["calc@1", "calc@1"]
        assert (await gateway.call("GET", CANARY))[0] == 404
        assert (await gateway.call("DELETE", CANARY))[0] == 404

        await start(gateway, share=0.2)
        again = await versions(gateway, sessions[:200])
        assert again != {s: first[s] for s in sessions[:200]}  # each canary draws anew


async def test_it_is_rolled_back_when_it_fails(tmp_path: Path, script: Script) -> None:
    async with two(tmp_path, script) as gateway:
        await start(gateway, share=0.3)
        script.broken = True
        failed = 0
        for n in range(20):
            replies = await ask_all(gateway, named(f"batch-{n}", 64), stream=bool(n % 2))
            failed += sum(b"broken" in reply.body for reply in replies.values())
            if (await kinds(gateway))[-1] == "canary_ended":
                break
        await until(lambda: gateway.services.registry.canary("calc") is None)
        _, history = await gateway.call("GET", "/v1/models/calc/history")
        ended = history["data"][-1]
        assert (ended["kind"], ended["who"]) == ("canary_ended", "canary")
        assert ended["reason"].startswith("rolled back: worse errors: ")
        assert ended["numbers"]["error_evidence"] >= ended["numbers"]["limit"]
        assert 0 < failed < 100
        replies = await ask_all(gateway, named("after", 100))
        assert {reply.status for reply in replies.values()} == {200}
        await until(lambda: loaded_versions(gateway) == ["calc@1", "calc@1"])


async def test_what_a_client_does_wrong_is_no_failure(tmp_path: Path, script: Script) -> None:
    async with two(tmp_path, script) as gateway:
        await start(gateway, share=0.5)
        path = "/v1/completions"  # of a scripted engine, which says 400
        wrong = [
            await gateway.ask("", path=path, prompt="hi", headers={"X-Session-Id": name})
            for name in named("s", 40)
        ]
        assert {reply.status for reply in wrong} == {400}
        _, seen = await gateway.call("GET", CANARY)
        assert (seen["seen"]["canary"]["answered"], seen["seen"]["control"]["answered"]) == (0, 0)

        answered = await versions(gateway, named("s", 10))
        stubborn = next(name for name, version in answered.items() if version == "calc@2")
        script.broken = True
        for _ in range(60):
            assert (await ask_all(gateway, [stubborn]))[stubborn].status == 502
        _, seen = await gateway.call("GET", CANARY)
        assert seen["seen"]["canary"]["failed"] == 1  # one session, however often it asks


async def reward(gateway: Gateway, replies: list[Reply], worth: dict[str, float]) -> None:
    """What people say of the runs, half of it each way that there is to say it."""
    for n, reply in enumerate(replies):
        body = {"name": "useful", "value": worth[reply.text], "source": "human"}
        path, sent = f"/v1/trajectories/{reply.run_id}/rewards", dict[str, Any](body)
        if n % 2:
            path = f"/v1/trajectories/{reply.run_id}/events"
            sent = {"events": [{"kind": "reward", "body": body}]}
        assert (await gateway.call("POST", path, json=sent))[0] == 200


async def test_it_is_rolled_back_when_rewards_fall_even_after_a_restart(
    tmp_path: Path, script: Script
) -> None:
    worth = {"calc@1": 0.9, "calc@2": 0.2}
    async with two(tmp_path, script) as gateway:
        await start(gateway, share=0.4)
        sessions = named("s", 24)
        first = await ask_all(gateway, sessions)
        assert {reply.text for reply in first.values()} == {"calc@1", "calc@2"}
        await reward(gateway, list(first.values()), worth)
        _, before = await gateway.call("GET", CANARY)
        assert before["seen"]["canary"]["rewarded"] + before["seen"]["control"]["rewarded"] == 24
        assert 1 < before["seen"]["reward_evidence"] < before["seen"]["limit"]

    async with two(tmp_path, script) as gateway:  # all replicas came up with calc@1
        assert loaded_versions(gateway) == ["calc@1", "calc@1"]
        _, after = await gateway.call("GET", CANARY)
        assert after["seen"] == before["seen"]
        await until(lambda: loaded_versions(gateway) == ["calc@1", "calc@2"])
        same = {session: reply.text for session, reply in first.items()}
        assert await versions(gateway, sessions) == same
        for n in range(20):
            replies = await ask_all(gateway, named(f"batch-{n}", 24))
            await reward(gateway, list(replies.values()), worth)
            if "canary_ended" in await kinds(gateway):
                break
        await until(lambda: gateway.services.registry.canary("calc") is None)
        _, history = await gateway.call("GET", "/v1/models/calc/history")
        assert history["data"][-1]["reason"].startswith("rolled back: worse rewards: mean 0.2 of")
        await until(lambda: loaded_versions(gateway) == ["calc@1", "calc@1"])
        assert set((await versions(gateway, named("after", 20))).values()) == {"calc@1"}


@pytest.mark.slow
async def test_it_is_rolled_back_when_scanners_find_more(tmp_path: Path, script: Script) -> None:
    async with two(tmp_path, script) as gateway:
        await start(gateway, share=0.5, scanners=["leak"])
        limit = 3 / 0.05  # three tests share alpha
        for n in range(20):
            replies = await ask_all(gateway, named(f"batch-{n}", 24))
            for reply in replies.values():
                value = 1.0 if reply.text == "calc@2" else 0.0
                body = {"name": "leak", "source": "scan:leak", "value": value}
                path = f"/v1/trajectories/{reply.run_id}/rewards"
                assert (await gateway.call("POST", path, json=body))[0] == 200
                other = body | {"name": "tone", "source": "scan:tone", "value": 1.0}
                assert (await gateway.call("POST", path, json=other))[0] == 200
            if "canary_ended" in await kinds(gateway):
                break
        await until(lambda: gateway.services.registry.canary("calc") is None)
        _, history = await gateway.call("GET", "/v1/models/calc/history")
        ended = history["data"][-1]
        assert ended["reason"].startswith("rolled back: worse findings: leak: ")
        assert ended["numbers"]["finding_evidence"] >= ended["numbers"]["limit"] == limit
        assert ended["numbers"]["canary"]["rewarded"] == 0  # findings are no rewards
        assert ended["numbers"]["control"]["found"] == 0 < ended["numbers"]["control"]["scanned"]


async def test_it_is_promoted_after_enough_sessions(tmp_path: Path, script: Script) -> None:
    async with two(tmp_path, script) as gateway:
        await start(gateway, share=0.5, promote_after=40)
        await ask_all(gateway, named("s", 160))
        await until(lambda: gateway.services.registry.resolve("calc").number == 2)
        assert await kinds(gateway) == ["promoted", "canary_started", "canary_ended", "promoted"]
        await until(lambda: loaded_versions(gateway) == ["calc@2", "calc@2"])
        assert set((await versions(gateway, named("after", 20))).values()) == {"calc@2"}


async def test_what_cannot_be_a_canary(tmp_path: Path, script: Script) -> None:
    (tmp_path / "one").mkdir()
    async with served(tmp_path / "one") as gateway:
        status, refused = await gateway.call("POST", CANARY, json={"version": 1})
        assert status == 400 and "--replicas 2" in refused["error"]["message"]
    (tmp_path / "two").mkdir()
    async with two(tmp_path / "two", script) as gateway:
        for body, words in (
            ({"version": 1}, "is promoted already"),
            ({"version": 2, "share": 1.5}, "share"),
            ({"version": 2, "shares": 0.5}, "shares"),
            ({"version": 2, "low": 1, "high": 0}, "must be less"),
            ({"share": 0.5}, "version"),
        ):
            status, refused = await gateway.call("POST", CANARY, json=body)
            assert status == 400 and words in refused["error"]["message"]
        assert (await gateway.call("POST", CANARY, json={"version": 9}))[0] == 404
        await start(gateway)
        status, refused = await gateway.call("POST", CANARY, json={"version": 2})
        assert (status, refused["error"]["code"]) == (400, "canary_running")
        # nothing may take the replica away from it, and the incumbent is served as it was
        status, _ = await gateway.call("POST", "/v1/models/calc/versions/1/stage", json={})
        assert status == 200 and loaded_versions(gateway) == ["calc@1", "calc@2"]
        third = {"checkpoint": str(checkpoint(tmp_path / "third", b"third"))}
        await gateway.call("POST", "/v1/models/calc/versions", json=third)
        status, refused = await gateway.call("POST", "/v1/models/calc/versions/3/stage", json={})
        assert (status, refused["error"]["code"]) == (409, "pool_busy")
        assert loaded_versions(gateway) == ["calc@1", "calc@2"]


async def test_promoting_or_rolling_back_ends_it(tmp_path: Path, script: Script) -> None:
    async with two(tmp_path, script) as gateway:
        await start(gateway)
        await gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
        assert loaded_versions(gateway) == ["calc@2", "calc@2"]
        status, event = await gateway.call("POST", "/v1/models/calc/rollback", json={"who": "me"})
        assert (status, event["kind"], event["version"]) == (200, "rolled_back", 1)
        await start(gateway)
        body = {"to": 2, "reason": "it was better"}
        await gateway.call("POST", "/v1/models/calc/rollback", json=body)
        assert await kinds(gateway) == [
            "promoted",
            *["canary_started", "canary_ended", "promoted"],
            "rolled_back",
            *["canary_started", "canary_ended", "rolled_back"],
        ]
        assert set((await versions(gateway, named("after", 20))).values()) == {"calc@2"}


async def test_an_answer_counts_for_the_canary_under_which_it_began(
    tmp_path: Path, script: Script
) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"{}"

    async with two(tmp_path, script) as gateway:
        live = gateway.services.versions.live

        async def answered(*, ends_under_another: bool) -> Any:
            canary = live.canary("calc")
            exchange = EngineCall("/v1/chat/completions", {}, "x", "calc@1")
            answer = live.count_outcome("calc", "s", exchange, pieces(), None)
            if ends_under_another:
                await gateway.call("POST", "/v1/models/calc/promote", json={"version": 1})
                await start(gateway)
                assert live.canary("calc") is not canary
            assert [piece async for piece in answer] == [b"{}"]
            counted: Any = live.canary("calc")
            return counted.numbers()["control"]["answered"]

        await start(gateway)
        assert await answered(ends_under_another=True) == 0
        assert await answered(ends_under_another=False) == 1


def test_findings_go_on_after_a_restart(tmp_path: Path) -> None:
    start = ModelEvent(name="m", number=1, version=2, numbers={"scanners": ["leak"]})
    canary = Canary(start)
    for n in range(9):
        canary.add_finding(f"r{n}", "leak", "canary", has_finding=n % 2 == 0)
        canary.add_finding(f"r{n}", "leak", "canary", has_finding=True)  # of a run its first
        canary.add_finding(f"s{n}", "leak", "control", has_finding=False)
    home = Home(tmp_path)
    path = home.canary("m", 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(canary.to_bytes())
    assert Canary.load(home, start).numbers() == canary.numbers()
    assert canary.numbers()["canary"]["found"] == 5


def judged(seed: int, canary: float, control: float, reward: float | None = None) -> Canary:
    """A canary of a tenth of 4,000 sessions: shares that fail, or mean rewards."""
    rng = random.Random(seed)
    numbers = {"share": 0.1} | ({} if reward is None else {"low": -1.0, "high": 1.0})
    found = Canary(ModelEvent(name="m", number=seed, version=2, numbers=numbers))
    for n in range(4000):
        side: Side = "canary" if found.draws(f"s{n}") else "control"
        level = canary if side == "canary" else control
        if reward is None:
            found.add_answer(f"s{n}", side, failed=rng.random() < level)
        else:
            found.add_reward(f"r{n}", side, 1.0 if rng.random() < level else -1.0)
        if n % 20 == 0 and found.verdict()[0] != "continue":  # evidence is the most there ever was
            break
    return found


@pytest.mark.slow
def test_one_that_is_no_worse_is_rolled_back_at_most_at_the_stated_level() -> None:
    same = [judged(seed, 0.05, 0.05).verdict()[0] for seed in range(60)]
    alike = [judged(seed, 0.7, 0.7, reward=0.7).verdict()[0] for seed in range(60)]
    assert same.count("roll back") <= 3 and alike.count("roll back") <= 3


def test_one_that_is_worse_is_found() -> None:
    for seed in range(10):
        assert judged(seed, 0.3, 0.02).failures.count["canary"] < 150
        assert judged(seed, 0.3, 0.02).verdict()[0] == "roll back"
        verdict, why = judged(seed, 0.4, 0.8, reward=0.8).verdict()
        assert verdict == "roll back" and "worse rewards: mean" in why


def test_rewards_are_told_in_their_own_range() -> None:
    numbers = {"share": 0.5, "low": -1.0, "high": 3.0}
    canary = Canary(ModelEvent(name="m", number=1, version=2, numbers=numbers))
    for n, value in enumerate((1.0, 2.0, 99.0)):
        canary.add_reward(f"r{n}", "canary", value)
        canary.add_reward(f"r{n}", "canary", 0.0)  # of a run its first
    assert canary.numbers()["canary"] | {"reward": 0} == {
        "answered": 0, "failed": 0, "rewarded": 3, "reward": 0, "scanned": 0, "found": 0,
    }  # fmt: skip
    assert canary.numbers()["canary"]["reward"] == pytest.approx(2.0)  # 99 counts as 3
