"""GPU assignment of replicas; no GPU is needed."""

import pytest

from cray_agents.errors import BadInput, SetupError
from cray_agents.runtime.pool.gpu_assignment import assign_gpus, gpus_per_server
from cray_agents.runtime.pool.vllm_replica import EngineSettings, environment


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--tensor-parallel-size=2", "-dp", "3", "--max-model-len", "4096"], 6),
        (["--tensor_parallel_size", "4", "--pipeline-parallel-size", "2"], 8),
        (["-tp", "4", "-tp", "2"], 2),
        (["--data-parallel-size-local", "4"], 1),
    ],
)
def test_how_many_gpus_a_server_takes(args: list[str], gpus: int) -> None:
    assert gpus_per_server(args) == gpus


@pytest.mark.parametrize("args", [["-tp", "two"], ["-tp"], ["--tensor-parallel-size=0"]])
def test_a_size_that_is_none(args: list[str]) -> None:
    with pytest.raises(BadInput, match="is no number"):
        gpus_per_server(args)


def test_each_replica_has_its_own() -> None:
    assert assign_gpus(3, [], {}, 8) == ["0", "1", "2"]
    assert assign_gpus(2, ["-tp", "2"], {}, 4) == ["0,1", "2,3"]
    named = {"CUDA_VISIBLE_DEVICES": "7, GPU-5f,2,1,-1,0"}
    assert assign_gpus(2, ["-tp", "2"], named, 8) == ["7,GPU-5f", "2,1"]


@pytest.mark.parametrize(
    ("visible", "gpu_count", "words"),
    [
        ({}, 3, "2 replica(s) of 2 GPU(s) each need 4, and this host has 3"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 8, "CUDA_VISIBLE_DEVICES=4,5 has 2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, "has 0"),
    ],
)
def test_too_few(visible: dict[str, str], gpu_count: int, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        assign_gpus(2, ["-tp", "2"], visible, gpu_count)
    assert words in str(caught.value)


def test_a_replica_is_shown_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment(EngineSettings(), "2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(EngineSettings())["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
