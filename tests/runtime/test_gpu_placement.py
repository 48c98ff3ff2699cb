"""GPU placement: which GPUs of a host serve and which train; told numbers, no GPU is needed."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.runtime.pool.vllm_process import EngineSettings, environment
from cray_agents.runtime.scheduler.gpu_placement import (
    GpuPlacement,
    check_weights_fit,
    gpus_per_server,
    place_gpus,
    place_on_host,
    visible_gpus,
)

EIGHT = [str(number) for number in range(8)]
#: What a refusal proposes, by the argument that it changes.
REMEDIES = {
    "replicas": r"--replicas (\d+)",
    "each": r"at most (\d+) GPUs? a replica",
    "training": r"train_gpus_per_node = (\d+)",
}


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


def test_visible_gpus_are_those_that_the_platform_may_use() -> None:
    assert visible_gpus({}, 3) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 8) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, 8) == []
    named = {"CUDA_VISIBLE_DEVICES": "7, GPU-5f,MIG-9a,2,1,-1,0"}
    assert visible_gpus(named, 8) == ["7", "GPU-5f", "MIG-9a", "2", "1"]


@pytest.mark.slow
@given(
    total=st.integers(0, 17),
    replicas=st.integers(0, 5),
    each=st.integers(1, 5),
    spares=st.integers(0, 3),
    training=st.none() | st.integers(0, 9),
)
def test_each_gpu_has_one_use_and_all_that_is_asked_is_given_or_refused(
    total: int, replicas: int, each: int, spares: int, training: int | None
) -> None:
    gpus = [f"GPU-{number}" for number in range(total)]
    asked: dict[str, Any] = {"replicas": replicas, "each": each, "training": training}
    if replicas * each + (1 if training is None else training) > total:
        with pytest.raises(BadInput) as refused:
            place_gpus(gpus, **asked, spares=spares)
        for key, remedy in REMEDIES.items():
            if found := re.search(remedy, str(refused.value)):
                place_gpus(gpus, **asked | {key: int(found[1])})
        if "train_gpus = 'off'" in str(refused.value):
            place_gpus(gpus, **asked | {"training": 0})
        return
    placed = place_gpus(gpus, **asked, spares=spares)
    shares = [*placed.replicas, *placed.spares, placed.training]
    used = [gpu for share in shares for gpu in share]
    assert len(set(used)) == len(used) and set(used) <= set(gpus)
    assert [len(share) for share in placed.replicas] == [each] * replicas
    assert {len(share) for share in placed.spares} <= {each} and len(placed.spares) <= spares
    left = total - replicas * each
    assert len(placed.training) == (left if training is None else training)
    idle = total - len(used)
    assert idle < each or len(placed.spares) == spares  # no spare is left out that would fit


@given(
    total=st.integers(0, 9),
    replicas=st.integers(1, 5),
    each=st.integers(1, 5),
    training=st.none() | st.integers(1, 9),
    share=st.sampled_from(["auto", "turns"]),
)
def test_turns_are_possible_where_each_side_fits_alone(
    total: int, replicas: int, each: int, training: int | None, share: Any
) -> None:
    gpus = [f"GPU-{number}" for number in range(total)]
    asked: dict[str, Any] = {"replicas": replicas, "each": each, "training": training}
    needed = max(replicas * each, training or 1)
    if needed > total:
        with pytest.raises(BadInput, match="even by turns") as refused:
            place_gpus(gpus, **asked, share=share)
        said = str(refused.value)
        assert f"or a host with {needed} GPU" in said or f"fits: a host with {needed} GPU" in said
        found = {key: re.search(remedy, said) for key, remedy in REMEDIES.items()}
        fitting = asked | ({"training": int(found["training"][1])} if found["training"] else {})
        for key in ("replicas", "each"):
            if mended := found[key]:
                place_gpus(gpus, **fitting | {key: int(mended[1])}, share=share)
        if found["training"] and replicas * each <= total:
            place_gpus(gpus, **fitting, share=share)
        return
    placed = place_gpus(gpus, **asked, spares=1, share=share)
    divided = replicas * each + (training or 1) <= total
    assert placed.turns == (share == "turns" or not divided)
    assert [len(each_) for each_ in placed.replicas] == [each] * replicas
    assert set(placed.training) <= set(gpus) and len(placed.training) >= (training or 1)
    if placed.turns:
        assert placed.spares == () and len(placed.training) == (training or total)


def test_weights_that_no_turn_makes_fit_are_refused() -> None:
    check_weights_fit("m@1", 140 * 2**30, each=1, gib=140)
    with pytest.raises(
        BadInput, match=r"m@1 take 141 GiB, .* 1 GPU of 140 .* --tensor-parallel-size 2"
    ):
        check_weights_fit("m@1", 141 * 2**30, each=1, gib=140)


def test_gpus_that_cuda_would_not_show_are_refused() -> None:
    with pytest.raises(BadInput, match="names 1 twice"):
        place_gpus(["1", "0", "1"], replicas=1)
    slices = ["MIG-1", "MIG-2", "MIG-3"]
    with pytest.raises(BadInput, match="MIG instances, of which CUDA shows a process one"):
        place_gpus(slices, replicas=1, each=2)
    assert place_gpus(slices, replicas=2, training=None).training == ("MIG-3",)


def test_the_configuration_is_followed(tmp_path: Path) -> None:
    def placed(replicas: int = 1, here: bool = True, **keys: object) -> GpuPlacement:
        config = load_config({"train_gpu": "H100", **keys}, tmp_path)
        return place_on_host(config, replicas=replicas, here=here, gpus=EIGHT[:4])

    assert placed().training == ("1", "2", "3")
    assert placed(0).training == ("0", "1", "2", "3")  # vLLM on the CPU, or no platform
    assert placed(engine_args=["-tp", "2"]).replicas == (("0", "1"),)
    two = placed(train_gpus_per_node=2)
    assert (two.spares, two.training) == ((("1",),), ("2", "3"))
    assert placed(train_gpus_per_node=2, spare_replicas=0).spares == ()
    site = placed(here=False, train_gpus_per_node=8)
    assert (site.spares, site.training) == ((("1",),), ())
    assert placed(4, train_gpus="off", train_gpu=None).training == ()
    with pytest.raises(BadInput, match=r"need 5 GPUs.*--replicas 3; or train_gpus = 'off'"):
        placed(4, share_gpus="split")
    by_turns = placed(4)
    assert by_turns.turns and by_turns.training == ("0", "1", "2", "3") and by_turns.spares == ()
    assert str(by_turns).endswith(
        "replica 3 has GPU 3, training jobs have GPUs 0, 1, 2, 3, by turns"
    )
    wished = placed(share_gpus="turns", train_gpus_per_node=2)
    assert (wished.replicas, wished.training) == ((("0",),), ("2", "3")) and wished.turns
    assert (
        not placed().turns
        and not placed(share_gpus="turns", train_gpus="off", train_gpu=None).turns
    )
    assert (
        not placed(share_gpus="turns", here=False).turns and not placed(0, share_gpus="turns").turns
    )


def test_a_replica_is_shown_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment(EngineSettings(), "2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(EngineSettings())["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
