"""Sleep of a pool: requests end or wait, GPUs are free meanwhile, and replicas wake proven."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineUnavailable, PoolBusy
from cray_agents.runtime.pool.pool import Pool
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_pool import Mortal, ask, checkpoint, probe, says_version, serving, until


class Sleeper(Mortal):
    """A host whose engine's sleeps and wakings are recorded, and can be made to fail."""

    def __init__(self, level: int = 1) -> None:
        super().__init__(ScriptedEngine(says_version))
        self.level = level
        self.stops = 0

    def sleep_level(self, checkpoint: Path) -> int:
        return self.level

    async def stop(self) -> None:
        self.stops += 1
        self.engine.asleep = 0
        self._ended.clear()


def states(pool: Pool) -> list[str]:
    return [each["state"] for each in pool.status()]


def fails(method: str) -> Callable[..., Awaitable[None]]:
    async def failing(*arguments: Any) -> None:
        raise EngineUnavailable(f"no {method}")

    return failing


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_end_or_wait_and_the_replica_wakes_proven(
    tmp_path: Path, level: int
) -> None:
    host, ended = Sleeper(level), asyncio.Event()

    async def slow(request: dict[str, Any], version: str) -> str:
        assert not host.engine.asleep
        await ended.wait()
        return version

    host.engine = ScriptedEngine(slow)
    async with serving(tmp_path, host) as pool:
        early = asyncio.create_task(ask(pool, "m@1"))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        asleep, wake = asyncio.Event(), asyncio.Event()
        seconds: dict[str, float] = {}

        async def sleep() -> None:
            async with pool.asleep() as phases:
                asleep.set()
                await wake.wait()
            seconds.update(phases)

        sleeping = asyncio.create_task(sleep())
        await until(lambda: states(pool) == ["sleeping"])
        assert not asleep.is_set() and host.engine.asleep < 1  # a request is in flight
        late = asyncio.create_task(ask(pool, "m@1"))
        ended.set()
        await asleep.wait()
        assert await early == "m@1" and not late.done()
        assert host.engine.asleep == level and pool.swapping and not pool.ready
        assert pool.expects("m@1") and not pool.serves("m@1")
        wake.set()
        await sleeping
        assert await late == "m@1" and states(pool) == ["serving"]
        assert (host.starts, host.engine.asleep) == (1, 0)
        loads = {"load"} if level == 2 else set()
        assert seconds.keys() == {"drain", "sleep", "wake", "prove"} | loads
        assert host.engine.loaded == ["m@1"] * level  # at level 2 the weights were gone


async def test_answers_that_do_not_end_keep_the_replica_awake(tmp_path: Path) -> None:
    first, second = Sleeper(), Sleeper()
    never = asyncio.Event()

    async def stuck(request: dict[str, Any], version: str) -> str:
        await never.wait()
        return version

    first.engine = ScriptedEngine(stuck)
    async with serving(tmp_path, first, second, drain_timeout=0.05) as pool:
        request = asyncio.create_task(ask(pool, "m@1"))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        with pytest.raises(PoolBusy, match=r"1 requests were still running.*m@1 serves on"):
            async with pool.asleep():
                raise AssertionError("it is not asleep")
        assert states(pool) == ["serving", "serving"] and not second.engine.asleep
        assert await ask(pool, "m@1") == "m@1"
        never.set()
        assert await request == "m@1"


async def test_changes_of_versions_wait_for_the_end_of_the_sleep(tmp_path: Path) -> None:
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        async with pool.asleep():
            change = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
            waiting = asyncio.create_task(ask(pool, "m@2"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not change.done() and host.engine.loaded == ["m@1"]
        assert (await change).passed
        assert await waiting == "m@2" and host.engine.loaded == ["m@1", "m@2"]


async def test_a_replica_that_dies_asleep_starts_anew_after_the_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        async with pool.asleep():
            monkeypatch.setattr(host.engine, "wake", fails("wake"))
            host.die()
            await until(lambda: pool.status()[0]["last_restart"] is not None)
            for _ in range(20):
                await asyncio.sleep(0)
            assert host.starts == 1  # the GPU is somebody else's
        assert await ask(pool, "m@1") == "m@1"
        assert host.starts == 2 and pool.status()[0]["restarts"] == 1


@pytest.mark.parametrize("with_other_weights", [False, True])
async def test_a_replica_that_does_not_wake_as_it_was_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_other_weights: bool
) -> None:
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        async with pool.asleep():
            if with_other_weights:
                host.engine.drift = 0.5
            else:
                monkeypatch.setattr(host.engine, "wake", fails("wake"))
        assert states(pool) == ["down"]
        host.engine.drift = 0.0
        assert await ask(pool, "m@1") == "m@1"
        assert "it did not wake up" in pool.status()[0]["last_restart"]["why"]
        assert host.starts == 2


async def test_a_replica_that_cannot_sleep_is_ended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        monkeypatch.setattr(host.engine, "sleep", fails("sleep"))
        async with pool.asleep() as seconds:
            assert (host.stops, host.starts) == (1, 1)
        assert await ask(pool, "m@1") == "m@1"
        assert host.starts == 2 and seconds.keys() == {"drain", "sleep", "load"}


async def test_a_replica_that_is_down_frees_its_gpu_too(tmp_path: Path) -> None:
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        host.broken = True
        host.die()
        await until(lambda: pool.status()[0]["restarts"] > 0)
        stops = host.stops
        async with pool.asleep():
            assert host.stops > stops
            host.broken = False
        assert await ask(pool, "m@1") == "m@1"


async def test_a_cancelled_sleep_wakes_nothing(tmp_path: Path) -> None:
    """The platform ends, and jobs may still be on the GPU."""
    host = Sleeper()
    async with serving(tmp_path, host) as pool:
        asleep = asyncio.Event()

        async def sleep() -> None:
            async with pool.asleep():
                asleep.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(sleep())
        await asleep.wait()
        change = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert host.engine.asleep == 1 and states(pool) == ["sleeping"] and not change.done()


async def test_a_failed_block_wakes_all_replicas(tmp_path: Path) -> None:
    host = Sleeper()
    async with serving(tmp_path, host, InProcessEngine(ScriptedEngine(says_version))) as pool:
        with pytest.raises(ZeroDivisionError):
            async with pool.asleep():
                assert states(pool) == ["sleeping", "sleeping"]
                raise ZeroDivisionError
        assert states(pool) == ["serving", "serving"]
