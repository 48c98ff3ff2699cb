"""/v1/datasets: built in a process of its own; lists, reasons and cards."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents.processes import alive
from tests.support.datasets.dataset_runs import run_events, several, task
from tests.support.scripted_gateway import Gateway, served

pytestmark = pytest.mark.slow

PATH = "/v1/datasets"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with served(tmp_path) as gateway:
        events = several(
            *(run_events(f"r{n}", [n], task=task(f"t{n}"), reward=n / 4) for n in range(5))
        )
        await gateway.store.append(events)
        yield gateway


def children() -> set[int]:
    """The processes this one started that run our builds."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            argv = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and b"spawn_main" in argv and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


async def test_built_listed_and_explained(site: Gateway) -> None:
    status, made = await site.call("POST", PATH, json={"loop": "l", "min_reward": 0.5})
    assert status == 200
    assert made == {
        "id": made["id"],
        "method": "sft",
        "samples": 3,
        "trained_tokens": 3,
        "accepted_runs": 3,
        "considered_runs": 5,
        "split_runs": 0,
        "losses": {},
        "rejected": {"low_reward": 2},
        "demonstrations": 0,
        "rejected_demonstrations": {},
    }
    _, manifest = await site.call("GET", f"{PATH}/{made['id']}")
    assert manifest.items() >= made.items() and "runs" not in manifest
    await site.call("POST", PATH, json={"loop": "l"})
    _, page = await site.call("GET", f"{PATH}?limit=1")
    assert page["has_more"] and page["data"][0]["accepted_runs"] == 1
    _, rest = await site.call("GET", f"{PATH}?after={page['last_id']}")
    assert [each["id"] for each in rest["data"]] == [made["id"]] and not rest["has_more"]
    runs, seen, after = f"{PATH}/{made['id']}/runs", [], ""
    while True:
        _, page = await site.call("GET", f"{runs}?limit=2{after}")
        seen += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert [(row["run"], row["reason"]) for row in seen] == [
        ("r0", "low_reward"),
        ("r1", "low_reward"),
        ("r2", None),
        ("r3", None),
        ("r4", None),
    ]
    _, page = await site.call("GET", f"{runs}?accepted=false&after=r0")
    assert [row["run"] for row in page["data"]] == ["r1"]
    _, page = await site.call("GET", f"{runs}?reason=no_reward")
    assert page["data"] == [] and page["first_id"] is None
    async with site.http.get(f"{site.url}{PATH}/{made['id']}/card") as card:
        assert card.content_type == "text/markdown"
        assert made["id"] in await card.text()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "", {"loop": "nobody"}, 400, "empty_dataset", None),
        ("POST", "", {"min_margin": 1}, 400, "invalid_value", "min_margin"),
        ("POST", "", {"min_rewrd": 1}, 400, "invalid_value", "min_rewrd"),
        ("POST", "", {"tokenizer": "nobody"}, 404, "model_not_found", None),
        ("GET", "/ds-none", None, 404, "not_found", "dataset"),
        ("GET", "/ds-none/runs", None, 404, "not_found", "dataset"),
        ("GET", "/ds-none/card", None, 404, "not_found", "dataset"),
        ("GET", "?after=ds-none", None, 400, "invalid_value", "after"),
        ("GET", "?order=asc", None, 400, "unknown_parameter", "order"),
    ],
)
async def test_refusals_are_typed(
    gateway: Gateway, method: str, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    found, answer = await gateway.call(method, PATH + path, json=body)
    assert (found, answer["error"]["code"]) == (status, code)
    if param is not None:
        assert answer["error"]["param"] == param


async def test_what_a_run_page_asks_must_make_sense(site: Gateway) -> None:
    _, made = await site.call("POST", PATH, json={"loop": "l"})
    mistakes = {"after=r9": "after", "accepted=maybe": "accepted", "limit=x": "limit"}
    for asked, param in mistakes.items():
        status, answer = await site.call("GET", f"{PATH}/{made['id']}/runs?{asked}")
        assert (status, answer["error"]["param"]) == (400, param)


async def test_a_step_that_is_taken(site: Gateway) -> None:
    _, made = await site.call("POST", PATH, json={"loop": "l", "step": 1})
    assert (await site.call("POST", PATH, json={"loop": "l", "step": 1}))[1] == made
    status, answer = await site.call("POST", PATH, json={"loop": "l", "step": 1, "min_reward": 0})
    found = answer["error"]
    assert (status, found["code"], found["param"]) == (400, "step_taken", "step")


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_builder_that_dies_is_replaced_and_none_is_left(
    tmp_path: Path, noticed: bool
) -> None:
    before = children()
    async with served(tmp_path) as gateway:
        await gateway.store.append(run_events("a", [5]))
        await gateway.call("POST", PATH, json={})
        (builder,) = children() - before
        os.kill(builder, signal.SIGKILL)
        executor: Any = gateway.services.datasets._executor
        while noticed and not executor._broken:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        status, made = await gateway.call("POST", PATH, json={"loop": "l"})
        assert (status, made["samples"]) == (200, 1)
        (other,) = children() - before
        assert other != builder
        builds = (gateway.call("POST", PATH, json={"min_reward": n / 8}) for n in range(4))
        answers = await asyncio.gather(*builds)
        assert [status for status, _ in answers] == [200] * 4
        assert children() - before == {other}
    assert not alive(other) and not children() - before
