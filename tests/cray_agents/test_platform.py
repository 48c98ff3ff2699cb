"""Platform, the HTTP client, at a real gateway over a scripted engine and trainer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cray_agents import Agent, Platform, Run
from cray_agents.agent import StopReason
from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineTimeout, EngineUnavailable
from cray_agents.platform import transport
from cray_agents.training import Hyperparameters
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, checkpoint, echo, served, until
from tests.support.scripted_trainer import ScriptedTrainer


def tagged(name: str, *tags: str) -> Run:
    return Run(id=name, agent="a", model="calc", input="x", stop_reason=StopReason.completed,
               tags=list(tags))  # fmt: skip


async def test_runs_with_all_of_several_tags(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        platform = Platform(gateway.url)
        try:
            await platform.record([tagged("r1", "a", "b&c"), tagged("r2", "a"), tagged("r3")])
            asked = {"tag": ["a", "b&c"], "loop": None}
            assert [run.id async for run in platform.runs(page=1, **asked)] == ["r1"]
            assert [row["id"] async for row in platform.summaries(**asked)] == ["r1"]
            assert {run.id async for run in platform.runs(page=1, tag="a")} == {"r1", "r2"}
        finally:
            await platform.close()


async def test_a_run_repeated_under_its_id_is_recorded_anew(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: "well")
    async with served(tmp_path, engine) as gateway:
        agent = Agent(name="a", model="calc", base_url=f"{gateway.url}/v1")
        engine.delay = 20
        task = asyncio.create_task(agent.run("q", run_id="job-17"))
        await until(lambda: engine.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gateway.store.run("job-17").stop_reason is StopReason.cancelled
        engine.delay = 0
        again = await agent.run("q", run_id="job-17")
        stored = gateway.store.run("job-17")
        assert (stored.stop_reason, stored.output) == (StopReason.completed, "well")
        assert [turn.call_id for turn in stored.trajectory.turns] == [again.calls[0].id]


async def test_a_job_is_submitted_as_it_was_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.services.home.dataset("ds-1").mkdir(parents=True)
        platform = Platform(gateway.url)
        try:
            await platform.submit_job(
                dataset="ds-1",
                parent="calc@1",
                hyperparameters=Hyperparameters(steps=1),
                evaluate_every=5,
                logprob_limit=0.25,
                oversubscribe=True,
            )
        finally:
            await platform.close()
        trainer = gateway.services.trainer
        assert isinstance(trainer, ScriptedTrainer)
        spec = trainer.submitted[-1]
        assert (spec.evaluate_every, spec.logprob_limit, spec.oversubscribe) == (5, 0.25, True)


@asynccontextmanager
async def behind(gateway: Gateway, *, lost: int = 0, pause: float = 0.0) -> AsyncIterator[Platform]:
    """A client of the gateway whose first `lost` answers never come, and others `pause` late."""
    left = lost

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        to = urlsplit(gateway.url)
        there, back = await asyncio.open_connection(to.hostname, to.port)
        asking = asyncio.create_task(copied(reader, back))
        while piece := await there.read(1 << 16):
            await asyncio.sleep(pause)
            if left:
                left -= 1
                break
            writer.write(piece)
        asking.cancel()
        back.close()
        writer.close()

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.write_eof()

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
        platform = Platform(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield platform
        await platform.close()


async def with_versions(gateway: Gateway, folder: Path, count: int) -> None:
    """calc@1 to calc@count, each promoted after the other."""
    for number in range(2, count + 1):
        made = {"checkpoint": str(checkpoint(folder / f"v{number}", bytes([number])))}
        await gateway.call("POST", "/v1/models/calc/versions", json=made)
        await gateway.call("POST", "/v1/models/calc/promote", json={"version": number})


async def test_a_rollback_whose_answer_is_lost_is_not_asked_twice(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await with_versions(gateway, tmp_path, 3)
        async with behind(gateway, lost=1) as platform:
            with pytest.raises(EngineUnavailable, match="models show calc` before you ask"):
                await platform.rollback("calc", who="me", reason="worse")
            kinds = [event["kind"] for event in await platform.history("calc")]
            assert kinds == ["promoted", "promoted", "promoted", "rolled_back"]
            promoted = await platform.promoted("calc")
            assert promoted is not None and promoted.number == 2
        async with behind(gateway, lost=1) as platform:  # what may be done twice is asked again
            again = await platform.promote(promoted, who="me", reason="sure")
            assert again["version"] == 2


async def test_a_canary_whose_answer_is_lost_is_not_asked_twice(tmp_path: Path) -> None:
    other = InProcessEngine(ScriptedEngine(echo))
    async with served(tmp_path, others=[other]) as gateway:
        await with_versions(gateway, tmp_path, 2)
        first = await Platform(gateway.url).version("calc@1")
        async with behind(gateway, lost=1) as platform:
            with pytest.raises(EngineUnavailable, match="models canary calc` before you ask"):
                await platform.canary(first, share=0.5)
            assert (await platform.canary_status("calc"))["version"] == 1


@pytest.mark.slow
async def test_a_change_of_weights_may_take_any_time(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await with_versions(gateway, tmp_path, 2)
        first = await Platform(gateway.url).version("calc@1")
        async with behind(gateway, pause=0.5) as platform:
            engine = platform.engine()
            engine._timeout, engine._retries = 0.2, 0
            await platform.stage(first, force=True)
            await platform.promote(first, who="me", reason="")
            await platform.rollback("calc", 2, who="me", reason="")
            with pytest.raises(EngineTimeout, match="did not answer in time"):
                await platform.versions("calc")


class SlowToLoad(ScriptedEngine):
    """Takes a second over each change of weights."""

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        await asyncio.sleep(1)
        return await super().load(checkpoint, version, keep=keep)


@pytest.mark.slow
async def test_a_platform_that_is_busy_changing_weights_is_not_taken_for_a_silent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ALIVE_SECONDS", 0.2)
    async with served(tmp_path, SlowToLoad(echo)) as gateway:
        await with_versions(gateway, tmp_path, 2)
        platform = Platform(gateway.url)
        await platform.stage(await platform.version("calc@1"), force=True)
        await platform.close()


@pytest.mark.slow
async def test_a_platform_whose_host_is_gone_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as gateway:
        await with_versions(gateway, tmp_path, 2)
        first = await Platform(gateway.url).version("calc@1")
        monkeypatch.setattr(transport, "ALIVE_SECONDS", 0.2)
        async with behind(gateway, pause=3) as platform:
            platform.engine()._retries = 0
            with pytest.raises(EngineUnavailable, match=r"is silent now$"):
                await platform.stage(first, force=True)
            with pytest.raises(EngineUnavailable, match="silent now: look at `cray-agents models"):
                await platform.rollback("calc", who="me", reason="")


async def test_nobody_there_is_told_as_that() -> None:
    platform = Platform("http://127.0.0.1:9")
    platform.engine()._retries = 0
    with pytest.raises(EngineUnavailable, match=r"no platform answers at .* start one"):
        await platform.rollback("calc", who="me", reason="")
    await platform.close()
