"""Sampling parameters that only vLLM can check: the client gets a 4xx in OpenAI's envelope."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cray_agents.runtime.pool.vllm_replica import EngineSettings, Replica
from tests.support.fuzz.cases import request
from tests.support.fuzz.sampling import PLAIN, sampling_body
from tests.support.fuzz.wire import Reply, Wire
from tests.support.scripted_gateway import CHAT, served

pytestmark = pytest.mark.vllm

CASES = 1000
SEED = 1


async def test_no_parameter_makes_vllm_fail(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(tmp_path / "model", tie=False, seed=1)
    host = Replica("calc", EngineSettings(), tmp_path / "replica.log")
    statuses: Counter[tuple[str, int]] = Counter()
    async with served(tmp_path, host=host, model=model) as gateway:
        wire = Wire(int(gateway.url.rpartition(":")[2]))

        async def send(path: str, content: bytes) -> Reply:
            kind = {"content-type": "application/json"}
            reply = await wire.ask(request("POST", path, content, kind))
            assert reply.status < 500, (path, content, reply)
            assert reply.status < 400 or reply.error, (path, content)
            assert b'data: {"error"' not in reply.body, (path, content, reply)
            return reply

        async def blamed(path: str, field: str, value: Any) -> str | None:
            body = json.dumps({"model": "calc", **PLAIN[path], field: value}).encode()
            reply = await send(path, body)
            param: str | None = reply.error["param"]
            return param

        for number in range(CASES):
            rng = Random(f"{SEED}-{number}")
            path = rng.choice(list(PLAIN))
            statuses[path, (await send(path, sampling_body(rng, path, "calc"))).status] += 1
        for value in ([], 1, "x", True):  # vLLM itself answers 500
            assert await blamed(CHAT, "structured_outputs", value) == "structured_outputs"
        assert await blamed(CHAT, "min_p", 2) == "min_p"
        assert await blamed("/v1/messages", "top_p", -1) == "top_p"
        # what vLLM says of itself when it is dead
        assert await blamed(CHAT, "temperature", "EngineCore EngineDeadError") == "temperature"
        assert [status["state"] for status in gateway.pool.status()] == ["serving"]
        wire.close()
        assert (await gateway.ask("hi", max_tokens=3)).status == 200
        assert gateway.store.problems == []
    for path in PLAIN.keys() - {"/v1/embeddings"}:  # this model has none
        assert {200, 400} <= {status for asked_path, status in statuses if asked_path == path}, (
            statuses
        )
