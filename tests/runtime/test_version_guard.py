"""Requests of another gateway while the pool changes an engine: none stamped wrong, none lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cray_agents.errors import PoolBusy, VersionClosed
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.pool.pool import Pool, SwapMode
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.support.scripted_pool import checkpoint, probe
from tests.support.scripted_server import PROGRAM

pytestmark = pytest.mark.slow

SETTINGS = EngineSettings(program=PROGRAM, dtype="float32", start_timeout=100)


@dataclass
class Shared:
    """A pool of one engine in a process, and another gateway's connection to it."""

    folder: Path
    pool: Pool
    other: VllmEngine

    async def ask(self, version: str, text: str = "hello", *, stream: bool = True) -> EngineCall:
        """Ask past the pool."""
        call = self.call(version, text, stream=stream)
        async for _ in self.other.answer(call):
            pass
        return call

    @staticmethod
    def call(version: str, text: str, *, stream: bool = True) -> EngineCall:
        request = {"messages": [{"role": "user", "content": text}], "stream": stream}
        return EngineCall("/v1/chat/completions", request, new_id("x")[2:], version)

    async def begin(self, version: str) -> "asyncio.Task[EngineCall]":
        """Ask for something slow past the pool; return when it is being answered."""
        begun = asyncio.Event()

        async def ask() -> EngineCall:
            call = self.call(version, "a slow one " * 10)
            async for _ in self.other.answer(call):
                begun.set()
            return call

        task = asyncio.create_task(ask())
        await asyncio.wait({asyncio.create_task(begun.wait()), task}, return_when="FIRST_COMPLETED")
        assert begun.is_set(), task.exception()
        return task

    async def swap(self, number: int) -> None:
        await self.pool.swap(checkpoint(self.folder, number), f"m@{number}", probe(number))


@pytest.fixture
async def shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Shared]:
    monkeypatch.setenv("CRAY_TEST_SLOW", str(getattr(request, "param", 1)))  # seconds of an answer
    replica = VllmProcess("m", SETTINGS, tmp_path / "replica.log")
    pool = Pool([replica])
    await pool.start(checkpoint(tmp_path, 1), "m@1", probe(1))
    server = replica.server
    assert server is not None
    other = VllmEngine(server.url, server.model, server.secret)
    yield Shared(tmp_path, pool, other)
    await other.close()
    await pool.stop()


@pytest.mark.parametrize(("mode", "shared"), [("drain", 1), ("keep", 8)], indirect=["shared"])
async def test_a_swap_loses_no_request_of_another_gateway(shared: Shared, mode: SwapMode) -> None:
    shared.pool.swap_mode = mode
    slow = await shared.begin("m@1")
    await shared.swap(2)
    assert slow.done() is (mode == "drain")
    (sample,) = (await slow).samples
    assert sample.version == "m@1"
    assert [seam.model for seam in sample.seams] == ([] if mode == "drain" else ["m@2"])
    with pytest.raises(VersionClosed):  # a gateway that has not heard of the change
        await shared.ask("m@1")
    (sample,) = (await shared.ask("m@2", stream=False)).samples
    assert sample.version == "m@2"


@pytest.mark.parametrize("shared", [8], indirect=True)
async def test_a_swap_that_others_do_not_let_begin_leaves_all_as_it_was(shared: Shared) -> None:
    shared.pool._slots[0].drain_timeout = 2.0  # in which the engine has to tell of it
    slow = await shared.begin("m@1")
    with pytest.raises(PoolBusy, match="1 requests were still running"):
        await shared.swap(2)
    assert (await shared.ask("m@1")).samples[0].version == "m@1"
    await slow


async def test_the_pools_own_request_is_sent_anew_when_the_engine_has_another_version(
    shared: Shared,
) -> None:
    """As if the engine had changed between choice and arrival."""
    await shared.other.refuse()
    call = shared.call("", "hello")
    asked = asyncio.create_task(_collect(shared.pool, call))
    await asyncio.sleep(0.1)
    assert not asked.done()
    await shared.other.admit("m@1")
    assert b"m@1" in await asked
    assert call.samples[0].version == "m@1"


async def _collect(pool: Pool, call: EngineCall) -> bytes:
    return b"".join([piece async for piece in pool.answer("m@1", call)])


async def test_a_replica_sleeps_only_when_no_gateway_asks_it(shared: Shared) -> None:
    slow = await shared.begin("m@1")
    async with shared.pool.asleep():
        assert slow.done()
        with pytest.raises(VersionClosed):
            await shared.ask("m@1")
    assert (await shared.ask("m@1")).samples
