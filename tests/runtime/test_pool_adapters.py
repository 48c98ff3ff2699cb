"""Adapters in a pool of scripted engines: loaded, evicted, and merged where there is no room."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError, EngineUnavailable, SwapError
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.registry import checkpoints
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_pool import Mortal, ask, checkpoint, probe, says_version, serving, until


def adapter(folder: Path, number: int, *, parent: int = 1, rank: int = 4) -> Path:
    """A checkpoint as `checkpoint` makes them, that a LoRA job left."""
    directory = checkpoint(folder, number)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"parent_sha256": str(parent)}))
    (directory / checkpoints.ADAPTER).mkdir(exist_ok=True)
    (directory / checkpoints.ADAPTER / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return directory


def over(folder: Path, number: int, *, base: int = 1, rank: int = 4) -> Path:
    """A version that is an adapter alone, over the checkpoint of another number."""
    directory = adapter(folder, number, rank=rank)
    manifest = json.loads((directory / "manifest.json").read_text())
    below = {"base": checkpoint(folder, base).name, "base_sha256": str(base)}
    (directory / "manifest.json").write_text(json.dumps(manifest | below))
    return directory


def named(directory: Path) -> str:
    return f"m@{directory.name[1:]}"


def host(script: Any = says_version) -> InProcessEngine:
    return InProcessEngine(ScriptedEngine(script), lora_rank=8)


def loaded_versions(pool: Pool) -> list[list[str]]:
    return [status["versions"] for status in pool.status()]


class Held:
    """A script whose answers to some versions wait for `go`."""

    def __init__(self, *versions: str) -> None:
        self.versions, self.go = versions, asyncio.Event()

    async def __call__(self, request: dict[str, Any], version: str) -> str:
        if version in self.versions:
            await self.go.wait()
        return version


async def test_of_two_replicas_one_gets_the_candidate_and_a_promotion_gives_it_to_both(
    tmp_path: Path,
) -> None:
    hosts = [host(), host()]
    async with serving(tmp_path, *hosts) as pool:
        await pool.stage(adapter(tmp_path, 2), "m@2", probe(2))
        assert sorted(loaded_versions(pool)) == [["m@1"], ["m@1", "m@2"]]
        assert sorted(status["version"] for status in pool.status()) == ["m@1", "m@2"]
        await pool.swap(adapter(tmp_path, 2), "m@2", probe(2))
        assert loaded_versions(pool) == [["m@1", "m@2"]] * 2
        loaded = [list(host.engine.loaded) for host in hosts]  # type: ignore[attr-defined]
        await pool.swap(checkpoint(tmp_path, 1), "m@1", probe(1))
        assert [status["version"] for status in pool.status()] == ["m@1", "m@1"]
        await pool.swap(adapter(tmp_path, 2), "m@2", probe(2))
        assert [host.engine.loaded for host in hosts] == loaded  # type: ignore[attr-defined]


async def test_the_incumbent_the_last_good_one_and_what_is_needed_stay(tmp_path: Path) -> None:
    async with serving(tmp_path, host()) as pool:
        for number in (2, 3):
            await pool.swap(adapter(tmp_path, number), f"m@{number}", probe(number))
        await pool.stage(adapter(tmp_path, 4), "m@4", probe(4))
        await pool.stage(adapter(tmp_path, 5), "m@5", probe(5), protected=["m@4"])
        assert loaded_versions(pool) == [["m@1", "m@2", "m@3", "m@4", "m@5"]]
        await pool.stage(adapter(tmp_path, 6), "m@6", probe(6))
        assert loaded_versions(pool) == [["m@1", "m@2", "m@3", "m@6"]]


async def test_an_adapter_stays_as_long_as_it_answers_and_takes_a_place(tmp_path: Path) -> None:
    busy = [f"m@{number}" for number in (2, 3, 4, 5)]
    script = Held(*busy)
    async with serving(tmp_path, host(script), drain_timeout=0.1) as pool:
        answers = []
        for number, version in enumerate(busy, 2):
            await pool.stage(adapter(tmp_path, number), version, probe(number))
            answers.append(asyncio.create_task(ask(pool, version)))
            await asyncio.sleep(0)  # it is in flight
        assert pool.status()[0]["in_flight"] == 4
        with pytest.raises(SwapError, match="no room for the adapter of m@6: m@2, m@3, m@4, m@5"):
            await pool.stage(adapter(tmp_path, 6), "m@6", probe(6))
        script.go.set()
        assert await asyncio.gather(*answers) == busy
        await pool.stage(adapter(tmp_path, 6), "m@6", probe(6))
        assert loaded_versions(pool) == [["m@1", "m@6"]]


async def test_weights_change_when_no_request_is_under_an_adapter(tmp_path: Path) -> None:
    script = Held("m@1", "m@2")
    async with serving(tmp_path, host(script), swap_mode="keep") as pool:
        await pool.stage(adapter(tmp_path, 2), "m@2", probe(2))
        kept, ends = (asyncio.create_task(ask(pool, version)) for version in ("m@1", "m@2"))
        await until(lambda: pool.status()[0]["in_flight"] == 2)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 3), "m@3", probe(3)))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        assert not swap.done()
        script.versions = ("m@1",)
        script.go.set()
        assert await ends == "m@2" and (await swap).passed and loaded_versions(pool) == [["m@3"]]
        await kept


async def test_a_revived_replica_has_its_adapters_but_for_what_cannot_be_proven(
    tmp_path: Path,
) -> None:
    replica = Mortal(ScriptedEngine(says_version))
    replica.lora_rank = 8
    async with serving(tmp_path, replica) as pool:
        await pool.swap(adapter(tmp_path, 2), "m@2", probe(2))
        await pool.stage(adapter(tmp_path, 3), "m@3", probe(3))
        manifest = tmp_path / "c3" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("-5.0", "-5.5"))
        replica.die()
        await until(lambda: pool.status()[0]["restarts"] == 1 and pool.ready)
        assert loaded_versions(pool) == [["m@1", "m@2"]]
        assert await ask(pool, "m@2") == "m@2"


@pytest.mark.parametrize("why", ["parent", "rank", "stored", "shape", "off"])
async def test_what_is_no_adapter_over_what_is_held_is_loaded_merged(
    tmp_path: Path, why: str
) -> None:
    replica = host()
    directory = adapter(
        tmp_path, 2, parent=7 if why == "parent" else 1, rank=9 if why == "rank" else 4
    )
    if why == "off":
        replica.lora_rank = 0
    configs: dict[str, dict[str, Any]] = {
        "stored": {"dtype": "bfloat16"},  # rounded when they were merged: the probe tells
        "shape": {"hidden_size": 8},
    }
    for folder in [directory, *([checkpoint(tmp_path, 1)] if why == "stored" else [])]:
        (folder / "config.json").write_text(json.dumps(configs.get(why, {})))
    async with serving(tmp_path, replica) as pool:
        await pool.stage(directory, "m@2", probe(2))
        assert loaded_versions(pool) == [["m@2"]]


async def test_an_adapter_alone_brings_its_base_and_its_rank(tmp_path: Path) -> None:
    replica = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, replica, name_of=named) as pool:
        await pool.swap(over(tmp_path, 2), "m@2", probe(2))
        assert (replica.starts, replica.lora_rank) == (2, 4), "it had to start for adapters"
        await pool.stage(over(tmp_path, 3), "m@3", probe(3))
        assert loaded_versions(pool) == [["m@1", "m@2", "m@3"]] and replica.starts == 2
        await pool.stage(over(tmp_path, 4, rank=8), "m@4", probe(4))
        assert loaded_versions(pool) == [["m@1", "m@2", "m@4"]]
        assert (replica.starts, replica.lora_rank) == (3, 8)
        await pool.stage(over(tmp_path, 6, base=5), "m@6", probe(6))
        assert loaded_versions(pool) == [["m@5", "m@6"]] and replica.starts == 3
        assert [await ask(pool, v) for v in ("m@5", "m@6")] == ["m@5", "m@6"]
        replica.die()
        await until(lambda: pool.status()[0]["restarts"] == 1 and pool.ready)
        assert loaded_versions(pool) == [["m@5", "m@6"]]
        gone = over(tmp_path, 8, base=7)
        (tmp_path / "c7" / "manifest.json").unlink()
        with pytest.raises(SwapError, match="c8 is an adapter over c7, and that is gone"):
            await pool.stage(gone, "m@8", probe(8))
        assert loaded_versions(pool) == [["m@5", "m@6"]]


@pytest.mark.parametrize("refuses", ["starts", "loads"])
async def test_where_the_engine_takes_no_adapters_they_are_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """It does not start with them, or not with those of such layers."""
    import torch
    from safetensors.torch import load_file, save_file

    class Refusing(Mortal):
        async def start(self, checkpoint: Path, version: str) -> None:
            if self.lora_rank and refuses == "starts":
                raise EngineUnavailable("it ended")
            await super().start(checkpoint, version)

    class Engine(ScriptedEngine):
        async def load_adapter(self, directory: Path, name: str) -> ScriptedEngine:
            raise EngineError("expected target modules in")

    layer = "q_proj"
    weights = {f"model.{layer}.weight": torch.ones(2, 3), "model.y.weight": torch.ones(2)}
    save_file(weights, checkpoint(tmp_path, 1) / "model.safetensors", {"format": "pt"})
    directory = over(tmp_path, 2, rank=1)
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [-1.0]])
    pair = {"lora_A": a, "lora_B": b}
    adapters = {f"base_model.model.model.{layer}.{name}.weight": one for name, one in pair.items()}
    save_file(adapters, directory / "adapter" / "adapter_model.safetensors")
    config = {"r": 1, "lora_alpha": 2, "target_modules": [layer], "fan_in_fan_out": False}
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    replica = Refusing(Engine(says_version))
    async with serving(tmp_path, replica, name_of=named) as pool:
        await pool.stage(directory, "m@2", probe(2))
        assert loaded_versions(pool) == [["m@2"]] and await ask(pool, "m@2") == "m@2"
        merged = load_file(directory / "merged" / "model.safetensors")
        assert torch.equal(merged[f"model.{layer}.weight"], 1 + 2 * b @ a)
        assert torch.equal(merged["model.y.weight"], torch.ones(2))
        await pool.stage(checkpoint(tmp_path, 1), "m@1", probe(1))
        await pool.stage(directory, "m@2", probe(2))
        told = caplog.text.count("adapters are merged when they are loaded here")
        assert told == 1 and replica.starts == (2 if refuses == "starts" else 3)
