"""The gate with a spare replica: a candidate comes and goes, and the incumbent answers on."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cray_agents import RFT, Platform
from cray_agents.loop.version_gate import GatedEngine, VersionGate
from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.testing import ScriptedEngine
from cray_agents.training_jobs import JobStatus
from tests.support.killable_loop import echo, site_loop
from tests.support.scripted_platform import platform
from tests.support.timed_trainer import TimedTrainer

pytestmark = pytest.mark.slow

WHO = "who answers?"
MOST_LOOKS = {False: 3, True: 1000}  # at a job, by whether an engine is to receive its weights


class Watched(ScriptedEngine):
    """Asks, whenever it loads a version or answers by one, what the bare name is answered by.

    `seen`: what it did, by which version, and who answered meanwhile. `hold`: a version that it
    loads only when it is told to `go`.
    """

    def __init__(self) -> None:
        super().__init__(self.says)
        self.url = ""
        self.seen: list[tuple[str, str, str]] = []
        self.hold = ""
        self.holding, self.go = threading.Event(), threading.Event()

    async def load(self, checkpoint: Path, version: str, *, keep: bool = False) -> dict[str, float]:
        await self._look("load", version)
        if version == self.hold:
            self.holding.set()
            await asyncio.to_thread(self.go.wait)
        return await super().load(checkpoint, version, keep=keep)

    async def says(self, request: dict[str, Any], version: str) -> str:
        if request["messages"][-1]["content"] == WHO:
            return version
        await self._look("answer", version)
        return echo(request)

    async def _look(self, what: str, version: str) -> None:
        if self.url:
            asked = {"model": "m", "messages": [{"role": "user", "content": WHO}]}
            async with httpx.AsyncClient(timeout=120) as client:
                reply = await client.post(f"{self.url}/v1/chat/completions", json=asked)
            said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
            self.seen.append((what, version, said))


class Offering(TimedTrainer):
    """Offers a job's weights until an engine has received them, or for a while; publishes then."""

    def __init__(self, home: Home, engines: Sequence[ScriptedEngine], early: list[bool]) -> None:
        super().__init__(home, 0.0)
        self.engines, self.early = engines, early
        self.asked: dict[str, int] = {}

    def _moved_on(self, job: JobStatus) -> JobStatus:
        self.asked[job.id] = self.asked.get(job.id, 0) + 1
        early = self.early[[*self.asked].index(job.id)]
        gone_on = self.asked[job.id] > MOST_LOOKS[early]
        if gone_on or any(job.id in engine.received for engine in self.engines):
            return super()._moved_on(job)
        for engine in self.engines:
            engine.offered.add(job.id)
        running = job.state in ("queued", "running")
        return job.model_copy(update={"state": "running", "offered": True}) if running else job


@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_lets_a_replica_receive_what_a_job_still_writes(tmp_path: Path, count: int) -> None:
    """The only replica stays where the incumbent may be asked before the candidate."""
    engines = [Watched() for _ in range(count)]
    early = [True, count == 2]  # the second one is evaluated
    trainer = Offering(Home(tmp_path), engines, early)
    with platform(tmp_path, engines[0], others=engines[1:], trainer=trainer) as where:
        steps = RFT(parent="latest", evaluate_every=2)
        done = list(site_loop(method=[steps], platform=where).run_sync(2))
        assert ["early" in g.seconds for g in done[1:]] == early
        received = [job for engine in engines for job in engine.received]
        assert received == [g.job for g, came in zip(done[1:], early, strict=True) if came]
        for engine in engines:
            assert all(one != two for one, two in itertools.pairwise(engine.loaded)), "in vain"
        promoted = next(g.version for g in reversed(done) if g.promoted)
        assert held(asyncio.run(replicas(where))) == [promoted] * count


def held(replicas: list[dict[str, Any]]) -> list[str]:
    return sorted(replica["version"] for replica in replicas)


