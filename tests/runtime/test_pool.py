"""The pool's promises, kept around scripted engines: no vLLM needed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import EngineError, EngineUnavailable, SwapError
from cray_agents.records import Manifest, ProbePrompt
from cray_agents.runtime.pool import Pool
from cray_agents.runtime.seat import Resident
from cray_agents.scripted import ScriptedEngine

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "who?"}]}


def says_version(request: dict[str, Any], version: str) -> str:
    return version


class Mortal(Resident):
    """A Resident that can be made to die, as a process does."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.starts = 0
        self.broken = False
        self._ended = asyncio.Event()

    async def start(self, checkpoint: Path, version: str) -> None:
        if self.broken:
            raise EngineUnavailable("it does not come up")
        self.starts += 1
        self._ended.clear()
        await super().start(checkpoint, version)

    async def died(self) -> None:
        await self._ended.wait()

    def die(self) -> None:
        self._ended.set()


def checkpoint(folder: Path, number: int, job: str | None = "job-1") -> Path:
    directory = folder / f"c{number}"
    directory.mkdir(exist_ok=True)
    manifest = Manifest(files={}, weights_sha256=str(number), job=job, probe=probe(number))
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory


def probe(number: int) -> list[ProbePrompt]:
    return [ProbePrompt(token_ids=[1, 2, 3 + number], logprobs=[-1.0, -2.0 - number])]


@asynccontextmanager
async def serving(folder: Path, *hosts: Resident, **settings: Any) -> AsyncIterator[Pool]:
    pool = Pool(hosts, **settings)
    await pool.start(checkpoint(folder, 1), "m@1", probe(1))
    try:
        yield pool
    finally:
        await pool.stop()


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - there is no event for what the tests look at
            await asyncio.sleep(0.005)


async def test_a_swap_waits_for_requests_in_flight_and_makes_new_ones_wait(tmp_path: Path) -> None:
    gate, engine = asyncio.Event(), ScriptedEngine()

    async def slow(request: dict[str, Any], version: str) -> str:
        await gate.wait()
        return version

    engine = ScriptedEngine(slow)
    async with serving(tmp_path, Resident(engine)) as pool:
        old = asyncio.create_task(pool.chat("m@1", ASK))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        new = asyncio.create_task(pool.chat("m@2", ASK))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        assert engine.loaded == ["m@1"] and len(engine.requests) == 1 and not pool.ready
        gate.set()
        assert (text(await old), text(await new)) == ("m@1", "m@2")
        report = await swap
        assert report.passed and report.tokens == 2 and "load" in report.seconds
        assert (await new)["model"] == "m@2"


async def test_an_alias_is_asked_for_again_after_a_swap(tmp_path: Path) -> None:
    alias = "m@1"
    gate = asyncio.Event()

    async def slow(request: dict[str, Any], version: str) -> str:
        await gate.wait()
        return version

    async with serving(tmp_path, Resident(ScriptedEngine(slow))) as pool:
        first = asyncio.create_task(pool.chat(lambda: alias, ASK))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        waiting = asyncio.create_task(pool.chat(lambda: alias, ASK))
        await asyncio.sleep(0)
        alias = "m@2"
        gate.set()
        await swap
        assert (text(await first), text(await waiting)) == ("m@1", "m@2")


async def test_requests_go_to_the_least_busy_replica_that_holds_the_version(tmp_path: Path) -> None:
    engines = [ScriptedEngine(says_version, delay=0.05) for _ in range(2)]
    async with serving(tmp_path, *map(Resident, engines)) as pool:
        await asyncio.gather(*(pool.chat("m@1", ASK) for _ in range(6)))
        assert [len(engine.requests) for engine in engines] == [3, 3]
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2), replicas=[1])
        answers = await asyncio.gather(*(pool.chat(v, ASK) for v in ("m@1", "m@2", "m@1")))
        assert [text(answer) for answer in answers] == ["m@1", "m@2", "m@1"]
        assert [status["version"] for status in pool.status()] == ["m@1", "m@2"]


async def test_a_version_nobody_holds_is_waited_for_then_unavailable(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version)
    async with serving(tmp_path, Resident(engine), wait_timeout=0.1) as pool:
        with pytest.raises(EngineUnavailable, match=r"no replica served m@7.*m@1 \(serving\)"):
            await pool.chat("m@7", ASK)
        with pytest.raises(EngineUnavailable):
            async with pool.serve("m@7"):
                pass
        async with pool.serve("m@1") as held:
            assert held is engine and pool.status()[0]["in_flight"] == 1


