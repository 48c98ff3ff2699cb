"""A call goes to the replica that has its beginning, unless that is clearly busier."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.ports import Engine
from cray_agents.runtime.pool.pool import Pool
from tests.support.in_process_engine import InProcessEngine
from tests.support.routed_replicas import ask, routed
from tests.support.scripted_gateway import says, served
from tests.support.scripted_pool import checkpoint, exchange, probe, says_version, serving, until


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
        first = ["chat" in names for names in who(engines)].index(True)
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2), replicas=[first])
        for version in ("m@1", "m@2", "m@1"):
            await ask(pool, "chat", version)
    assert [len(engine.requests) for engine in engines] == [2, 2]


async def test_gateways_that_know_nothing_of_each_other_choose_one_replica() -> None:
    engines = scripted(8)
    for _ in range(3):  # gateways, or one that was started anew
        router, _ = routed(engines)
        for number in range(200):
            await ask(router, f"run-{number}")
    answered = who(engines)
    assert sum(len(set(names)) for names in answered) == 200
    assert max(map(len, answered)) < 1.5 * 3 * 200 / 8
    homes = {name: place for place, names in enumerate(answered) for name in names}
    router, replicas = routed(engines)
    replicas[3].versions = []  # it drains, say: the others keep what they have
    for number in range(200):
        await ask(router, f"run-{number}")
    for place, (names, before) in enumerate(zip(who(engines), answered, strict=True)):
        assert {name for name in names[len(before) :] if homes[name] != place} <= set(answered[3])


@pytest.mark.parametrize("shared", [True, False])
async def test_attempts_of_a_task_begin_where_the_first_did(shared: bool) -> None:
    engines = scripted(4)
    router, _ = routed(engines, shared=shared)
    for attempt in range(4):
        for task in range(16):
            await ask(router, f"{task}-{attempt}", begin=f"task {task}")
    answered = [{name.partition("-")[0] for name in names} for names in who(engines)]
    assert sum(map(len, answered)) == 16
    assert max(map(len, answered)) < 16
    text = "a long text. " * 1000
    before = [len(engine.requests) for engine in engines]
    for number in range(4):
        await ask(router, f"reader-{number}", begin=f"{text} Question {number}?")
    asked = [len(engine.requests) - count for engine, count in zip(engines, before, strict=True)]
    assert sorted(asked) == [0, 0, 0, 4]


@pytest.mark.parametrize("shared", [True, False])
async def test_attempts_at_once_are_spread(shared: bool) -> None:
    """A prompt is cheap to compute again beside what the attempts sample."""
    engines = scripted(2, delay=0.05)
    router, _ = routed(engines, shared=shared)
    await asyncio.gather(*(ask(router, f"{attempt}", begin="task") for attempt in range(8)))
    assert max(len(engine.requests) for engine in engines) <= 5


async def test_a_conversation_is_found_by_what_it_repeats() -> None:
    """By a gateway that does not know it, and though its client goes back or cuts its end off."""
    engines = scripted(8)
    history = says("begin")
    for number in range(4):
        history += [{"role": "assistant", "content": f"{number}"}, *says(f"go on {number}")]
    for length in (1, 3, 9, 5, 3):
        router, _ = routed(engines)
        asked = exchange(messages=history[:length])
        asked.conversation = "run"
        _ = [piece async for piece in router.answer("m@1", asked)]
    assert sorted(len(engine.requests) for engine in engines) == [0] * 7 + [5]


async def test_conversations_of_one_session_have_places_of_their_own() -> None:
    engines = scripted(8)
    router, _ = routed(engines, shared=False)
    for _ in range(3):
        for number in range(16):
            await ask(router, "session", begin=f"agent {number}")
    begun = [{request["messages"][0]["content"] for request in e.requests} for e in engines]
    assert sum(map(len, begun)) == 16
    assert max(map(len, begun)) < 16


async def test_two_clients_of_one_run_and_a_shorter_history_are_recorded(tmp_path: Path) -> None:
    engines = [ScriptedEngine(lambda request: "yes", delay=0.01) for _ in range(3)]
    first, *others = map(InProcessEngine, engines)
    run = {"X-Run-Id": "run_1", "X-Session-Id": "another's"}
    said = [*says("begin"), {"role": "assistant", "content": "yes"}]
    asked = [says("begin"), *([*said, *says(who)] for who in "ab")]
    asked += [[*said, *says("a"), said[1], *says("on")], [*said, *says("back")], says("begin")]
    async with served(tmp_path, host=first, others=others) as gateway:
        replies = [await gateway.ask(asked[0], headers=run)]
        replies += await asyncio.gather(*(gateway.ask(m, headers=run) for m in asked[1:3]))
        replies += [await gateway.ask(messages, headers=run) for messages in asked[3:]]
        assert [reply.status for reply in replies] == [200] * 6
        calls = {call.id: call.messages for call in gateway.calls("run_1")}
    assert [calls[reply.json["id"]] for reply in replies] == asked
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 6]


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
        router = gateway.pool
    assert len(router._places) == 3 + 2  # conversations, and prompts
