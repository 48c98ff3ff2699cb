"""A real vLLM in trouble: no kernel for a model, a stopped process, a request that kills it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents.errors import EngineError, EngineUnavailable
from cray_agents.ports import EngineCall
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.scheduler.supervisor import descendants
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from tests.support.import_server import process_of
from tests.support.vllm_pool import CHAT, Serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

LONG = {"messages": CHAT, "max_tokens": 900, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Any
) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("trouble")
    model = tiny_model(folder / "m1", tie=False, seed=1)
    # in bfloat16, where a small model's first request died of SIGILL on a CPU with AMX
    settings = EngineSettings(kv_cache_gib=0.125, dtype="bfloat16")
    replica = VllmProcess("m", settings, folder / "replica.log")
    pool = Pool([replica], silence_timeout=20, wait_timeout=540)
    await pool.start(model, "m@1", [])
    yield Serving(pool, {"m@1": model})
    await pool.stop()


async def until_restarted(serving: Serving, times: int) -> dict[str, Any]:
    async with asyncio.timeout(540):
        while serving.pool.status()[0]["restarts"] < times or not serving.pool.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return serving.pool.status()[0]


async def test_a_model_that_cannot_produce_a_token_is_not_served(tmp_path: Path) -> None:
    make_seed_model(tmp_path / "model", seed=1, corpus=["hi"], shape=ModelShape(head_size=24))
    pool = Pool([VllmProcess("m", EngineSettings(kv_cache_gib=0.125), tmp_path / "replica.log")])
    with pytest.raises(EngineUnavailable, match=r"m@1 cannot be served: .*head_dim=24"):
        await pool.start(tmp_path / "model", "m@1", [])
    assert not pool.ready and pool.status()[0]["pid"] is None


async def test_a_request_that_kills_its_engine_is_failed_and_others_are_answered(
    serving: Serving,
) -> None:
    before = serving.pool.status()[0]["restarts"]

    async def killing() -> None:
        """Kill the engine core each time that the request has come to it."""
        for _ in range(2):
            while not serving.pool.status()[0]["in_flight"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (core, *_) = descendants(process_of(serving.pid))
            os.kill(core, signal.SIGKILL)
            while serving.pool.status()[0]["in_flight"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    killer = asyncio.create_task(killing())
    with pytest.raises(EngineError, match="the engine died 2 times") as caught:
        async for _ in serving.pool.answer("m@1", EngineCall("/v1/chat/completions", LONG, "x1")):
            pass
    await killer
    assert caught.value.code == "engine_died"
    await until_restarted(serving, before + 2)
    await serving.chat("m@1", {"messages": CHAT, "max_tokens": 2})
