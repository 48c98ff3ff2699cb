"""`--replicas slurm:MIN-MAX`: replicas that come and go with the load, down to none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import Config
from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import BadInput, PoolBusy
from cray_agents.runtime.gateway.model_calls.admission import Admission, GatewayShares
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scaling.decision import ScalingRules, ServingRule
from cray_agents.server.platform_process import ReplicaCount
from cray_agents.server.replica_count import keep_replica_count, replica_rule, scaling_rules
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Paced, echo, served
from tests.support.scripted_pool import Mortal, ask, checkpoint, probe, says_version, until

QUICK = ServingRule("replicas", slots=2, least=0, most=3, calm=0.3, empty=0.5)


def states(pool: Pool) -> list[str]:
    return [replica["state"] for replica in pool.status()]


@asynccontextmanager
async def scaled(folder: Path, replicas: int, started: int) -> AsyncIterator[tuple[Pool, Any]]:
    hosts = [Mortal(ScriptedEngine(says_version)) for _ in range(replicas)]
    pool = Pool(hosts, wait_timeout=600.0)
    await pool.start(checkpoint(folder, 1), "m@1", probe(1), started)
    try:
        yield pool, hosts
    finally:
        await pool.stop()


async def test_a_replica_leaves_after_its_last_request_and_comes_back_proven(
    tmp_path: Path,
) -> None:
    async with scaled(tmp_path, 2, 1) as (pool, hosts):
        assert states(pool) == ["serving", "away"] and hosts[1].starts == 0
        assert pool.call_back() and not pool.call_back()
        await until(lambda: states(pool) == ["serving", "serving"])
        with pool._slots[0].requests.track("m@1"), pool._slots[1].requests.track("m@1"):
            assert pool.give_back()
            assert sorted(states(pool)) == ["away", "serving"]
            for _ in range(9):
                await asyncio.sleep(0)
            assert not pool.call_back()  # it has not left yet
        assert await ask(pool, "m@1") == "m@1"
        await until(lambda: not any(slot._gives_back for slot in pool._slots))
        assert pool.give_back() and states(pool) == ["away", "away"] and pool.ready
        await until(lambda: not any(slot._gives_back for slot in pool._slots))
        waiting = asyncio.create_task(ask(pool, "m@1"))
        assert pool.call_back() and await waiting == "m@1"
        assert [one["restarts"] for one in pool.status()] == [0, 0]


async def test_replicas_that_are_away_start_with_the_version_of_then(tmp_path: Path) -> None:
    async with scaled(tmp_path, 2, 1) as (pool, _):
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert states(pool) == ["serving", "away"] and pool.brings_back("m@2")
        pool.call_back()
        await until(lambda: states(pool) == ["serving", "serving"])
        assert {one["version"] for one in pool.status()} == {"m@2"}


async def test_a_change_of_versions_calls_back_what_it_needs(tmp_path: Path) -> None:
    """A candidate gets a replica beside the incumbent's, and no version loses its last one."""
    async with scaled(tmp_path, 2, 1) as (pool, _):
        assert (await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))).passed
        assert await ask(pool, "m@1") == "m@1" and await ask(pool, "m@2") == "m@2"
        assert not pool.give_back()
    async with scaled(tmp_path, 1, 1) as (pool, _):
        assert pool.give_back()
        await until(lambda: not pool._slots[0]._gives_back)
        async with asyncio.timeout(120):  # less than a change waits for a second replica
            await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert await ask(pool, "m@2") == "m@2"


async def test_what_dies_while_it_is_away_or_leaves_or_comes_is_found_again(tmp_path: Path) -> None:
    async with scaled(tmp_path, 1, 1) as (pool, (host,)):
        with pool._slots[0].requests.track("m@1"):
            pool.give_back()
            host.die()
            await until(lambda: states(pool) == ["serving"])
        pool.give_back()
        await until(lambda: not pool._slots[0]._gives_back)
        host.broken = True
        pool.call_back()
        await until(lambda: states(pool) == ["down"])
        host.broken = False
        await until(lambda: states(pool) == ["serving"])
        assert pool.status()[0]["restarts"] >= 1
        with pytest.raises(PoolBusy):
            async with asyncio.timeout(120):
                await pool.receive("job-1")


