"""The queue of runs for workers: leases, ends that are recorded once, and bad requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.records import Run
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from tests.support.scripted_gateway import CHAT, Gateway, says, served

PATH = "/v1/rollouts"
SPEC: dict[str, Any] = {
    "run_id": "run_1",
    "environment": "sums",
    "agent": "a",
    "model": "calc@1",
    "task": {"input": "What is 1 + 1?", "target": "2"},
    "loop": "l",
    "iteration": 1,
    "seconds": 60,
}
WORKER = {"environment": "sums", "worker": "w"}


async def post(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await gateway.call("POST", PATH + path, json=body)
    assert status == 200, answer
    return answer


async def refused(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    status, answer = await gateway.call("POST", PATH + path, json=body)
    return status, answer["error"]["code"], answer["error"]["param"]


async def ask_model(gateway: Gateway, run_id: str = "run_1") -> None:
    body = {"model": "calc@1", "messages": says("1 + 1")}
    assert (await gateway.call("POST", f"/runs/{run_id}{CHAT}", json=body))[0] == 200


def stored(gateway: Gateway, run_id: str = "run_1") -> Run:
    return gateway.services.store.run(run_id)


async def test_a_run_is_leased_once_and_its_end_recorded_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        waiting = asyncio.create_task(post(gateway, "/lease", {**WORKER, "wait": 60}))
        assert await post(gateway, "", SPEC) == {"state": "queued"}
        leased = (await waiting)["rollout"]
        assert leased["task"]["target"] == "2" and leased["run_id"] == "run_1"
        assert await post(gateway, "", SPEC) == {"state": "running"}
        assert (await post(gateway, "/lease", WORKER))["rollout"] is None
        assert (await post(gateway, "/lease", {**WORKER, "environment": "x"}))["rollout"] is None
        await ask_model(gateway)
        result = {"lease": leased["lease"], "rewards": [{"name": "right", "value": 1}]}
        stale = await refused(gateway, "/run_1/result", {**result, "lease": "other"})
        assert stale == (400, "lease_lost", "lease")
        for _ in range(2):  # the second time because the answer was lost
            await post(gateway, "/run_1/result", result)
        assert (await refused(gateway, "/run_1/renew", {"lease": leased["lease"]}))[
            1
        ] == "lease_lost"
        status, answer = await gateway.call("GET", f"{PATH}/run_1?wait=60")
        assert (status, answer["state"]) == (200, "done")
        assert await post(gateway, "", SPEC) == {"state": "done"}
        run = stored(gateway)
        rows = (await gateway.call("GET", PATH))[1]["data"]
    assert (run.reward, run.loop, run.iteration, run.target) == (1.0, "l", 1, "2")
    assert [len(call.token_ids) > 0 for call in run.calls] == [True]
    assert run.output == "1 + 1" and run.rewards[0].source == "environment"
    assert {row["environment"]: row["queued"] for row in rows} == {"sums": 0, "x": 0}


@pytest.mark.slow
async def test_a_lease_ends_though_nobody_waits_for_its_run(tmp_path: Path) -> None:
    """In the list, in the store, and for whoever asks for the run again."""
    async with served(tmp_path) as gateway:
        await post(gateway, "", SPEC)
        await post(gateway, "/lease", {**WORKER, "seconds": 1})
        async with asyncio.timeout(60):
            while True:
                if not (await gateway.call("GET", PATH))[1]["data"][0]["running"]:
                    break
                await asyncio.sleep(0.05)
        assert stored(gateway).error.type == "WorkerLost"
        assert await post(gateway, "", SPEC) == {"state": "done"}
        await post(gateway, "", {**SPEC, "run_id": "run_2"})  # the look at leases goes on
        await post(gateway, "/lease", {**WORKER, "seconds": 1})
        assert (await gateway.call("GET", f"{PATH}/run_2?wait=60"))[1]["state"] == "done"


async def test_a_run_that_a_restart_cut_off_is_not_begun_again(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for run_id in ("run_1", "run_2"):
            await post(gateway, "", {**SPEC, "run_id": run_id})
            await post(gateway, "/lease", WORKER)
        await ask_model(gateway)
    async with served(tmp_path) as gateway:
        assert (await gateway.call("GET", f"{PATH}/run_1"))[0] == 404
        assert await post(gateway, "", SPEC) == {"state": "done"}
        assert await post(gateway, "", {**SPEC, "run_id": "run_2"}) == {"state": "queued"}
        run = stored(gateway)
    assert (run.error.type, run.loop, len(run.calls)) == ("RunCutOff", "l", 1)


async def test_bad_requests_name_their_field(tmp_path: Path) -> None:
    async with served(tmp_path, reward_limit=10) as gateway:
        for change, param in (
            ({"run_id": "a b"}, "run_id"),
            ({"seconds": 0}, "seconds"),
            ({"task": {}}, "task.input"),
            ({"odd": 1}, "odd"),
        ):
            assert await refused(gateway, "", {**SPEC, **change}) == (400, "invalid_value", param)
        assert (await refused(gateway, "/lease", {**WORKER, "wait": 1e9}))[2] == "wait"
        await post(gateway, "", SPEC)
        lease = (await post(gateway, "/lease", WORKER))["rollout"]["lease"]
        for rewards in ([], [{"name": "r", "value": 11}], [{"name": "", "value": 1}]):
            end = await refused(gateway, "/run_1/result", {"lease": lease, "rewards": rewards})
            code = "reward_refused" if rewards and rewards[0]["value"] == 11 else "invalid_value"
            assert end[:2] == (400, code) and end[2].startswith("rewards")
        error = {"type": "EnvironmentFailed", "message": "no"}
        await post(gateway, "/run_1/result", {"lease": lease, "error": error})
        assert stored(gateway).error.message == "no"


async def test_a_loop_and_its_worker_have_keys_of_their_own(tmp_path: Path) -> None:
    keys = Keys(Home(tmp_path / "home"))
    secrets = {role: keys.create(role.name, role)[1] for role in (Role.train, Role.admin)}
    loop, key = ({"authorization": f"Bearer {secrets[role]}"} for role in (Role.admin, Role.train))
    async with served(tmp_path, api_keys="required") as gateway:

        async def sent(path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
            status, answer = await gateway.call("POST", path, json=body, headers=headers)
            assert status == 200, answer
            return answer

        await sent(PATH, SPEC, loop)
        leased = (await sent(f"{PATH}/lease", WORKER, key))["rollout"]
        await sent(f"/runs/run_1{CHAT}", {"model": "calc@1", "messages": says("1 + 1")}, key)
        result = {"lease": leased["lease"], "rewards": [{"name": "right", "value": 1}]}
        await sent(f"{PATH}/run_1/result", result, key)
        described = {**SPEC, "stop_reason": "completed", "input": "x", "tags": ["scored"]}
        body = {"id": "run_1", **{k: v for k, v in described.items() if k in Run.model_fields}}
        events = {"events": [{"kind": "run", "body": body}]}
        await sent("/v1/trajectories/run_1/events", events, loop)
        assert stored(gateway).tags == ["scored"]
