"""A conversation stays with the replica that has its beginning, unless that is clearly busier."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.ports import Engine
from cray_agents.runtime.background import ChangeNotifier
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.request_router import InFlightRequests, RequestRouter
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import served
from tests.support.scripted_pool import checkpoint, exchange, probe, says_version, serving, until


async def ask(pool: Any, conversation: str, version: str = "m@1") -> None:
    asked = exchange(user=conversation)
    asked.conversation = conversation
    _ = [piece async for piece in pool.answer(version, asked)]


def scripted(count: int, **settings: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(says_version, **settings) for _ in range(count)]


def who(engines: Sequence[ScriptedEngine]) -> list[list[str]]:
    """By engine the conversations of the calls that it answered."""
    return [[request["user"] for request in engine.requests] for engine in engines]


async def converse(pool: Any, conversations: int, turns: int) -> None:
    """All at once; between two turns a tool takes its time."""
    pauses = random.Random(0)

    async def one(name: str) -> None:
        for _ in range(turns):
            await ask(pool, name)
            await asyncio.sleep(pauses.uniform(0, 0.01))

    await asyncio.gather(*(one(f"run-{number}") for number in range(conversations)))


@pytest.mark.parametrize("affinity", [1.5, 0.0])
async def test_conversations_stay_and_replicas_are_alike_busy(
    tmp_path: Path, affinity: float
) -> None:
    engines = scripted(4, delay=0.005)
    async with serving(tmp_path, *map(InProcessEngine, engines), affinity=affinity) as pool:
        await converse(pool, 64, 12)
    answered = who(engines)
    places = {name for names in answered for name in names}
    homes = [sum(name in names for names in answered) for name in places]
    if affinity:
        assert sum(homes) < 1.5 * len(places)  # few moved, and those once
    else:
        assert sum(homes) > 2.5 * len(places)
    assert sum(map(len, answered)) == 64 * 12
    assert max(map(len, answered)) <= 1.3 * 64 * 12 / 4


async def test_a_conversation_leaves_a_replica_that_is_clearly_busier(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slow(request: dict[str, Any], version: str) -> str:
        if request["user"] != "chat":
            await gate.wait()
        return version

    engines = [ScriptedEngine(slow) for _ in range(2)]
    async with serving(tmp_path, *map(InProcessEngine, engines)) as pool:
        await ask(pool, "chat")
        first = ["chat" in names for names in who(engines)].index(True)

        async def fill(count: int) -> list[asyncio.Task[None]]:
            tasks = [asyncio.create_task(ask_directly(pool, engines[first])) for _ in range(count)]
            await until(lambda: pool.status()[first]["in_flight"] >= count)
            return tasks

        held = await fill(2)
        await ask(pool, "chat")
        assert who(engines)[first].count("chat") == 2
        held += await fill(8)
        await ask(pool, "chat")
        gate.set()
        await asyncio.gather(*held)
        await ask(pool, "chat")  # what it has now is there
    assert who(engines)[first].count("chat") == 2
    assert who(engines)[1 - first].count("chat") == 2


async def test_one_name_for_everything_does_not_fill_one_replica(tmp_path: Path) -> None:
    engines = scripted(4, delay=0.05)
    async with serving(tmp_path, *map(InProcessEngine, engines)) as pool:
        await asyncio.gather(*(ask(pool, "lie") for _ in range(64)))
    assert max(map(len, who(engines))) <= 1.5 * 64 / 4 + 2


async def ask_directly(pool: Pool, engine: Engine) -> None:
    """A call in flight at one replica, whatever the router would do."""
    (slot,) = [slot for slot in pool._all if slot.engine("m@1") is engine]
    asked = exchange(user="other")
    with slot.requests.track("m@1"):
        _ = [piece async for piece in slot.engine("m@1").answer(asked)]


async def test_the_version_comes_before_the_place(tmp_path: Path) -> None:
    engines = scripted(2)
    async with serving(tmp_path, *map(InProcessEngine, engines)) as pool:
        await ask(pool, "chat")
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2), replicas=[0])
        for version in ("m@1", "m@2", "m@1"):
            await ask(pool, "chat", version)
    assert [len(engine.requests) for engine in engines] == [2, 2]


class Named:
    """A replica of a router without a pool."""

    losses, why_lost, contents, versions = 0, "", "", ("m@1",)

    def __init__(self, engine: ScriptedEngine) -> None:
        self.requests = InFlightRequests(ChangeNotifier())
        self._engine = engine

    @property
    def in_flight(self) -> int:
        return self.requests.total

    def engine(self, version: str) -> Engine:
        return self._engine


async def test_gateways_that_know_nothing_of_each_other_choose_one_replica() -> None:
    engines = scripted(8)
    for _ in range(3):  # gateways, or one that was started anew
        replicas: list[Any] = [Named(engine) for engine in engines]
        router = RequestRouter(replicas, ChangeNotifier(), 1.0, lambda version: None)
        router.shared = True
        for number in range(200):
            await ask(router, f"run-{number}")
    answered = who(engines)
    assert sum(len(set(names)) for names in answered) == 200
    assert max(map(len, answered)) < 2 * 3 * 200 / 8


async def test_calls_of_a_run_a_session_and_a_conversation_stay_together(tmp_path: Path) -> None:
    engines = [ScriptedEngine(lambda request: "yes") for _ in range(3)]
    first, *others = map(InProcessEngine, engines)
    async with served(tmp_path, host=first, others=others) as gateway:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        reply = await gateway.ask(messages)
        for headers in ({"X-Run-Id": "run_1"}, {"X-Session-Id": "s" * 5000}):
            for _ in range(3):
                assert (await gateway.ask("hi", headers=headers)).status == 200
        said = {"role": "assistant", "content": reply.text}
        messages += [said, {"role": "user", "content": "two"}]
        assert (await gateway.ask(messages)).run_id == reply.run_id
        router = gateway.pool._router
    assert sorted(map(len, router._places)) == sorted([5, len(reply.run_id), 100])