@pytest.mark.slow
async def test_under_load_replicas_come_and_without_they_all_go(tmp_path: Path) -> None:
    """Through a real gateway: no request is refused, also the first one when none is left."""
    paced = Paced(echo, pause=0.02)
    others = [InProcessEngine(paced) for _ in range(2)]
    pools: list[Pool] = []

    def serves(model: str) -> bool:
        return bool(pools) and pools[0].serves("calc@1")

    admission = Admission(lambda: 2 * pools[0].serving if pools else 2, serves=serves, outage=60)
    async with served(tmp_path, paced, others=others, admission=admission) as gateway:
        pools.append(gateway.pool)
        counting = asyncio.create_task(
            keep_replica_count(
                gateway.pool, admission, GatewayShares(), ScalingRules(QUICK), every=0.02
            )
        )
        await until(lambda: states(gateway.pool) == ["away"] * 3)
        assert (await gateway.call("GET", "/health/ready"))[0] == 200
        assert (await gateway.ask("first")).text == "first"
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                assert (await gateway.ask(f"hello {number}")).text == f"hello {number}"

        clients = [asyncio.create_task(client(number)) for number in range(12)]
        await until(lambda: states(gateway.pool) == ["serving"] * 3)
        stop.set()
        await asyncio.gather(*clients)
        await until(lambda: states(gateway.pool) == ["away"] * 3)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


@pytest.mark.slow
async def test_with_a_warm_pool_one_sleeps_and_is_woken_before_others_start(tmp_path: Path) -> None:
    paced, pools = Paced(echo, pause=0.02), list[Pool]()
    others = [InProcessEngine(paced) for _ in range(2)]
    admission = Admission(
        lambda: 2 * pools[0].serving if pools else 2,
        serves=lambda model: bool(pools) and pools[0].serves("calc@1"), outage=60,
    )  # fmt: skip
    rules = ScalingRules(replace(QUICK, warm=1))
    async with served(tmp_path, paced, others=others, admission=admission) as gateway:
        pool = gateway.pool
        pools.append(pool)
        counting = asyncio.create_task(
            keep_replica_count(pool, admission, GatewayShares(), rules, every=0.02)
        )

        def asleep() -> list[int]:
            return [one["asleep"] for one in pool.status()]

        await until(lambda: states(pool) == ["away"] * 3 and sum(asleep()) == 1)
        assert (await gateway.call("GET", "/health/ready"))[0] == 200
        warm = asleep().index(1)
        stays = [slot.engine_host for slot in pool._slots]
        starts = list[int]()
        for number, host in enumerate(stays):
            started = host.start

            async def start(*arguments: Any, _number: int = number, _start: Any = started) -> None:
                starts.append(_number)
                await _start(*arguments)

            host.start = start  # type: ignore[method-assign, assignment]
        assert (await gateway.ask("again")).text == "again"
        assert warm not in starts
        await until(lambda: states(pool) == ["away"] * 3 and sum(asleep()) == 1)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


def test_the_count_is_a_span() -> None:
    assert ReplicaCount.parse("slurm:0-8") == ReplicaCount(jobs=8, least=0)
    assert str(ReplicaCount.parse("slurm:2-8")) == "slurm:2-8"
    for wrong in ("slurm:8-8", "slurm:3-2", "slurm:-2", "slurm:1-", "2-4"):
        with pytest.raises(BadInput, match="slurm:0-8 for up to eight"):
            ReplicaCount.parse(wrong)
    assert replica_rule(Config(), ReplicaCount(jobs=2)) is None
    rule = replica_rule(Config(max_num_seqs=9), ReplicaCount(jobs=4, least=1))
    assert rule is not None and (rule.slots, rule.least, rule.most, rule.calm) == (9, 1, 4, 600)
    warm = replica_rule(Config(replica_warm=2, max_num_seqs=64), ReplicaCount(jobs=4, least=1))
    assert rule.warm == 0 and warm is not None and warm.warm == 2
    given = Config(preempt_after_minutes=2, preempt_keep_nodes=3, preempt_quiet_hours=["22-6"])
    rules = scaling_rules(given, rule)
    assert (rules.least_run, rules.training_nodes, rules.preempts) == (120, 3, True)
    assert rules.quiet_hours == ((22, 6),) and rules.is_quiet(23) and not rules.is_quiet(7)
    with pytest.raises(ValueError, match="write it as 22-6"):
        Config(preempt_quiet_hours=["late"])
    with pytest.raises(BadInput, match="replica_empty_minutes = 1 is less than"):
        replica_rule(Config(replica_empty_minutes=1), ReplicaCount(jobs=4, least=1))