def test_a_loop_stages_evaluates_promotes_and_rejects_beside_the_incumbent(tmp_path: Path) -> None:
    engines = [Watched(), Watched()]
    with platform(tmp_path, engines[0], others=engines[1:]) as where:
        for engine in engines:
            engine.url = where.url
        done = list(site_loop(platform=where).run_sync(2))
        assert [(g.version, g.promoted) for g in done[1:]] == [("m@2", True), ("m@3", False)]
        seen = [each for engine in engines for each in engine.seen]
        loads = sorted(each for each in seen if each[0] == "load")
        assert loads == [
            ("load", "m@2", "m@1"),  # staged
            ("load", "m@2", "m@2"),  # promoted: the other replica
            ("load", "m@2", "m@2"),  # where the rejected one was
            ("load", "m@3", "m@2"),  # staged
        ]
        by = {version: {who for what, v, who in seen if (what, v) == ("answer", version)}
              for version in ("m@1", "m@2", "m@3")}  # fmt: skip
        assert by == {"m@1": {"m@1"}, "m@2": {"m@1", "m@2"}, "m@3": {"m@2"}}
        assert held(asyncio.run(replicas(where))) == ["m@2", "m@2"]


async def replicas(where: Platform) -> list[dict[str, Any]]:
    try:
        return await where.pool()
    finally:
        await where.close()


def test_a_candidate_waits_for_a_canary_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cray_agents.loop.version_gate.BUSY_SECONDS", 0.05)
    with platform(tmp_path, Watched(), others=[Watched()]) as where:
        list(site_loop(platform=where).run_sync(2))

        async def work() -> None:
            told = asyncio.Queue[str]()
            gate, promoted = VersionGate(where, told.put_nowait), await where.promoted("m")
            assert promoted is not None
            other, new = [v for v in await where.versions("m") if not v["promoted"]]
            await where.canary(ModelVersion.model_validate(other))
            candidate = ModelVersion.model_validate(new)
            staging = asyncio.create_task(gate.stage(candidate))
            assert "end the canary first" in await asyncio.wait_for(told.get(), 120)
            await where.stop_canary("m")
            assert (await asyncio.wait_for(staging, 120)).passed
            assert held(await where.pool()) == sorted([promoted.id, candidate.id])
            await where.close()

        asyncio.run(work())


def test_calls_of_the_incumbent_pass_while_a_candidate_is_loaded(tmp_path: Path) -> None:
    engines = [Watched(), Watched()]
    with platform(tmp_path, engines[0], others=engines[1:]) as where:
        list(site_loop(platform=where).run_sync(1))

        async def work() -> None:
            gate = VersionGate(where)
            await gate.look()
            old, new = [await where.version(f"m@{number}") for number in (1, 2)]
            gate.staying = new.id

            async def ask(version: ModelVersion) -> str:
                request = {"model": version.id, "messages": [{"role": "user", "content": WHO}]}
                answer = await GatedEngine(where.engine(), gate, version).chat(request)
                return str(answer["choices"][0]["message"]["content"])

            async def through(act: Any) -> None:
                """The change waits at a replica's load, and the version that stays is answered."""
                for engine in engines:
                    engine.hold = old.id
                    engine.holding.clear()
                    engine.go.clear()
                changing = asyncio.create_task(act)
                waits = [asyncio.to_thread(engine.holding.wait, 120) for engine in engines]
                await asyncio.wait([asyncio.ensure_future(w) for w in waits],
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                early = asyncio.create_task(ask(old))
                assert [await ask(new) for _ in range(5)] == [new.id] * 5
                assert not changing.done() and not early.done()
                for engine in engines:
                    engine.go.set()
                    engine.holding.set()
                await changing
                assert await early == old.id

            await through(gate.stage(old))
            async with gate.only(old):  # each is answered by its own replica
                said = await asyncio.gather(*map(ask, [old, new] * 10))
                assert said == [old.id, new.id] * 10
            assert held(await where.pool()) == [old.id, new.id]
            await gate.promote(old, who="test", reason="", numbers={})
            assert held(await where.pool()) == [old.id] * 2 and await ask(old) == old.id
            await where.close()

        asyncio.run(work())
