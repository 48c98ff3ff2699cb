"""Adapters hot-loaded into a real vLLM on CPU: nobody is disturbed, and no answer is another's."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from cray_agents.errors import SwapError
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.adapters import WEIGHTS
from tests.support.scripted_pool import until
from tests.support.vllm_pool import (
    CHAT,
    Serving,
    adapted,
    alone,
    distance,
    golden_probe,
    greedy,
    manifest_of,
    true_logprob,
    truth,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

# longer than two KV blocks of 128 tokens, so that the prefix cache holds it
LONG = {"messages": [{"role": "user", "content": "1 2 3 4 " * 40}], "temperature": 0}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "replica.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Any, log: Path
) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_model(folder / "m1", tie=False, seed=1)
    manifest_of(base)
    models = {"m@1": base}
    for number in (2, 3, 4):
        models[f"m@{number}"] = adapted(folder / f"m{number}", base, seed=number)
    models["m@5"] = adapted(folder / "m5", models["m@2"], seed=5)
    models["m@6"] = adapted(folder / "m6", models["m@5"], seed=6, rank=9)
    pool = Pool([VllmProcess("m", EngineSettings(kv_cache_gib=0.125, max_lora_rank=8), log)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # trl, where it is imported, sets ERROR
        await pool.start(base, "m@1", golden_probe(base))
        yield Serving(pool, models)
        await pool.stop()


def loads(log: Path) -> list[str]:
    """The names under which the pool had vLLM load adapters, oldest first."""
    begin = "Loaded new LoRA adapter: name '"
    lines = [line for line in log.read_text().splitlines() if begin in line]
    names = [line.split(begin)[1].split("'")[0] for line in lines]
    return [name for name in names if len(name.split()) == 3]  # a test gives shorter ones


async def known(serving: Serving) -> list[str]:
    """The versions that vLLM has a name of an adapter for."""
    async with serving.engine() as engine, engine._http.answer("GET", "/v1/models") as answer:
        models = (await answer.json())["data"]
    return sorted(model["id"].split()[0] for model in models if model["parent"])


async def in_worker(serving: Serving) -> int:
    """How many adapters vLLM's worker has in memory."""
    async with serving.engine() as engine:
        listing = await engine._control("/collective_rpc", {"method": "list_loras"})
    return len(listing["results"][0])


def tokens_and_logprobs(sample: SampledSequence) -> tuple[list[int], Any]:
    return sample.token_ids, pytest.approx(sample.logprobs, abs=1e-3)


async def test_a_candidate_is_staged_beside_streams_in_flight_and_answers_as_the_merged_weights(
    serving: Serving,
) -> None:
    begun, goes_on = asyncio.Semaphore(0), asyncio.Event()
    request = {"messages": CHAT, "max_tokens": 500, "ignore_eos": True, "stream": True}

    async def one(version: str, number: int) -> SampledSequence:
        asked = EngineCall("/v1/chat/completions", request | {"seed": number}, new_id("x")[2:])
        async for piece in serving.pool.answer(version, asked):
            assert piece.count(b'"model":') == piece.count(b'"model":"%s"' % version.encode())
            begun.release()
            await goes_on.wait()  # for the pool it is in flight until it is read to its end
        (sample,) = asked.samples
        return sample

    async def streams(version: str, count: int) -> list[asyncio.Task[SampledSequence]]:
        tasks = [asyncio.create_task(one(version, number)) for number in range(count)]
        for _ in range(count):
            await begun.acquire()
        return tasks

    pid = serving.pid
    under = {"m@1": await streams("m@1", 12)}
    report = await serving.stage("m@2")
    assert report.passed and report.tokens and set(report.seconds) == {"load", "prove"}
    under["m@2"] = await streams("m@2", 6)
    await serving.stage("m@3")
    assert serving.pool.status()[0]["in_flight"] == 12 + 6, "nobody was drained"
    goes_on.set()
    versions = serving.pool.status()[0]["versions"]
    assert versions == ["m@1", "m@2", "m@3"]
    asked = {"messages": CHAT, "temperature": 0, "max_tokens": 8}
    answers = await asyncio.gather(*(serving.chat(version, asked) for version in versions))
    for version, (_, sample) in zip(versions, answers, strict=True):
        right = greedy(serving.models[version], sample.prompt_token_ids, 8)
        assert (sample.token_ids, sample.logprobs) == tokens_and_logprobs(right)
    for version, tasks in under.items():
        samples = await asyncio.gather(*tasks)
        assert {(s.version, len(s.seams), len(s.token_ids)) for s in samples} == {(version, 0, 500)}
        before = samples[0].prompt_token_ids + samples[0].token_ids[:499]
        truly = true_logprob(serving.models[version], before, samples[0].token_ids[499])
        assert samples[0].logprobs[499] == pytest.approx(truly, abs=1e-3)
    assert serving.pid == pid


