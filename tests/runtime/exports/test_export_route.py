"""GET /v1/datasets/{id}/export and /v1/trajectories/export: streamed, and never silently short."""

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest

from cray_agents.queries import DatasetRecipe, RunFilter
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.exports.exporter import export, format_named, open_dataset, open_runs
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.routes import exports
from tests.support.exports.small_runs import events_of, name_of
from tests.support.scripted_gateway import Gateway, served, until

pytestmark = pytest.mark.slow

RUNS = 24
LARGE = 300  # runs of about 100 KB: more than is made before anything is sent
DATASET = "/v1/datasets/{}/export"
ALL = "/v1/trajectories/export"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with served(tmp_path) as gateway:
        for number in range(RUNS):
            await gateway.store.append(events_of(number))
        yield gateway


def built(gateway: Gateway, **recipe: object) -> str:
    asked = DatasetRecipe(loop="l", **recipe)  # type: ignore[arg-type]
    return str(build_dataset(gateway.store, gateway.services.home, asked)["id"])


async def get(gateway: Gateway, path: str, **query: str) -> tuple[aiohttp.ClientResponse, bytes]:
    async with gateway.http.get(gateway.url + path, params=query) as response:
        return response, await response.read()


def processes() -> list[str]:
    """Exports that run as children of this process."""
    children, found = list[str](), list[str]()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended, as the one that waited for an export
            children += path.read_text().split()
    for pid in children:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] if b"exports.export_process" in words else []
    return found


async def test_a_log_is_the_file_of_the_command(gateway: Gateway, tmp_path: Path) -> None:
    form = format_named("eval")
    export(open_runs(gateway.services.home, RunFilter(), False), form, tmp_path / "out")
    response, data = await get(gateway, ALL, format="eval")
    assert response.status == 200, data
    assert data == (tmp_path / "out").read_bytes()
    assert response.headers["content-type"] == "application/zip"
    assert '.eval"' in response.headers["content-disposition"]
    assert "exact_tokens" in response.headers["x-export-losses"]


async def test_lines_are_those_of_the_command(gateway: Gateway, tmp_path: Path) -> None:
    home, dataset = gateway.services.home, built(gateway)
    for name in ("jsonl", "openai"):
        form = format_named(name)
        for path, source in (
            (DATASET.format(dataset), open_dataset(home, dataset, form, "train", False)),
            (ALL, open_runs(home, RunFilter(), False)),
        ):
            export(source, form, tmp_path / "out")
            response, data = await get(gateway, path, format=name)
            assert response.status == 200, data
            assert data == (tmp_path / "out").read_bytes()
            assert response.headers["content-type"] == "application/x-ndjson"
            losses = response.headers["x-export-losses"]
            lines = len(data.splitlines())
            assert losses == ("" if name == "jsonl" else f"conversation_only={lines}")
    assert not (home.root / "exports").exists()


