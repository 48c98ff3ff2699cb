"""Rollback, rejection, history and lineage, over the gateway and on the command line."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from tests.support.command_line import claimed, cli
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, checkpoint, served
from tests.support.scripted_platform import PROBE
from tests.support.scripted_trainer import ScriptedTrainer


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """calc@1 is promoted on two replicas; calc@2 and calc@3 were trained from it, in a row."""
    engines = [ScriptedEngine(lambda request, version: version) for _ in range(2)]
    trainer, others = partial(ScriptedTrainer, probe=PROBE), [InProcessEngine(engines[1])]
    async with served(tmp_path, engines[0], others=others, trainer=trainer) as gateway:
        for n in (1, 2):
            dataset = gateway.services.home.dataset(f"ds-{n}")
            dataset.mkdir(parents=True)
            manifest = {
                "id": f"ds-{n}",
                "method": "sft",
                "accepted_runs": 7,
                "versions": [f"calc@{n}"],
            }
            (dataset / "manifest.json").write_text(json.dumps(manifest))
            body = {"dataset": f"ds-{n}", "parent": f"calc@{n}", "hyperparameters": {"steps": 1}}
            _, job = await gateway.call("POST", "/v1/jobs", json=body)
            made = {"checkpoint": job["checkpoint"]}
            await gateway.call("POST", "/v1/models/calc/versions", json=made)
        yield gateway


async def test_a_rollback_serves_what_was_served_before(gateway: Gateway) -> None:
    path = "/v1/models/calc/rollback"
    status, refused = await gateway.call("POST", path, json={})
    assert status == 400 and "nothing was promoted" in refused["error"]["message"]
    await gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
    assert (await gateway.ask("hi")).text == "calc@2"
    stream = asyncio.create_task(gateway.ask("hi", stream=True))
    status, event = await gateway.call("POST", path, json={"reason": "complaints"})
    assert (status, event["version"], event["who"]) == (200, 1, "anybody")
    assert (await gateway.ask("hi")).text == "calc@1"
    assert (await stream).status == 200
    for body, words in (
        ({"to": 3}, "calc@3 never was promoted"),
        ({"to": "2"}, "to: "),
        ({"to": True}, "to: "),
        ({"force": 1}, "force: "),
    ):
        status, refused = await gateway.call("POST", path, json=body)
        assert status == 400 and words in refused["error"]["message"]
    assert (await gateway.call("POST", path, json={"to": 9, "force": True}))[0] == 404
    status, event = await gateway.call("POST", path, json={"to": 3, "force": True, "who": "me"})
    assert (status, event["version"], event["who"]) == (200, 3, "me")
    assert (await gateway.ask("hi")).text == "calc@3"


async def test_a_rejection_keeps_its_numbers(gateway: Gateway) -> None:
    path, numbers = "/v1/models/calc/reject", {"wins": 3, "losses": 9}
    body = {"version": 2, "who": "loop l", "reason": "futile", "numbers": numbers}
    status, event = await gateway.call("POST", path, json=body)
    assert (status, event["kind"], event["numbers"]) == (200, "rejected", numbers)
    status, refused = await gateway.call("POST", path, json={"version": 1})
    assert status == 400 and "roll back" in refused["error"]["message"]
    assert (await gateway.call("POST", path, json={"version": 7}))[0] == 404
    assert (await gateway.call("POST", path, json={"version": 2, "numbers": 3}))[0] == 400
    _, history = await gateway.call("GET", "/v1/models/calc/history")
    assert [(e["number"], e["kind"]) for e in history["data"]] == [(1, "promoted"), (2, "rejected")]
    assert (await gateway.ask("hi")).text == "calc@1"


async def test_lineage_leads_both_ways(gateway: Gateway, tmp_path: Path) -> None:
    foreign = {"checkpoint": str(checkpoint(tmp_path / "foreign", b"other"))}
    await gateway.call("POST", "/v1/models/calc/versions", json=foreign)
    await gateway.call("POST", "/v1/models/calc/reject", json={"version": 3, "reason": "worse"})
    _, kin = await gateway.call("GET", "/v1/models/calc/lineage")
    found: dict[str, Any] = {one["id"]: one for one in kin["data"]}
    assert list(found) == ["calc@1", "calc@4", "calc@2", "calc@3"]  # parents first
    assert [one["parent"] for one in found.values()] == [None, None, "calc@1", "calc@2"]
    assert [one["children"] for one in found.values()] == [["calc@2"], [], ["calc@3"], []]
    last = found["calc@3"]
    assert (last["job"][:4], last["method"], last["dataset"]) == ("job-", "sft", "ds-2")
    assert last["about_dataset"]["versions"] == ["calc@2"]
    assert [event["reason"] for event in last["events"]] == ["worse"]
    assert found["calc@1"]["promoted"] and not last["promoted"]
    _, middle = await gateway.call("GET", "/v1/models/calc@2/lineage")
    assert [one["id"] for one in middle["data"]] == ["calc@1", "calc@2", "calc@3"]
    _, first = await gateway.call("GET", "/v1/models/calc@4/lineage")
    assert [one["id"] for one in first["data"]] == ["calc@4"]
    middle = gateway.services.registry.resolve("calc@2").checkpoint
    shutil.rmtree(gateway.services.home.checkpoint(middle))  # what it came from is still known
    _, kin = await gateway.call("GET", "/v1/models/calc/lineage")
    assert {one["id"]: one["parent"] for one in kin["data"]} == {
        one: found[one]["parent"] for one in found
    }
    for missing in ("calc@9", "nobody"):
        assert (await gateway.call("GET", f"/v1/models/{missing}/lineage"))[0] == 404


@pytest.mark.slow
async def test_the_commands(gateway: Gateway, tmp_path: Path) -> None:
    home = gateway.services.home

    async def models(*words: str) -> "subprocess.CompletedProcess[str]":
        def run() -> "subprocess.CompletedProcess[str]":
            with claimed(home, gateway.url, "calc"):
                return cli("models", *words, "--home", home.root, cwd=tmp_path)

        return await asyncio.to_thread(run)

    said = await models("promote", "calc@2", "--who", "me", "--reason", "0.5 -> 0.9")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == "calc@2 promoted by me: 0.5 -> 0.9; calc means calc@2 now\n"
    assert (await gateway.ask("hi")).text == "calc@2"
    assert (await models("reject", "calc@3", "--who", "me")).stdout == "calc@3 rejected by me\n"
    said = await models("rollback", "calc", "--who", "me", "--reason", "slow")
    assert said.stdout == "calc rolled back by me: slow; calc means calc@1 now\n"
    said = await models("rollback", "calc", "--to", "3")
    assert said.returncode == 2 and "never was promoted" in said.stderr
    assert (await models("promote", "calc")).returncode == 2
    said = await models("canary", "calc@3", "--share", "0.3", "--who", "me")
    assert said.stdout == "calc@3 canary started by me\n"
    shown = json.loads((await models("canary", "calc")).stdout)
    assert (shown["version"], shown["numbers"]["share"], shown["seen"]["limit"]) == (3, 0.3, 40)
    said = await models("canary", "calc", "--stop", "--who", "me", "--reason", "enough")
    assert said.stdout == "calc@3 canary ended by me: enough\n"

    rows = json.loads((await models("list", "--json")).stdout)
    assert [(row["id"], row["promoted"], row["last"]) for row in rows] == [
        ("calc@1", True, "rolled_back_to"),
        ("calc@2", False, "rolled_back_from"),
        ("calc@3", False, "canary_ended"),
    ]
    held = {row["id"]: row["replicas"] for row in rows}
    assert held["calc@1"] == len(gateway.services.pool.status()) and sum(held.values()) >= 1
    events = json.loads((await models("show", "calc", "--json")).stdout)["history"]
    assert [event["number"] for event in events] == [1, 2, 3, 4, 5, 6]
    tree = (await models("show", "calc")).stdout.splitlines()
    assert [line.split("calc@")[0] for line in tree[:3]] == ["", "└── ", "    └── "]
    assert "canary ended" in tree[-1] or "enough" in tree[-1]
    assert "promoted" in tree[0] and "ds-2 of 7 runs" in tree[2]
    kin = json.loads((await models("show", "calc@3", "--json")).stdout)["lineage"]
    assert [one["id"] for one in kin] == ["calc@1", "calc@2", "calc@3"]
