"""The KV tier: what its files refuse, what a bad disk costs, and vLLM servers that share it."""

import asyncio
import json
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from cray_agents.cli.platform import tier_rows
from cray_agents.errors import ConfigError
from cray_agents.ports import EngineCall, SampledSequence
from cray_agents.records import new_id
from cray_agents.runtime.pool import vllm_process
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess, command
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.vllm_plugins.wire import TIER
from cray_agents.server.permissions import prepare_kv_tier
from tests.support.vllm_pool import (
    Serving,
    adapted,
    golden_probe,
    greedy,
    manifest_of,
    true_logprob,
)
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.vllm
real = pytest.mark.asyncio(loop_scope="module")  # with servers of real vLLM

SIZE, BLOCKS = 2**16, 16  # bytes of a block; blocks of the memory tier
WEIGHTS, OTHERS = "a" * 64, "b" * 64
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(BLOCKS // 4)]  # as many as may wait


def spec(kind: Any, **extra: Any) -> Any:
    """vLLM's own record of a model with blocks of SIZE bytes."""
    from vllm.v1.kv_offload import config

    return kind(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=SIZE,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": BLOCKS * SIZE} | extra,
            engine_id=f"test-{os.getpid()}",
            model=config.OffloadingModelConfig("/m", "float32"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )


class Disk:
    """A tier of its own over a folder, driven as vLLM's scheduler does."""

    def __init__(self, folder: Path, quota: int = 2**30, computes: str = "") -> None:
        from cray_agents.runtime.vllm_plugins import kv_tier

        self.memory = np.zeros((BLOCKS, SIZE), np.uint8)
        self.tier = kv_tier.CheckedFiles(
            spec(kv_tier.HostTieringSpec), self.memory.data, "CheckedFiles",
            folder=str(folder), quota=quota, computes=computes,
        )  # fmt: skip
        self.jobs = 0

    def context(self, weights: str) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        return ReqContext("request", {TIER: weights})

    def path(self, key: bytes) -> Path:
        return self.tier.path(key, self.context(WEIGHTS))

    def transfer(self, keys: Sequence[bytes], *, load: bool, weights: str = WEIGHTS) -> set[bytes]:
        """The keys that were transferred, of blocks from the first one on."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.arange(len(keys)), load, self.context(weights))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        while not (ended := [*self.tier.get_finished_jobs()]):
            time.sleep(0.001)
        return set(ended[0].successful_keys or ())

    def has(self, key: bytes, weights: str = WEIGHTS) -> bool:
        from vllm.v1.kv_offload.base import LookupResult

        context = self.context(weights)
        while (found := self.tier.lookup(key, context)) is LookupResult.RETRY:
            self.tier.on_schedule_end(None)
        self.tier.on_request_finished(context)
        return bool(found is LookupResult.HIT)

    def counted(self, name: str) -> int:
        """What was counted since the last call."""
        data = self.tier.get_stats().data["data"]
        return int(sum(data.get(f"cray_kv_tier_{name}", {}).values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare_kv_tier(tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    yield disk
    disk.tier.shutdown()


def test_every_flip_and_cut_is_a_miss_and_its_file_goes(disk: Disk) -> None:
    draw = random.Random(7)
    wanted = np.frombuffer(draw.randbytes(len(KEYS) * SIZE), np.uint8).reshape(-1, SIZE)
    for _ in range(50):
        disk.memory[: len(KEYS)] = wanted
        assert disk.transfer(KEYS, load=False) == {*KEYS}
        for key in KEYS:
            content = bytearray(disk.path(key).read_bytes())
            if draw.random() < 0.25:
                content = content[: draw.randrange(len(content))]
            else:
                at = draw.randrange(8 * len(content))
                content[at // 8] ^= 1 << at % 8
            disk.path(key).write_bytes(content)
        disk.memory[:] = 0
        assert disk.transfer(KEYS, load=True) == set()
        assert not disk.memory.any() and not any(disk.path(key).exists() for key in KEYS)
    assert disk.counted("damaged_blocks") == 50 * len(KEYS) == 200
    disk.memory[: len(KEYS)] = wanted
    disk.transfer(KEYS, load=False)
    disk.memory[:] = 0
    assert disk.transfer(KEYS, load=True) == {*KEYS}
    assert (disk.memory[: len(KEYS)] == wanted).all()


def test_no_block_is_taken_for_another(disk: Disk, folder: Path) -> None:
    one, two, three, _ = KEYS
    other = Disk(folder, computes="with other settings")
    disk.transfer(KEYS[:3], load=False)
    assert disk.has(one) and not disk.has(one, OTHERS) and not other.has(one)
    assert not disk.has(one, "") and disk.transfer([one], load=False, weights="") == set()
    disk.path(one).rename(disk.path(two))
    disk.path(three).write_bytes(bytes(SIZE))  # as vLLM's own tier leaves it
    other.path(one).parent.mkdir(parents=True)
    other.path(one).write_bytes(disk.path(two).read_bytes())
    assert disk.transfer(KEYS, load=True) == other.transfer([one], load=True) == set()
    assert disk.counted("damaged_blocks") == 2 and other.counted("damaged_blocks") == 1
    other.tier.shutdown()


def test_two_keep_a_quota_and_what_was_used_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cray_agents.runtime.vllm_plugins import kv_tier

    monkeypatch.setattr(kv_tier, "_USED_AGAIN", 0.0)
    disks = [Disk(folder, quota=40 * (SIZE + 4096)) for _ in range(2)]
    used = b"\xff" * 36  # the last by name, where a clock that stood still gave all the same time
    disks[0].transfer([used], load=False)
    for number in range(30):
        keys = [bytes([number, n + 1]) * 16 + bytes(4) for n in range(4)]
        disks[number % 2].transfer(keys, load=False)
        assert disks[0].transfer([used], load=True) == {used}  # which touches it
        if number == 15:
            (folder / "mine.txt").write_text("no block")

    most = 40 * (1 + 2 * kv_tier._LOOK_SHARE)  # each looks when it has written that share
    wait_until(lambda: len([*folder.rglob("*.kv")]) <= most)
    assert disks[0].has(used) and disks[1].has(keys[-1]) and (folder / "mine.txt").exists()
    assert not disks[0].has(bytes([0, 1]) * 16 + bytes(4))
    assert sum(disk.counted("evicted_bytes") for disk in disks) >= 80 * SIZE
    for disk in disks:
        disk.tier.shutdown()


@contextmanager
def no_large_files() -> Iterator[None]:
    """Writes of half a block and more fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fails_or_hangs_costs_hits_alone(
    disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cray_agents.runtime.vllm_plugins import kv_tier

    one, two, three, _ = KEYS
    with no_large_files():
        assert disk.transfer([one], load=False) == set()
    assert disk.transfer([two], load=False) == set(), "it rests"
    assert disk.counted("failures") == 1 and not [*folder.rglob("*.tmp")]
    wait_until(lambda: not disk.tier._full)  # else it makes room of what is stored below
    monkeypatch.setattr(kv_tier, "REST", 0.0)
    disk.tier._no_stores_until = 0.0
    away = folder.rename(folder.with_name("away"))
    assert disk.transfer([one], load=False) == disk.transfer([one], load=True) == set()
    assert not disk.has(one) and not folder.exists()
    away.rename(folder)
    disk.memory[0] = 7
    assert disk.transfer([one], load=False) == {one} and disk.has(one)
    monkeypatch.setattr(kv_tier, "PATIENCE", 60.0)
    monkeypatch.setattr(kv_tier, "REST", 60.0)
    disk.tier._direct, disk.memory[:] = 0, 0
    disk.path(two).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(disk.path(two))  # its reader hangs
    with ThreadPoolExecutor(1) as aside:
        loading = aside.submit(disk.transfer, [two, one], load=True)
        wait_until(lambda: any(job.good for job in [*disk.tier._jobs.values()]))
        monkeypatch.setattr(kv_tier, "PATIENCE", 0.0)
        assert loading.result() == {one}
    assert not disk.has(one) and disk.transfer([three], load=False) == set(), "it rests"
    disk.memory[:] = 0
    with disk.path(two).open("wb") as late:
        late.write(bytes([9]) * 100)
    while disk.path(two).exists():
        time.sleep(0.01)
    assert not disk.memory.any()


def test_a_quota_or_a_folder_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 16 blocks"):
        Disk(folder, quota=10 * SIZE)
    assert folder.stat().st_mode & 0o077 == 0 and prepare_kv_tier(folder) == ""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("")
    for wrong, why in (("home", "holds other files"), ("home/letter", "cannot be written")):
        with pytest.raises(ConfigError, match=why):
            prepare_kv_tier(tmp_path / wrong)


def test_on_gpus_vllms_own_spec_takes_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the CPU build goes: its scheduler's side, whole."""
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    monkeypatch.setattr(vllm_process, "has_gpu_build", lambda: True)
    line = command(tmp_path, ("m",), EngineSettings(kv_tier=folder))
    given = json.loads(line[line.index("--kv-transfer-config") + 1])
    extra = KVTransferConfig(**given).kv_connector_extra_config
    kind = OffloadingSpecFactory.get_spec_cls(extra)
    assert kind.__name__ == "TieringOffloadingSpec" and "vllm." in kind.__module__
    manager = spec(kind, **extra | {"cpu_bytes_to_use": BLOCKS * SIZE}).get_manager()
    assert [type(tier).__name__ for tier in manager.secondary_tiers] == ["CheckedFiles"]
    assert "cray_kv_tier_damaged_blocks" in kind.build_metric_definitions(extra)
    manager.shutdown()


# ---- real servers
LONG = {"messages": [{"role": "user", "content": "1 2 3 4 " * 60}], "temperature": 0}
ASKED = LONG | {"max_tokens": 8}


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vllm_offload_*")}


class Shared:
    """Replicas over one folder, each in a pool of its own."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder, self.models = folder, models
        self.replicas: list[Serving] = []
        self.before = in_shared_memory()

    async def start(self) -> Serving:
        settings = EngineSettings(
            kv_cache_gib=0.125, threads=1, max_lora_rank=8,
            kv_tier=self.folder, kv_tier_gib=0.25, kv_tier_memory_gib=0.0625,
        )  # fmt: skip
        log = self.folder.parent / f"replica-{len(self.replicas)}.log"
        pool = Pool([VllmProcess("m", settings, log)], swap_mode="keep")
        base = self.models["m@1"]
        await pool.start(base, "m@1", golden_probe(base))
        self.replicas.append(Serving(pool, self.models))
        return self.replicas[-1]

    async def settle(self) -> int:
        """Wait until no more blocks are written; return their number."""
        count, before = -1, -2
        while not 0 < count == before:
            await asyncio.sleep(0.3)
            count, before = len([*self.folder.rglob("*.kv")]), count
        return count


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Any, forked_servers: None
) -> AsyncIterator[Shared]:
    place = tmp_path_factory.mktemp("tier")
    prepare_kv_tier(place / "kv")
    models = {f"m@{n}": tiny_model(place / f"m{n}", tie=False, seed=n) for n in (1, 2)}
    for model in models.values():
        manifest_of(model)
    models["m@3"] = adapted(place / "m3", models["m@1"], seed=3)
    shared = Shared(place / "kv", models)
    yield shared
    for replica in shared.replicas:
        await replica.pool.stop()


async def ask(replica: Serving, version: str, asked: dict[str, Any] = ASKED) -> SampledSequence:
    """The answer; its tokens and logprobs are those that transformers gives."""
    _, sample = await replica.chat(version, asked)
    right = greedy(replica.models[version], sample.prompt_token_ids, len(sample.token_ids))
    assert sample.token_ids == right.token_ids
    assert sample.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    return sample


async def forget(replica: Serving) -> None:
    """Have a replica forget all blocks that are in memory."""
    async with replica.engine() as engine:
        await engine._control("/reset_prefix_cache?reset_external=true")


@real
async def test_a_new_process_reads_what_another_computed_and_nothing_of_other_weights(
    shared: Shared,
) -> None:
    first = await shared.start()
    computed = await ask(first, "m@1")
    assert computed.cached_tokens == 0 and await shared.settle() > 0
    second = await shared.start()
    assert in_shared_memory() == shared.before, "what a killed server would leave there"
    read = await ask(second, "m@1")
    assert read.cached_tokens >= len(read.prompt_token_ids) - 128
    await second.swap("m@2")
    assert (await ask(second, "m@2")).cached_tokens == 0
    await second.swap("m@1")
    assert (await ask(second, "m@1")).cached_tokens == read.cached_tokens  # of the first's files
    await second.stage("m@3")
    assert (await ask(second, "m@3")).cached_tokens == 0
    await shared.settle()
    await first.stage("m@3")  # the same adapter under another name
    assert (await ask(first, "m@3")).cached_tokens == read.cached_tokens
    assert {path.name for path in shared.folder.iterdir() if path.is_dir()} == {
        read_manifest(model).weights_sha256 for model in shared.models.values()
    }


@real
async def test_damaged_files_and_a_missing_folder_change_no_answer(shared: Shared) -> None:
    (replica, _) = shared.replicas
    for path in shared.folder.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    await forget(replica)
    assert (await ask(replica, "m@1")).cached_tokens == 0
    async with replica.engine() as engine:
        metrics = await engine.metrics(5)
    (row,) = tier_rows(metrics.replace("_total{", '_total{replica="0",'))
    assert row["damaged"] > 0 and row["KV blocks hit"] > 0 and row["stored"] != "0 B"
    await shared.settle()
    await forget(replica)
    assert (await ask(replica, "m@1")).cached_tokens > 0
    away = shared.folder.rename(shared.folder.with_name("away"))
    await forget(replica)
    other = ASKED | {"messages": [{"role": "user", "content": "9 8 7 6 " * 60}]}
    for asked in (ASKED, other):
        assert (await ask(replica, "m@1", asked)).cached_tokens == 0
    assert not shared.folder.exists()
    away.rename(shared.folder)


@real
async def test_requests_in_flight_take_no_block_of_their_former_weights(shared: Shared) -> None:
    (_, replica), long = shared.replicas, 600  # tokens: some are still to come when it swaps
    prompts = [{"messages": [{"role": "user", "content": f"{n} 2 3 " * 60}]} for n in range(8)]
    asked = [one | {"temperature": 0, "max_tokens": 1} for one in prompts]
    await asyncio.gather(*(replica.chat("m@1", one) for one in asked))
    await shared.settle()

    async def answer(one: dict[str, Any]) -> SampledSequence:
        request = one | {"max_tokens": long, "ignore_eos": True}
        exchange = EngineCall("/v1/chat/completions", request, new_id("x")[2:])
        assert [piece async for piece in replica.pool.answer("m@1", exchange)]
        return exchange.samples[0]

    for _ in range(5):
        await forget(replica)
        tasks = [asyncio.create_task(answer(one)) for one in asked]
        await until(
            lambda: replica.pool.status()[0]["in_flight"] == 8 or any(map(asyncio.Task.done, tasks))  # noqa: B023
        )
        await replica.swap("m@2")
        spanning = [sample for sample in await asyncio.gather(*tasks) if sample.seams]
        if spanning:
            break
        await replica.swap("m@1")  # all had ended before the swap
    assert spanning
    for sample in spanning[::3]:
        assert [change.model for change in sample.seams] == ["m@2"]
        before = sample.prompt_token_ids + sample.token_ids[: long - 1]
        truly = true_logprob(replica.models["m@2"], before, sample.token_ids[long - 1])
        assert sample.logprobs[long - 1] == pytest.approx(truly, abs=1e-3)
    await replica.swap("m@1")
    assert (await ask(replica, "m@1", asked[0])).cached_tokens > 0
