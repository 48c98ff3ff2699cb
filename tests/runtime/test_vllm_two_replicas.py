"""Two real vLLM servers behind one gateway: a canary and a roll, checked token by token.

What every answer claims to be sampled by is checked against what transformers gives for the first
token under that version's weights.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.support.boards import PANELS
from tests.support.promql import used_metrics
from tests.support.scraped_metrics import labels_of
from tests.support.scripted_gateway import Gateway, Reply, served, until
from tests.support.vllm_pool import CHAT, manifest_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

STREAMS = 16
TOKENS = 48
ASK: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> AsyncIterator[Gateway]:
    """A gateway with two replicas, which knows calc@1 and calc@2."""
    folder = tmp_path_factory.mktemp("two")
    models = [tiny_model(folder / f"model-{n}", tie=False, seed=n) for n in (1, 2)]
    for model in models:
        manifest_of(model)
    settings = EngineSettings(kv_cache_gib=0.125, threads=1)
    hosts = [VllmProcess("calc", settings, folder / f"replica-{n}.log") for n in (1, 2)]
    async with served(folder, host=hosts[0], others=hosts[1:], model=models[0]) as gateway:
        new = {"checkpoint": str(models[1])}
        assert (await gateway.call("POST", "/v1/models/calc/versions", json=new))[0] == 200
        yield gateway


class Truth:
    """What transformers gives, for any first token, under each version's weights."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.tables: dict[tuple[str, tuple[int, ...]], Any] = {}

    def _table(self, version: str, prompt: list[int]) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if (version, tuple(prompt)) not in self.tables:
            services = self.gateway.services
            folder = services.home.checkpoint(services.registry.resolve(version).checkpoint)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.no_grad():
                scores = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            self.tables[version, tuple(prompt)] = scores
        return self.tables[version, tuple(prompt)]

    def check(self, run_id: str) -> str:
        """The version of a run's one call, whose tokens were sampled by it."""
        (call,) = self.gateway.calls(run_id)
        assert len(call.token_ids) == len(call.logprobs) == TOKENS and not call.seams
        given = float(self._table(call.model, call.prompt_token_ids)[call.token_ids[0]])
        assert call.logprobs[0] == pytest.approx(given, abs=1e-3)
        return call.model


@pytest.fixture(scope="module")
def truth(two: Gateway) -> Truth:
    return Truth(two)


async def ask(gateway: Gateway, session: str, **fields: Any) -> Reply:
    reply = await gateway.ask(CHAT, headers={"X-Session-Id": session}, **ASK, **fields)
    assert reply.status == 200, reply.body
    return reply


def loaded_versions(gateway: Gateway) -> list[str]:
    return sorted(replica["version"] for replica in gateway.pool.status())


async def test_the_metrics_of_both_engines_in_one_text(two: Gateway) -> None:
    await ask(two, "metrics")
    status, text = await two.call("GET", "/metrics/engines")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert status == 200 and text.count("# TYPE vllm:num_requests_running gauge") == 1
    for name in ("vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds", "cray_engine_up"):
        replicas = {sample.labels["replica"] for sample in families[name].samples}
        assert replicas == {"0", "1"}, name
    labels = families["cray_engine_up"].samples[0].labels
    assert labels["host"] and labels["version"] in ("calc@1", "calc@2")
    sampled = sum(sample.value for sample in families["vllm:generation_tokens"].samples)
    assert sampled >= TOKENS
    text = (await two.call("GET", "/metrics"))[1]
    (known,) = [f for f in text_string_to_metric_families(text) if f.name == "cray_model_tokens"]
    assert known.samples
    scraped = labels_of((await two.call("GET", "/metrics/engines"))[1])
    for place, panel in PANELS:
        for used in used_metrics("\n+ ".join(curve["expr"] for curve in panel["targets"])):
            if used.name.startswith("vllm:"):
                assert used.labels <= scraped[used.name], place


async def test_a_roll_there_and_back_under_streams(two: Gateway, truth: Truth) -> None:
    ended, seen, serving = False, list[str](), set[int]()

    async def client(name: str) -> None:
        last = False
        while not last:
            last = ended  # one more after the end
            reply = await ask(two, name, stream=True, return_token_ids=True)
            lines = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
            chunks = [json.loads(line) for line in lines]
            seen.append(truth.check(reply.run_id))
            assert {chunk["model"] for chunk in chunks} == {seen[-1]}
            (call,) = two.calls(reply.run_id)
            token_ids = [t for c in chunks for x in c["choices"] for t in x.get("token_ids") or ()]
            assert token_ids == call.token_ids

    async def watch() -> None:
        while not ended:
            serving.add(sum(r["state"] == "serving" for r in two.pool.status()))
            await asyncio.sleep(0.005)

    async def change(act: str, **body: Any) -> None:
        status, event = await two.call("POST", f"/v1/models/calc/{act}", json=body | {"who": "me"})
        assert status == 200, event

    async with asyncio.TaskGroup() as tasks:
        for n in range(STREAMS):
            tasks.create_task(client(f"client-{n}"))
        tasks.create_task(watch())
        await until(lambda: len(seen) > STREAMS)
        assert set(seen) == {"calc@1"}
        await change("promote", version=2)
        assert loaded_versions(two) == ["calc@2", "calc@2"]
        at = len(seen)
        await until(lambda: len(seen) > at + STREAMS)
        await change("rollback")
        ended = True
    assert loaded_versions(two) == ["calc@1", "calc@1"]
    assert set(seen) == {"calc@1", "calc@2"} and set(seen[-STREAMS:]) == {"calc@1"}
    assert min(serving) >= 1