async def test_promotion_and_rollback_load_nothing_and_what_nobody_wants_is_unloaded(
    serving: Serving, log: Path
) -> None:
    await serving.stage("m@3")
    before = len(loads(log))
    await serving.swap("m@3")
    assert serving.pool.status()[0]["version"] == "m@3" and serving.pool.serves("m@1")
    await serving.swap("m@1")
    assert serving.pool.status()[0]["version"] == "m@1" and serving.pool.serves("m@3")
    assert len(loads(log)) == before
    await serving.stage("m@4")  # the last good one stays, the candidate before is gone
    assert await known(serving) == ["m@3", "m@4"] and await in_worker(serving) == 2
    assert serving.pool.status()[0]["versions"] == ["m@1", "m@3", "m@4"]


async def test_no_prompt_gets_anothers_prefix(serving: Serving, tmp_path: Path) -> None:
    models = serving.models
    await serving.swap("m@2")
    await serving.stage("m@3")
    asked = LONG | {"max_tokens": 8}
    _, first = await serving.chat("m@1", asked)
    assert len(first.prompt_token_ids) > 256
    right = {v: greedy(models[v], first.prompt_token_ids, 8) for v in ("m@1", "m@2", "m@3")}
    for version in ("m@1", "m@2", "m@3", "m@1", "m@3", "m@2"):
        _, sample = await serving.chat(version, asked)
        assert (sample.token_ids, sample.logprobs) == tokens_and_logprobs(right[version])

    folder, exchange = tmp_path / "adapter", EngineCall("/v1/chat/completions", asked, "primed")
    async with serving.engine() as engine:

        async def sample_from(engine: VllmEngine) -> tuple[list[int], Any]:
            assert [piece async for piece in engine.answer(exchange)]
            return exchange.samples[0].token_ids, exchange.samples[0].logprobs

        shutil.copytree(models["m@2"] / checkpoints.ADAPTER, folder)
        reused = await engine.load_adapter(folder, "m@2 reused")
        assert await sample_from(reused) == tokens_and_logprobs(right["m@2"])
        shutil.copytree(models["m@3"] / checkpoints.ADAPTER, folder, dirs_exist_ok=True)
        # the control: other weights under the same name, from the same folder
        again = {"lora_name": "m@2 reused", "lora_path": str(folder), "load_inplace": True}
        await engine._control("/v1/load_lora_adapter", again)
        assert await sample_from(reused) != tokens_and_logprobs(right["m@3"]), (
            "the control has to fail"
        )
        fresh = await engine.load_adapter(folder, "m@3 fresh")
        assert await sample_from(fresh) == tokens_and_logprobs(right["m@3"])
        for name in ("m@2 reused", "m@3 fresh"):
            await engine.unload_adapter(name)


@pytest.mark.parametrize("damage", ["cut", "noise"])
async def test_a_damaged_adapter_is_not_served_and_no_name_is_used_twice(
    serving: Serving, log: Path, tmp_path: Path, damage: str
) -> None:
    await serving.stage("m@2")
    versions, names = serving.pool.status()[0]["versions"], await known(serving)
    damaged = shutil.copytree(serving.models["m@4"], tmp_path / "m7")
    weights = damaged / checkpoints.ADAPTER / WEIGHTS
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        tensors = load_file(weights)
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] + torch.randn(tensors[name].shape)}, weights)
    with pytest.raises(SwapError, match=r"m@7 was not loaded: .*adapter_model.* is damaged"):
        await serving.pool.stage(damaged, "m@7", golden_probe(damaged))
    manifest = checkpoints.read_manifest(damaged)  # whoever wrote it knew no better
    files = manifest.files | {f"{checkpoints.ADAPTER}/{WEIGHTS}": checksums.hash_of(weights)}
    text = manifest.model_copy(update={"files": files}).model_dump_json()
    (damaged / checkpoints.MANIFEST).write_bytes(checksums.with_crc(text.encode()))
    with pytest.raises(
        SwapError, match=r"adapter of m@7 failed its logprob check in 2 tries.*served on"
    ):
        await serving.pool.stage(damaged, "m@7", golden_probe(damaged))
    assert serving.pool.status()[0]["versions"] == versions and not serving.pool.serves("m@7")
    assert await known(serving) == names and await in_worker(serving) == len(names)
    if damage == "noise":  # twice loaded, and proven to be wrong
        assert [name.split()[0] for name in loads(log)[-2:]] == ["m@7", "m@7"]
    assert len(set(loads(log))) == len(loads(log))
    _, sample = await serving.chat("m@2", LONG | {"max_tokens": 1})
    assert sample.version == "m@2"