async def test_a_probe_that_does_not_match_puts_the_old_version_back(tmp_path: Path) -> None:
    host = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, host) as pool:
        wrong = [ProbePrompt(token_ids=[1, 2, 5], logprobs=[-1.0, -2.5])]
        with pytest.raises(SwapError, match=r"differ by 1\.5.*differ by 1\.5.*m@1 serves on"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", wrong)
        assert host.engine.loaded == ["m@1", "m@2", "m@2", "m@1"] and host.starts == 3
        assert text(await pool.chat("m@1", ASK)) == "m@1"
        assert pool.status()[0]["probe"]["version"] == "m@1"


async def test_a_mismatch_in_place_is_mended_by_a_fresh_start(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version)
    host = Mortal(engine)
    async with serving(tmp_path, host) as pool:
        engine.drift = 0.5  # stays until the process is started anew
        start = host.start

        async def clean(directory: Path, version: str) -> None:
            engine.drift = 0.0
            await start(directory, version)

        host.start = clean  # type: ignore[method-assign]
        report = await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert report.passed and "start" in report.seconds and host.starts == 2


async def test_a_failed_roll_leaves_every_replica_on_the_old_version(tmp_path: Path) -> None:
    good, bad = Mortal(ScriptedEngine(says_version)), Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, good, bad) as pool:
        checkpoints = checkpoint(tmp_path, 2)
        load = bad.engine.load

        async def refuse(directory: Path, version: str) -> dict[str, float]:
            if version == "m@2":
                raise SwapError("no room")
            return await load(directory, version)

        bad.engine.load = refuse  # type: ignore[method-assign]
        with pytest.raises(SwapError, match="no room"):
            await pool.swap(checkpoints, "m@2", probe(2))
        assert [s["version"] for s in pool.status()] == ["m@1", "m@1"]
        assert good.engine.loaded == ["m@1", "m@2", "m@1"]


async def test_an_unproven_version_of_a_job_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, Resident(ScriptedEngine(says_version))) as pool:
        with pytest.raises(SwapError, match="no golden probe"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", [])
        report = await pool.swap(checkpoint(tmp_path, 3, job=None), "m@3", [])
        assert (report.prompts, report.passed) == (0, True)


async def test_draining_has_a_limit_and_then_nothing_changes(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version, delay=0.3)
    async with serving(tmp_path, Resident(engine), drain_timeout=0.05) as pool:
        slow = asyncio.create_task(pool.chat("m@1", ASK))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        with pytest.raises(SwapError, match="1 requests were still running"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert text(await slow) == "m@1" and pool.ready


async def test_a_dead_replica_comes_back_and_its_requests_are_answered(tmp_path: Path) -> None:
    engine = ScriptedEngine([EngineUnavailable("gone"), "back"])
    host = Mortal(engine)
    async with serving(tmp_path, host) as pool:
        host.broken = True
        host.die()
        await until(lambda: pool.status()[0]["error"] is not None)
        asked = asyncio.create_task(pool.chat("m@1", ASK))
        host.broken = False
        assert text(await asked) == "back"
        status = pool.status()[0]
        assert status["restarts"] >= 2 and status["probe"]["passed"] and status["error"] is None


async def test_a_stream_is_retried_only_before_its_first_chunk(tmp_path: Path) -> None:
    engine = ScriptedEngine([EngineUnavailable("gone"), "back again"])
    async with serving(tmp_path, Resident(engine)) as pool:
        chunks = [chunk async for chunk in pool.stream("m@1", ASK)]
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert said == "back again" and {chunk["model"] for chunk in chunks} == {"m@1"}


async def test_an_engine_error_goes_through_as_it_is(tmp_path: Path) -> None:
    engine = ScriptedEngine([EngineError("too hot", status=400, param="temperature")])
    async with serving(tmp_path, Resident(engine)) as pool:
        with pytest.raises(EngineError, match="too hot") as caught:
            await pool.chat("m@1", ASK)
        assert (caught.value.status, caught.value.param) == (400, "temperature")
        assert pool.status()[0]["in_flight"] == 0


async def test_a_swap_outlives_its_caller(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version, delay=0.1)
    async with serving(tmp_path, Resident(engine)) as pool:
        busy = asyncio.create_task(pool.chat("m@1", ASK))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        swap.cancel()
        assert text(await busy) == "m@1"
        assert text(await pool.chat("m@2", ASK)) == "m@2"


async def test_status_is_json(tmp_path: Path) -> None:
    async with serving(tmp_path, Resident(ScriptedEngine(says_version))) as pool:
        status = json.loads(json.dumps(pool.status()))[0]
        assert set(status) == {
            *("version", "state", "in_flight", "restarts", "pid", "port", "probe", "error")
        }


class Stillborn(Mortal):
    """Dies in its first starts, as a process does that is killed while it comes up."""

    def __init__(self, engine: ScriptedEngine, deaths: int) -> None:
        super().__init__(engine)
        self.deaths = deaths

    async def start(self, checkpoint: Path, version: str) -> None:
        if self.starts < self.deaths:
            self.starts += 1
            raise EngineUnavailable("vLLM ended while starting")
        await super().start(checkpoint, version)


async def test_a_replica_killed_in_its_first_start_is_started_again(tmp_path: Path) -> None:
    host = Stillborn(ScriptedEngine(says_version), deaths=2)
    async with serving(tmp_path, host) as pool:
        assert pool.ready
        assert text(await pool.chat("m@1", ASK)) == "m@1"
    assert host.starts == 3


async def test_a_replica_that_never_comes_up_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="ended while starting"):
        async with serving(tmp_path, Stillborn(ScriptedEngine(says_version), deaths=9)):
            pass
