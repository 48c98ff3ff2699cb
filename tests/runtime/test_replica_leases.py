"""Replica leases: a promoted version keeps its last replica, or gets it back from a holder."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import AccessDenied, Displaces, PoolBusy
from cray_agents.platform.client import Platform
from cray_agents.runtime.gateway import replica_lease
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.model_calls.admission import Admission
from tests.runtime.test_version_switcher import MODELS, change, register, says_version, versions_on
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, served, until

STAGE = f"{MODELS}/versions/2/stage"
FORCED = {"force": True, "holder": "me", "seconds": 600}


async def ready(gateway: Gateway) -> tuple[int, Any]:
    return await gateway.call("GET", "/health/ready")


async def lease(gateway: Gateway) -> Any:
    return (await gateway.call("GET", "/v1/pool"))[1]["lease"]


def engine() -> ScriptedEngine:
    return ScriptedEngine(says_version)


async def test_staging_does_not_take_what_is_promoted_off_its_last_replica(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        status, refused = await gateway.call("POST", STAGE, json={})
        assert (status, refused["error"]["code"]) == (409, "would_displace")
        assert (
            "calc@1" in refused["error"]["message"] and "--replicas" in refused["error"]["message"]
        )
        assert versions_on(gateway) == ["calc@1"] and (await ready(gateway))[0] == 200
        assert (await gateway.ask("hi")).text == "calc@1" and await lease(gateway) is None


async def test_force_needs_the_role_admin(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        keys = Keys(gateway.services.home)
        secrets = {role: keys.create(role.name, role)[1] for role in (Role.train, Role.admin)}
        while (await gateway.call("GET", "/v1/models"))[0] != 401:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # until the first key is known
        trainer = Platform(gateway.url, api_key=secrets[Role.train])
        version = gateway.services.registry.resolve("calc@2")
        with pytest.raises(AccessDenied, match="needs 'admin'"):
            await trainer.stage(version, force=True)
        with pytest.raises(Displaces, match="off the last replica"):
            await trainer.stage(version)
        admin = Platform(gateway.url, api_key=secrets[Role.admin])
        assert (await admin.stage(version, force=True)).passed
        assert versions_on(gateway) == ["calc@2"]
        await trainer.close()
        await admin.close()


async def test_what_was_displaced_comes_back_when_its_holder_dies(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        await change(gateway, "versions/2/stage", **FORCED)
        current = await lease(gateway)
        assert (current["holder"], current["version"], current["displaced"]) == (
            "me",
            "calc@2",
            ["calc@1"],
        )
        status, why = await ready(gateway)
        assert status == 503 and "calc@1: 'me' has calc@2" in why["error"]["message"]
        waiting = asyncio.create_task(gateway.ask("hi"))
        renewed = {"holder": "me", "seconds": 0.2}  # the last renewal
        assert (await gateway.call("POST", "/v1/pool/lease", json=renewed))[0] == 200
        assert (await waiting).text == "calc@1" and (await ready(gateway))[0] == 200
        assert await lease(gateway) is None
        assert (await gateway.call("POST", "/v1/pool/lease", json=renewed))[0] == 404


async def test_a_replica_receives_weights_for_a_holder_until_a_request_needs_it(
    tmp_path: Path,
) -> None:
    def serves(model: str) -> bool:  # as compose.py says it
        return gateway.pool.serves(gateway.services.registry.resolve(model).id)

    admission = Admission(8, serves=serves)
    async with served(tmp_path, made := engine(), admission=admission) as gateway:
        made.offered = {"job-1", "job-2"}
        receive = "/v1/jobs/job-1/receive"
        assert (await gateway.call("POST", receive))[0] == 404
        for job in ("job-1", "job-2", "job-3"):
            gateway.services.home.job(job).mkdir(parents=True)
        status, busy = await gateway.call("POST", receive)
        assert (status, busy["error"]["code"]) == (409, "pool_busy")
        assert versions_on(gateway) == ["calc@1"] and made.received == []
        assert await gateway.call("POST", receive, json=FORCED) == (200, {"received": True})
        assert gateway.pool.status()[0]["state"] == "unproven" and not gateway.pool.ready
        current = await lease(gateway)
        assert (current["version"], current["displaced"]) == ("job-1", ["calc@1"])
        assert (await gateway.ask("hi")).text == "calc@1"  # it waits at the door, and is let in
        # a job that offers nothing, and one that has published: its version is staged
        assert await gateway.call("POST", "/v1/jobs/job-3/receive", json=FORCED) == (
            *(200, {"received": False}),
        )
        published = gateway.services.home.checkpoint("job-2")
        published.mkdir(parents=True)
        (published / "manifest.json").write_text("{}")
        assert await gateway.call("POST", "/v1/jobs/job-2/receive", json=FORCED) == (
            *(200, {"received": False}),
        )
        assert made.received == ["job-1"] and versions_on(gateway) == ["calc@1"]


async def test_a_holder_that_says_it_lives_keeps_what_it_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(replica_lease, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        await change(gateway, "versions/2/stage", **FORCED)
        clock[0], renewed = 500.0, {"holder": "me", "seconds": 600}
        assert (await gateway.call("POST", "/v1/pool/lease", json=renewed))[0] == 200
        clock[0], versions = 1000.0, gateway.services.versions
        versions.leases._changed.notify()  # it looks at the clock
        for _ in range(20):
            await asyncio.sleep(0)
        assert not versions._change_lock.locked() and versions_on(gateway) == ["calc@2"]
        clock[0] = 1101.0
        versions.leases._changed.notify()
        await until(lambda: versions_on(gateway) == ["calc@1"])


async def test_nobody_takes_what_another_one_holds(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        await change(gateway, "versions/2/stage", **FORCED)
        other = {**FORCED, "holder": "loop b"}
        status, busy = await gateway.call("POST", f"{MODELS}/versions/3/stage", json=other)
        assert (status, busy["error"]["code"]) == (409, "pool_busy")
        assert "lent to 'me', for calc@2" in busy["error"]["message"]
        await change(gateway, "versions/3/stage", **FORCED)  # the holder itself goes on
        assert versions_on(gateway) == ["calc@3"] and (await lease(gateway))["displaced"] == [
            "calc@1"
        ]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["reject", "promote", "stage", "rollback"])
async def test_a_lease_ends_with_what_it_was_for(tmp_path: Path, end: str) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        if end == "rollback":
            await change(gateway, "promote", version=2)
            await change(gateway, "versions/3/stage", **FORCED)
            await change(gateway, "rollback")
        else:
            await change(gateway, "versions/2/stage", **FORCED)
        if end == "reject":
            await change(gateway, "reject", version=2, who="somebody")
        elif end == "promote":
            await change(gateway, "promote", version=2)
        elif end == "stage":
            await change(gateway, "versions/1/stage", holder="me")
        await until(lambda: gateway.services.versions.leases.lease is None)
        now = gateway.services.registry.resolve("calc").id
        assert versions_on(gateway) == [now] and (await ready(gateway))[0] == 200


async def test_a_client_stages_for_as_long_as_it_works(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        platform = Platform(gateway.url)
        version = gateway.services.registry.resolve("calc@2")
        async with platform.staged(version, "me") as report:
            assert report.passed and versions_on(gateway) == ["calc@2"]
            with pytest.raises(PoolBusy):
                await platform.stage(version, force=True, holder="you")
        await until(lambda: versions_on(gateway) == ["calc@1"])
        async with platform.staged(version, "me"):
            await platform.promote(version, who="me", reason="good")
        assert versions_on(gateway) == ["calc@2"] and await lease(gateway) is None
        await platform.close()


async def test_a_promoted_name_is_not_displaced_by_another(tmp_path: Path) -> None:
    async with served(tmp_path, engine(), others=[InProcessEngine(engine())]) as gateway:
        await register(gateway, tmp_path, b"second")
        made = {"checkpoint": gateway.services.registry.resolve("calc@2").checkpoint}
        assert (await gateway.call("POST", "/v1/models/tuned/versions", json=made))[0] == 200
        path, body = "/v1/models/tuned/promote", {"version": 1}
        status, refused = await gateway.call("POST", path, json=body)
        assert (status, refused["error"]["code"]) == (409, "would_displace")
        assert (await gateway.ask("hi")).text == "calc@1" and (await ready(gateway))[0] == 200
        assert (await gateway.call("POST", path, json=body | {"force": True}))[0] == 200
        assert versions_on(gateway) == ["tuned@1"] * 2 and (await ready(gateway))[0] == 200
