"""Warm replicas: one that is not needed sleeps on its place, and comes back woken and proven."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.slurm import node_names
from tests.runtime.test_pool_sleep import Sleeper
from tests.support import slurm_pool
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_pool import ask, checkpoint, probe, serving, until
from tests.support.slurm_pool import Site


def of(pool: Pool, field: str) -> list[Any]:
    return [each[field] for each in pool.status()]


async def sleeping(pool: Pool, hosts: list[Sleeper]) -> Sleeper:
    """Let a replica sleep; return its host."""
    assert pool.give_back(sleep=True)
    await until(lambda: any(of(pool, "asleep")))
    assert of(pool, "state").count("away") == 1 and await ask(pool, "m@1") == "m@1"
    return hosts[of(pool, "state").index("away")]


def both_serve(pool: Pool) -> Callable[[], bool]:
    return lambda: of(pool, "state") == ["serving", "serving"]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_replica_that_slept_is_woken_and_proven(tmp_path: Path, level: int) -> None:
    hosts = [Sleeper(level), Sleeper(level)]
    async with serving(tmp_path, *hosts) as pool:
        host = await sleeping(pool, hosts)
        assert sorted(of(pool, "asleep")) == [0, level] and host.engine.asleep == level
        before = [each["probe"] for each in pool.status()]
        assert pool.call_back()
        await until(both_serve(pool))
        assert (host.starts, host.stops, host.engine.asleep) == (1, 0, 0)
        assert host.engine.loaded == ["m@1"] * level  # at level 2 the weights were gone
        assert [each["probe"] for each in pool.status()] != before  # a proof of its own
        started = [set(each["seconds"]) for each in of(pool, "last_start")]
        assert {"wake", "first_token", *["load"] * (level == 2)} in started
        assert {"first_token"} in started  # no more is seen of an engine in this process
        assert of(pool, "restarts") == of(pool, "asleep") == [0, 0]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_version_promoted_meanwhile_is_loaded(tmp_path: Path, level: int) -> None:
    hosts = [Sleeper(level), Sleeper(level)]
    async with serving(tmp_path, *hosts) as pool:
        host = await sleeping(pool, hosts)
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert host.engine.asleep == level and host.engine.loaded == ["m@1"]
        assert pool.call_back()
        await until(both_serve(pool))
        assert of(pool, "version") == ["m@2", "m@2"] and not pool.serves("m@1")
        assert (host.starts, host.engine.loaded) == (1, ["m@1", "m@2"])


async def test_one_that_dies_asleep_stays_away_and_is_started_when_needed(tmp_path: Path) -> None:
    hosts = [Sleeper(), Sleeper()]
    async with serving(tmp_path, *hosts) as pool:
        host = await sleeping(pool, hosts)
        host.die()
        await until(lambda: of(pool, "asleep") == [0, 0])
        assert of(pool, "state").count("away") == 1 and host.stops == 1
        assert pool.call_back()
        await until(both_serve(pool))
        assert host.starts == 2 and of(pool, "restarts") == [0, 0]


async def test_sleeping_ones_come_back_first(tmp_path: Path) -> None:
    hosts: list[InProcessEngine] = [Sleeper() for _ in range(3)]
    async with serving(tmp_path, *hosts) as pool:
        assert pool.give_back()
        await until(lambda: of(pool, "state").count("away") == 1)
        assert pool.give_back(sleep=True)
        await until(lambda: 1 in of(pool, "asleep"))
        warm = of(pool, "asleep").index(1)
        assert pool.call_back() and of(pool, "state")[warm] != "away"
        await until(lambda: of(pool, "state").count("serving") == 2)


def test_names_of_nodes_are_spelled_out() -> None:
    assert node_names("n[1-2,05],m,gpu-a[09-11]") == [
        "n1", "n2", "n05", "m", "gpu-a09", "gpu-a10", "gpu-a11",
    ]  # fmt: skip
    assert node_names("") == []


@pytest.mark.slurm
async def test_a_slurm_replica_sleeps_in_its_job(tmp_path: Path) -> None:
    """It wakes there; its engine is killed asleep; a platform is killed while another one wakes."""
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=1, gpus=[])
    cluster.start()
    site = Site(cluster, tmp_path)
    try:
        pool = site.pool(site.hosts(2), wait_timeout=100.0)
        await pool.start(checkpoint(tmp_path, 1), "m@1", probe(1))
        await until(both_serve(pool))
        jobs = site.jobs()
        for start in of(pool, "last_start"):  # the scripted server's marks lack its beginning
            assert start["seconds"].keys() == {"place", "engine", "port", "first_token"}
            assert start["seconds"]["engine"] == 2.5

        async def sleep() -> int:
            assert pool.give_back(sleep=True)
            await until(lambda: 1 in of(pool, "asleep"))  # the node's memory holds the weights
            return of(pool, "asleep").index(1)

        number = await sleep()
        await until(lambda: site.lease(number).asleep == 1 and not site.lease(number).version)
        assert site.jobs() == jobs and await slurm_pool.ask(pool, lambda: "m@1") == "m@1: hello"
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        pids = of(pool, "pid")
        assert pool.call_back()
        await until(both_serve(pool))
        assert of(pool, "version") == ["m@2", "m@2"] and site.jobs() == jobs
        assert of(pool, "pid") == pids  # the same engine
        await until(lambda: site.lease(number).asleep == 0 and site.lease(number).version == "m@2")

        number = await sleep()
        os.kill(of(pool, "pid")[number], signal.SIGKILL)
        await until(lambda: of(pool, "asleep") == [0, 0])
        await until(lambda: len(site.jobs()) == 1)  # it has given its place back
        assert of(pool, "state").count("away") == 1
        await until(pool.call_back)
        await until(both_serve(pool))

        number = await sleep()
        assert pool.call_back()
        await site.abandon(pool)  # while it wakes
        jobs = site.jobs()
        pool = site.pool(site.hosts(2), wait_timeout=100.0)
        await pool.start(checkpoint(tmp_path, 2), "m@2", probe(2))
        await until(both_serve(pool))
        assert of(pool, "version") == ["m@2", "m@2"] and site.jobs() == jobs
    finally:
        await site.close()
        cluster.close()