async def test_parquet_and_folders(gateway: Gateway) -> None:
    dataset = DATASET.format(built(gateway, method="grpo"))
    response, data = await get(gateway, dataset, format="tokens")
    assert response.headers["content-type"] == "application/vnd.apache.parquet"
    assert pq.read_table(io.BytesIO(data)).num_rows == RUNS
    assert response.headers["x-export-losses"] == f"no_conversation={RUNS}"
    response, data = await get(gateway, ALL, format="verl", min_reward="1")
    assert pq.read_table(io.BytesIO(data)).num_rows == RUNS // 4
    response, data = await get(gateway, dataset, format="huggingface")
    assert response.headers["content-type"] == "application/x-tar"
    assert int(response.headers["content-length"]) == len(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
        assert names == {"README.md", "data/train-00000-of-00001.parquet"}
        [shard] = [name for name in tar.getnames() if name.endswith(".parquet")]
        file = tar.extractfile(shard)
        assert file is not None and pq.read_table(io.BytesIO(file.read())).num_rows == RUNS
    await until(lambda: not list(gateway.services.home.exports.iterdir()))


async def test_filters(gateway: Gateway) -> None:
    _, data = await get(gateway, ALL, task="task-000001", max_reward="0", tag="small")
    assert [json.loads(line)["id"] for line in data.splitlines()] == [name_of(4), name_of(6)]


async def test_what_is_refused(gateway: Gateway) -> None:
    dataset = DATASET.format(built(gateway))
    for path, query, status, code in (
        (dataset, {"format": "csv"}, 400, "unknown_format"),
        (dataset, {"format": "trl-preference"}, 400, "no_pairs"),
        (dataset, {"split": "validation"}, 400, "invalid_value"),
        (dataset, {"loop": "l"}, 400, "unknown_parameter"),
        (dataset, {"format": "openai", "strict": "true"}, 400, "export_loss"),
        (dataset, {"strict": "perhaps"}, 400, "invalid_value"),
        (DATASET.format("ds-0"), {}, 404, "not_found"),
        (ALL, {"min_reward": "much"}, 400, "invalid_value"),
    ):
        got, answer = await gateway.call("GET", path, params=query)
        assert (got, answer["error"]["code"]) == (status, code), answer
    allowed = {"format": "openai", "strict": "true", "allow": "conversation_only"}
    response, _ = await get(gateway, dataset, **allowed)
    assert response.status == 200


async def test_runs_that_were_pruned(gateway: Gateway) -> None:
    dataset = DATASET.format(built(gateway))
    await gateway.store.forget([name_of(1), name_of(3)], "test")
    status, answer = await gateway.call("GET", dataset)
    assert (status, answer["error"]["code"]) == (400, "missing_runs")
    assert "2 runs" in answer["error"]["message"] and name_of(1) in answer["error"]["message"]
    response, data = await get(gateway, dataset, skip_missing="true")
    assert response.headers["x-export-losses"] == "missing_runs=2"
    assert len(data.splitlines()) == RUNS // 2 - 2
    tokens, _ = await get(gateway, dataset, format="tokens")
    assert tokens.status == 200  # everything is in the shards


async def test_everybodys_runs_need_a_role(gateway: Gateway) -> None:
    keys = Keys(gateway.services.home)
    secrets = {role: keys.create(role.name, role)[1] for role in (Role.use, Role.train)}
    for role, status in ((Role.use, 403), (Role.train, 200)):
        headers = {"authorization": f"Bearer {secrets[role]}"}
        async with gateway.http.get(gateway.url + ALL, headers=headers) as response:
            assert response.status == status, await response.text()


async def test_more_than_are_made_at_once_are_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the others' processes start."""
    start, held = exports._start, asyncio.Event()

    async def late() -> Any:
        await held.wait()
        return await start()

    monkeypatch.setattr(exports, "_start", late)
    asked = [asyncio.create_task(gateway.call("GET", ALL)) for _ in range(exports.MAX_RUNNING + 1)]
    [refused], _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    held.set()
    assert refused.result()[0] == 429
    assert sorted([(await one)[0] for one in asked]) == [200] * exports.MAX_RUNNING + [429]


async def large(gateway: Gateway) -> None:
    for number in range(RUNS, RUNS + LARGE):
        await gateway.store.append(events_of(number, words=20_000 // 5))


async def test_a_large_one_is_streamed(gateway: Gateway) -> None:
    await large(gateway)
    response, data = await get(gateway, ALL)
    assert len(data.splitlines()) == RUNS + LARGE and len(data) > 4 << 20
    assert "content-length" not in response.headers and "x-export-losses" not in response.headers
    response, data = await get(
        gateway, ALL, strict="true", format="openai", allow="conversation_only"
    )
    assert response.headers["x-export-losses"] == f"conversation_only={RUNS + LARGE}"


async def test_a_failure_in_mid_stream_breaks_the_connection(gateway: Gateway) -> None:
    await large(gateway)
    gateway.store.refresh()  # or the export, if it were sooner, would pass over the damaged line
    [segment] = gateway.services.home.segments.glob("*.jsonl")
    with segment.open("r+b") as file:
        file.seek(-3000, io.SEEK_END)
        file.write(b"#")
    seen = 0
    with pytest.raises(aiohttp.ClientPayloadError):
        async with gateway.http.get(gateway.url + ALL) as response:
            assert response.status == 200
            async for piece in response.content.iter_any():
                seen += len(piece)
    assert seen > 1 << 20
    await until(lambda: not processes())


async def test_a_client_that_leaves_ends_the_process(gateway: Gateway) -> None:
    await large(gateway)
    async with gateway.http.get(gateway.url + ALL) as response:
        await response.content.readany()
        assert processes()
        response.close()
    await until(lambda: not processes())
