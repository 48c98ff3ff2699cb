"""Weights that a replica receives before their files are whole: nobody is served by them."""

from pathlib import Path

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import PoolBusy, SwapError
from cray_agents.runtime.pool.pool import Pool
from tests.support.scripted_pool import Mortal, ask, checkpoint, probe, says_version, serving, until

JOB = "job-1"


def host() -> Mortal:
    engine = ScriptedEngine(says_version)
    engine.offered = {JOB}
    return Mortal(engine)


def states(pool: Pool) -> list[str]:
    return [each["state"] for each in pool.status()]


async def stage(pool: Pool, tmp_path: Path) -> None:
    await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))


@pytest.mark.parametrize("replicas", [1, 2])
async def test_what_is_staged_next_is_proven_and_served_there(
    tmp_path: Path, replicas: int
) -> None:
    hosts = [host() for _ in range(replicas)]
    async with serving(tmp_path, *hosts) as pool:
        assert await pool.receive(JOB, displace=True)
        assert states(pool) == ["unproven", "serving"][:replicas]
        assert pool.status()[0]["versions"] == [] and not pool.swapping
        assert pool.serves("m@1") == (replicas == 2) and pool.serving == replicas - 1
        await stage(pool, tmp_path)
        assert states(pool) == ["serving"] * replicas
        assert await ask(pool, "m@2") == "m@2"
        assert [one.engine.received for one in hosts] == [[JOB], []][:replicas]
        assert [one.engine.loaded for one in hosts] == [["m@1", "m@2"], ["m@1"]][:replicas]
        assert [one.starts for one in hosts] == [1] * replicas


async def test_what_is_staged_takes_no_other_replica(tmp_path: Path) -> None:
    hosts = [host() for _ in range(3)]
    async with serving(tmp_path, *hosts) as pool:
        await stage(pool, tmp_path)
        assert await pool.receive(JOB)  # on one of two with m@1, and m@2 may be displaced
        await pool.stage(checkpoint(tmp_path, 3), "m@3", probe(3))
        (one,) = [each.engine for each in hosts if each.engine.received]
        assert one.loaded == ["m@1", "m@3"] and states(pool) == ["serving"] * 3


async def test_the_last_replica_of_a_version_is_taken_by_displacing_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, host()) as pool:
        with pytest.raises(PoolBusy, match="no replica can be spared"):
            await pool.receive(JOB)
    async with serving(tmp_path, host(), host()) as pool:
        await stage(pool, tmp_path)
        with pytest.raises(PoolBusy, match="no replica can be spared"):
            await pool.receive(JOB)  # each serves a version of its own
        with pytest.raises(PoolBusy, match="no replica can be spared"):
            await pool.receive(JOB, protected=["m@2"], displace=True)
        assert await pool.receive(JOB, displace=True)
        assert sorted(states(pool)) == ["serving", "unproven"] and pool.serves("m@1")
        with pytest.raises(PoolBusy, match="no replica can be spared"):
            await pool.receive(JOB, displace=True)


async def test_a_request_that_needs_the_former_version_gets_it(tmp_path: Path) -> None:
    async with serving(tmp_path, one := host()) as pool:
        assert await pool.receive(JOB, displace=True)
        assert await ask(pool, "m@1") == "m@1" and states(pool) == ["serving"]
        assert one.engine.loaded == ["m@1", "m@1"] and one.starts == 1
        # and the version is staged all the same
        await stage(pool, tmp_path)
        assert await ask(pool, "m@2") == "m@2"


async def test_a_version_that_is_served_elsewhere_recalls_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, host(), host()) as pool:
        assert await pool.receive(JOB)
        assert await ask(pool, "m@1") == "m@1"
        assert states(pool) == ["unproven", "serving"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_job_that_ends_without_publishing_gives_the_replica_back(
    tmp_path: Path, fails: bool
) -> None:
    async with serving(tmp_path, one := host()) as pool:
        assert await pool.receive(JOB, displace=True)
        one.engine.drift = 5.0 * fails  # of a reload in place; a fresh start mends it
        one.engine.offered.clear()
        if fails:
            await until(lambda: one.starts > 1)
            one.engine.drift = 0.0
        assert await ask(pool, "m@1") == "m@1"
        assert states(pool) == ["serving"]


async def test_a_replica_that_dies_meanwhile_starts_with_the_former_version(tmp_path: Path) -> None:
    async with serving(tmp_path, one := host()) as pool:
        assert await pool.receive(JOB, displace=True)
        one.die()
        await until(lambda: states(pool) == ["serving"])
        assert one.starts == 2 and await ask(pool, "m@1") == "m@1"
        await stage(pool, tmp_path)
        assert await ask(pool, "m@2") == "m@2"


async def test_another_version_takes_the_place_of_received_weights(tmp_path: Path) -> None:
    async with serving(tmp_path, host(), host()) as pool:
        assert await pool.receive(JOB)
        await pool.swap(checkpoint(tmp_path, 3), "m@3", probe(3))
        assert states(pool) == ["serving", "serving"] and await ask(pool, "m@3") == "m@3"


async def test_weights_that_are_not_proven_are_never_served(tmp_path: Path) -> None:
    async with serving(tmp_path, host()) as pool:
        assert await pool.receive(JOB, displace=True)
        with pytest.raises(SwapError, match=r"m@2 failed its logprob check in 3 tries.*m@1"):
            await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(3))
        assert await ask(pool, "m@1") == "m@1" and not pool.serves("m@2")
