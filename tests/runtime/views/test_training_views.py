"""Views of training over HTTP and in the SDK: series and timelines of jobs, datasets' samples."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from cray_agents import Platform
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.scheduler.sampler import HardwareSampler
from cray_agents.runtime.views.dataset_views import DatasetHistograms, SamplePage, histogram_of
from cray_agents.runtime.views.job_hardware import JobHardware, thinned
from cray_agents.runtime.views.view_records import JobSeries
from tests.runtime.views.test_run_views import get, model_with_tokenizer
from tests.support.datasets.dataset_runs import call, run_events, several, task
from tests.support.scripted_gateway import Gateway, served, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("training")
    model = model_with_tokenizer(directory / "model")
    async with served(directory, model=model) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dataset(gateway: Gateway) -> str:
    """Four accepted runs of six; run n samples n + 1 tokens."""
    events = [
        run_events(
            f"r{n}",
            calls=[call(f"r{n}-c", [104, 105], [*range(97, 98 + n)], model="calc@1")],
            task=task(f"t{n}"),
            reward=n / 4,
        )
        for n in range(6)
    ]
    await gateway.store.append(several(*events))
    status, made = await gateway.call("POST", "/v1/datasets", json={"loop": "l", "min_reward": 0.5})
    assert status == 200
    return str(made["id"])


async def test_a_dataset_has_histograms_of_what_is_in_it(gateway: Gateway, dataset: str) -> None:
    answer = await get(gateway, f"/v1/datasets/{dataset}/histograms?bins=5")
    shown = DatasetHistograms.model_validate(answer)
    assert shown.samples == sum(shown.tokens.counts) == sum(shown.trained_tokens.counts) == 4
    assert shown.funnel.considered == 6 and shown.funnel.rejected == {"low_reward": 2}
    assert sum(shown.reward.counts) == 6 and shown.versions == {"calc@1": 4}
    assert (shown.trained_tokens.edges[0], shown.tokens.edges[0]) == (3, 5)
    assert (await gateway.call("GET", "/v1/datasets/ds-none/histograms"))[0] == 404


async def test_samples_are_shown_as_the_trainer_reads_them(gateway: Gateway, dataset: str) -> None:
    path = f"/v1/datasets/{dataset}/samples"
    page = SamplePage.model_validate(await get(gateway, f"{path}?at=1&limit=2"))
    assert (page.total, page.next, [sample.at for sample in page.data]) == (4, 3, [1, 2])
    sample = page.data[0]
    assert sample.texts is not None and "".join(sample.texts) == "hi" + "abcd"
    assert sample.trained == [False, False, True, True, True, True]
    assert sample.logprobs == [None, None, -0.5, -0.5, -0.5, -0.5]
    assert sample.run == "r3" and sample.reward == 0.75
    end = await get(gateway, f"{path}?at=4")
    assert end["data"] == [] and end["next"] is None
    assert (await get(gateway, f"{path}?split=validation"))["total"] == 0
    for query, code in (("split=test", "invalid_value"), ("model=no@1", "model_not_found")):
        _, refused = await gateway.call("GET", f"{path}?{query}")
        assert refused["error"]["code"] == code


def write_job(gateway: Gateway, job_id: str, events: list[dict[str, Any]]) -> None:
    folder = gateway.services.home.job(job_id)
    folder.mkdir(parents=True)
    lines = [checksums.with_crc(orjson.dumps(event)) for event in events]
    (folder / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


async def test_a_job_has_series_and_a_timeline(gateway: Gateway) -> None:
    steps = [
        {"event": "step", "time": 100.0 + n, "step": n, "loss": 1 / n, "lr": 0.1, "seconds": 1.0}
        for n in range(1, 1001)
    ]
    ends = [
        {"event": "step", "time": 1200.0, "step": 1000, "loss": 0.5, "lr": None},
        {"event": "evaluation", "time": 1300.0, "step": 1000, "loss": 2.0},
    ]
    write_job(gateway, "job-1", [*steps, *ends])
    series = await get(gateway, "/v1/jobs/job-1/series?names=loss,evaluation_loss&points=50")
    JobSeries.model_validate(series)
    loss = series["series"]["loss"]
    assert len(loss) == 50 and loss[0] == [1, 1.0] and loss[-1] == [1000, 0.5]
    assert series["series"]["evaluation_loss"] == [[1000, 2.0]]
    assert set(series["names"]) == {"loss", "lr", "seconds", "evaluation_loss"}
    trace = await get(gateway, "/v1/jobs/job-1/timeline")
    assert trace["traceEvents"] and trace["otherData"]["job"] == "job-1"
    for path, status in (("job-1/series?names=age", 400), ("job-1/series?points=2", 400),
                         ("none/series", 404), ("none/timeline", 404)):  # fmt: skip
        assert (await gateway.call("GET", f"/v1/jobs/{path}"))[0] == status


async def test_a_job_has_its_nodes(gateway: Gateway, dataset: str) -> None:
    body = {"dataset": dataset, "parent": "calc@1", "hyperparameters": {"steps": 2}}
    status, job = await gateway.call("POST", "/v1/jobs", json=body)
    assert status == 200, job
    spec = await get(gateway, f"/v1/jobs/{job['id']}/spec")
    assert (spec["dataset"], spec["hyperparameters"]["steps"]) == (dataset, 2)
    assert "/" not in spec["parent"]
    assert (await gateway.call("GET", "/v1/jobs/none/spec"))[0] == 404
    path = f"/v1/jobs/{job['id']}/hardware"
    shown = JobHardware.model_validate(await get(gateway, path))
    assert shown.nodes == [] and shown.slurm is None and shown.waits is None
    for node in ("n1", "n2", "n3"):
        sampler = HardwareSampler(gateway.services.home.job(job["id"]), gpus=[], every=0.001)
        sampler.path = sampler.path.with_name(f"hardware.{node}.jsonl")
        sampler.start()
        file = sampler.path
        await until(lambda file=file: file.exists() and file.read_bytes().count(b"\n") > 3)  # type: ignore[misc]
        sampler.close()
    page = JobHardware.model_validate(await get(gateway, f"{path}?limit=2&points=3"))
    assert [node.node for node in page.nodes] == ["n1", "n2"] and page.has_more
    assert len(page.nodes[0].series["host.load"]) == 3
    rest = await get(gateway, f"{path}?after=n2&names=host.load")
    assert [node["node"] for node in rest["nodes"]] == ["n3"] and not rest["has_more"]
    assert set(rest["nodes"][0]["series"]) == {"host.load"}
    for query, code in (("names=age", 400), ("points=2", 400), ("limit=101", 400)):
        assert (await gateway.call("GET", f"{path}?{query}"))[0] == code
    assert (await gateway.call("GET", "/v1/jobs/none/hardware"))[0] == 404


async def test_thinning_keeps_peaks_and_ends() -> None:
    points = [(float(n), math.sin(n / 50)) for n in range(5000)]
    points[1234] = (1234.0, 9.0)
    kept = thinned(points, 100)
    assert len(kept) == 100 and points[1234] in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1]) and kept == sorted(kept)
    assert thinned(points[:3], 100) == points[:3]


async def test_histograms_count_everything_once() -> None:
    assert histogram_of([], 3) == {"edges": [], "counts": [], "missing": 0}
    assert histogram_of([2.0, None, 2.0], 3)["counts"] == [2]
    spread = histogram_of([0.0, 0.1, 0.5, 1.0, None], 4)
    assert spread["counts"] == [2, 0, 1, 1] and spread["missing"] == 1
    assert histogram_of([1, 3, 3], 10, whole=True) == {
        "edges": [1, 2, 3, 4],
        "counts": [1, 0, 2],
        "missing": 0,
        "least": 1,
        "most": 3,
    }


async def test_programs_get_the_same_by_the_sdk(gateway: Gateway, dataset: str) -> None:
    platform = Platform(gateway.url)
    views = platform.views
    await gateway.ask("hello", headers={"x-run-id": "seen"})
    try:
        assert (await views.outline("seen"))["turns"] == 1
        turns = await views.get("/trajectories/seen/turns", full=True)
        assert turns["data"][0]["answer"]["content"] == "hello"
        assert (await views.stats("model", facets="split", limit=5))["facets"]["split"]
        assert (await views.queue())["parked"] == 0
        assert isinstance(await views.warnings(), list)
        record = {"iteration": 0, "holdout_success": 1, "holdout_tasks": 1, "version": "calc@1"}
        await platform.finish_iteration("sdk", 0, record)
        assert [loop["id"] async for loop in views.loops()] == ["sdk"]
        assert (await views.get(f"/datasets/{dataset}/samples", split="train"))["total"] == 4
        changes = views.changes()
        seen: list[dict[str, Any]] = []
        async for change in _asked_meanwhile(gateway, changes):
            seen.append(change)
            break
        assert seen[0]["cursor"] and {"kind", "id", "change"} <= set(seen[0])
    finally:
        await platform.close()


async def _asked_meanwhile(gateway: Gateway, changes: Any) -> AsyncIterator[dict[str, Any]]:
    """Changes, while runs are recorded until there is one."""

    async def ask() -> None:
        while True:
            await gateway.ask("more")
            await asyncio.sleep(0.2)

    asking = asyncio.create_task(ask())
    try:
        async for change in changes:
            yield change
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await changes.aclose()
