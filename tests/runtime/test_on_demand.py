"""Loading on demand: a version on no replica is loaded if that displaces nothing, or refused."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.runtime.gateway.model_calls.admission import Admission
from tests.runtime.test_version_switcher import Slow, change, register, says_version, versions_on
from tests.support.bare_models import bare_model
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Gateway, says, served, until
from tests.support.scripted_pool import Mortal, checkpoint, probe
from tests.support.scripted_pool import serving as pool_serving


def engine() -> ScriptedEngine:
    return ScriptedEngine(says_version)


async def spares(gateway: Gateway) -> list[Any]:
    return [r["version"] for r in (await gateway.call("GET", "/v1/pool"))[1]["spares"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_loaded_is_refused_at_once_with_what_to_do(
    tmp_path: Path, stream: bool
) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        client = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", timeout=120)
        async with client:
            with pytest.raises(
                openai.InternalServerError, match="no replica holds calc@2"
            ) as error:
                await client.chat.completions.create(
                    model="calc@2", messages=says("hi"), stream=stream
                )
        assert error.value.status_code == 503 and error.value.code == "model_not_loaded"
        assert "models promote calc@2" in error.value.message
        assert error.value.response.headers["x-should-retry"] == "false"
        assert versions_on(gateway) == ["calc@1"] and (await gateway.ask("hi")).text == "calc@1"


async def test_no_replica_starts_for_embeddings_of_what_only_generates(tmp_path: Path) -> None:
    spare = Mortal(engine())
    async with served(tmp_path, engine(), spares=[spare]) as gateway:
        model = bare_model(tmp_path / "second", b"second")
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        body = {"checkpoint": str(model)}
        assert (await gateway.call("POST", "/v1/models/calc/versions", json=body))[0] == 200
        body = {"model": "calc@2", "input": "a"}
        status, answer = await gateway.call("POST", "/v1/embeddings", json=body)
        assert (status, answer["error"]["code"]) == (400, "unsupported_model")
        assert spare.starts == 0


@pytest.mark.slow
async def test_it_is_loaded_by_a_spare_replica_that_displaces_nothing(tmp_path: Path) -> None:
    spare = Mortal(engine())
    async with served(tmp_path, engine(), spares=[spare]) as gateway:
        await register(gateway, tmp_path, b"second", b"third")
        assert await spares(gateway) == [] and spare.starts == 0  # not before it is asked for
        replies = await asyncio.gather(*(gateway.ask("hi", model="calc@2") for _ in range(8)))
        assert {reply.text for reply in replies} == {"calc@2"} and spare.starts == 1
        assert await spares(gateway) == ["calc@2"] and versions_on(gateway) == ["calc@1"]
        assert (await gateway.call("GET", "/health/ready"))[0] == 200
        both = [gateway.ask("hi", model=f"calc@{n % 3 + 1}") for n in range(12)]
        replies = await asyncio.gather(*both)  # one after the other on the spare replica
        assert [reply.text for reply in replies] == [f"calc@{n % 3 + 1}" for n in range(12)]
        assert versions_on(gateway) == ["calc@1"]
        await change(gateway, "promote", version=2)
        assert versions_on(gateway) == ["calc@2"]
        assert (await gateway.ask("hi")).text == "calc@2"


async def test_a_stage_takes_it_where_the_last_replica_may_not_be_taken(tmp_path: Path) -> None:
    async with served(tmp_path, engine(), spares=[InProcessEngine(engine())]) as gateway:
        await register(gateway, tmp_path, b"second")
        assert (await change(gateway, "versions/2/stage"))["passed"]
        assert versions_on(gateway) == ["calc@1"] and await spares(gateway) == ["calc@2"]


async def test_a_spare_that_does_not_come_up_fails_who_asked(tmp_path: Path) -> None:
    spare = Mortal(engine())
    spare.broken = True
    async with served(tmp_path, engine(), spares=[spare]) as gateway:
        await register(gateway, tmp_path, b"second")
        refused = await gateway.ask("hi", model="calc@2")
        assert (refused.status, refused.code) == (409, "swap_failed")
        assert "it does not come up" in refused.json["error"]["message"]
        assert await spares(gateway) == [] and versions_on(gateway) == ["calc@1"]
        spare.broken = False
        assert (await gateway.ask("hi", model="calc@2")).text == "calc@2"


async def test_too_little_memory_is_told(tmp_path: Path) -> None:
    spare = Mortal(engine())
    spare.missing_resource = lambda checkpoint: "memory"  # type: ignore[method-assign]
    async with served(tmp_path, engine(), spares=[spare]) as gateway:
        await register(gateway, tmp_path, b"second")
        refused = await gateway.ask("hi", model="calc@2")
        assert (refused.status, refused.code) == (503, "model_not_loaded")
        assert "for lack of memory" in refused.json["error"]["message"] and spare.starts == 0


async def test_what_gave_way_is_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path, engine()) as gateway:
        await register(gateway, tmp_path, b"second")
        await change(gateway, "versions/2/stage", force=True, holder="me", seconds=0.3)
        assert (await gateway.ask("hi", model="calc@1")).text == "calc@1"


async def test_a_spare_nobody_asks_is_ended(tmp_path: Path) -> None:
    spare = Mortal(engine())
    settings: Any = {"spares": [spare], "spare_seconds": 0.3}
    async with pool_serving(tmp_path, InProcessEngine(engine()), **settings) as pool:
        await pool.load_beside(checkpoint(tmp_path, 2), "m@2", probe(2), [])
        assert pool.serves("m@2") and [s["version"] for s in pool.spares_status()] == ["m@2"]
        await until(lambda: not pool.spares_status())
        assert not pool.expects("m@2") and pool.serves("m@1")
        await pool.load_beside(checkpoint(tmp_path, 2), "m@2", probe(2), [])
        assert pool.serves("m@2") and spare.starts == 2


@pytest.mark.slow
async def test_who_waits_while_another_version_takes_its_place_is_told(tmp_path: Path) -> None:
    """A waiting request for a version that a swap removes is refused."""
    held_up = Slow()

    def serves(model: str) -> bool:
        return gateway.pool.serves(gateway.services.registry.resolve(model).id)

    admission = Admission(8, serves=serves)
    async with served(tmp_path, held_up, admission=admission) as gateway:
        await register(gateway, tmp_path, b"second")
        held_up.go.clear()
        promoting = asyncio.create_task(change(gateway, "promote", version=2))
        await until(lambda: held_up.waiting)
        late = asyncio.create_task(gateway.ask("hi", model="calc@1"))
        await until(lambda: admission.waiting() + admission.inside())
        held_up.go.set()
        await promoting
        assert (await late).code == "model_not_loaded"