async def test_a_killed_replica_comes_back_with_its_adapters_under_other_names(
    serving: Serving, log: Path
) -> None:
    await serving.swap("m@2")
    loaded, before = serving.pool.status()[0]["versions"], loads(log)
    assert {"m@1", "m@2"} <= set(loaded)
    request = {"messages": CHAT, "max_tokens": 600, "ignore_eos": True}
    traffic = [asyncio.create_task(serving.chat("m@2", request)) for _ in range(4)]
    await until(lambda: serving.pool.status()[0]["in_flight"] == 4)
    pid = serving.pid
    os.kill(pid, signal.SIGKILL)
    assert [sample.version for _, sample in await asyncio.gather(*traffic)] == ["m@2"] * 4
    status = serving.pool.status()[0]
    assert serving.pid != pid and (status["version"], status["versions"]) == ("m@2", loaded)
    assert not set(loads(log)[len(before) :]) & set(before)


async def test_where_the_parent_is_not_held_the_merged_weights_are_loaded(
    serving: Serving, log: Path
) -> None:
    before, pid = len(loads(log)), serving.pid
    for version in ("m@5", "m@6"):  # its parent is merged; its rank is above the largest
        await serving.swap(version)
        assert serving.pool.status()[0]["versions"] == [version]
        assert distance(await serving.score(), truth(serving.models[version])) < 1e-3
        assert await known(serving) == []
    assert (len(loads(log)), serving.pid) == (before, pid)  # in place
    await serving.swap("m@1")
    await serving.stage("m@2")
    assert serving.pool.status()[0]["versions"] == ["m@1", "m@2"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["one", "two"]}),
        ("/v1/responses", {"input": "one"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one"}]}),
    ],
)
async def test_every_api_is_answered_and_stamped_by_the_adapter(
    serving: Serving, path: str, fields: dict[str, Any]
) -> None:
    await serving.stage("m@2")
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = EngineCall(path, {**fields, limit: 4, "temperature": 0}, new_id("x")[2:])
    (body,) = [piece async for piece in serving.pool.answer("m@2", asked)]
    assert json.loads(body)["model"] == asked.version == "m@2"
    assert len(asked.samples) == (2 if path == "/v1/completions" else 1)
    for sample in asked.samples:
        right = greedy(serving.models["m@2"], sample.prompt_token_ids, len(sample.token_ids))
        assert sample.version == "m@2"
        assert (sample.token_ids, sample.logprobs) == tokens_and_logprobs(right)


async def test_an_adapter_version_brings_base_and_rank_and_the_next_one_loads_no_model(
    tmp_path: Path, tiny_model: Any
) -> None:
    base, log = tiny_model(tmp_path / "m1", tie=False, seed=1), tmp_path / "replica.log"
    manifest_of(base)
    asked = {"messages": CHAT, "temperature": 0, "max_tokens": 4}
    models = {}
    for number, rank in ((2, 4), (3, 9), (4, 9), (5, 9)):
        merged = adapted(tmp_path / f"m{number}", base, seed=number, rank=rank)
        shutil.copytree(merged, tmp_path / f"merged{number}")
        models[f"m@{number}"] = alone(merged, base)
    pool = Pool(
        [VllmProcess("m", EngineSettings(kv_cache_gib=0.125), log)],
        name_of=lambda directory: f"m@{directory.name[1:]}",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        await pool.start(models["m@2"], "m@2", checkpoints.read_manifest(models["m@2"]).probe)
        try:
            serving = Serving(pool, models)
            (status,) = pool.status()
            assert status["versions"] == ["m@1", "m@2"] and status["version"] == "m@2"
            await serving.stage("m@3")  # of a larger rank: the process starts once more
            pids = [status["pid"], serving.pid]
            await serving.stage("m@4")
            await serving.stage("m@5")
            assert pids[0] != pids[1] == serving.pid, "no process was started for the last two"
            for version in ("m@2", "m@5"):
                _, sample = await serving.chat(version, asked)
                truly = tmp_path / f"merged{version[2:]}"
                expected = greedy(truly, sample.prompt_token_ids, 4)
                assert (sample.token_ids, sample.logprobs) == tokens_and_logprobs(expected)
        finally:
            await pool.stop()
