"""The choice of a backend, and what is said where Megatron-Bridge is not installed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import choose_backend, read_architecture, with_backend
from cray_agents.trainers.models.megatron_bridge import bridged_kinds
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import (
    BRIDGED,
    check_bridged,
    why_not_bridged,
    why_not_installed,
)
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.arithmetic import weight_share
from cray_agents.trainers.planning.layouts import check_layout
from cray_agents.training_jobs import Hyperparameters, Layout, Lora
from tests.support.trainers.tiny_families import FAMILIES, write_parent

SPLIT = [{"tensor": 2}, {"pipeline": 2}, {"data": 2, "expert": 2}, {"context": 2}]


@pytest.fixture
def sinks(tmp_path: Path) -> Path:
    write_parent(tmp_path / "sinks", FAMILIES["gpt_oss"]())
    return tmp_path / "sinks"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Megatron-Bridge could be imported."""
    monkeypatch.setattr(bridged_kinds, "why_not_installed", lambda: None)


@pytest.mark.parametrize("split", SPLIT)
def test_a_layout_that_splits_a_model_is_bridged(split: dict[str, int], installed: None) -> None:
    assert choose_backend("gpt_oss", None, Layout(**split)) == "megatron-bridge"
    assert choose_backend("gpt_oss", None, Layout(data=4, optimizer_instances=2)) == "transformers"
    assert choose_backend("gpt_oss", None) == "transformers"
    assert choose_backend("qwen3", None, Layout(**split)) == "megatron"  # own tables stay the first
    assert choose_backend("gemma3_text", None, Layout(**split)) == "transformers"
    assert choose_backend("gpt_oss", "transformers", Layout(**split)) == "transformers"


def test_the_way_that_a_layout_needs_enters_the_jobs_id(
    sinks: Path, lab: Any, installed: None
) -> None:
    whole, split = lab.spec(sinks), lab.spec(sinks, layout={"tensor": 2})
    assert whole.id == split.id  # layouts do not count
    assert with_backend(whole, sinks) is whole
    decided = with_backend(split, sinks)
    assert decided.hyperparameters.backend == "megatron-bridge" and decided.id != split.id
    assert with_backend(split, sinks / "missing") is split


def test_an_architecture_is_read_for_the_bridge(sinks: Path, installed: None) -> None:
    model = read_architecture(sinks, "megatron-bridge")
    assert (model.backend, model.network, model.experts) == (
        "megatron-bridge",
        "GptOssForCausalLM",
        4,
    )
    check_layout(model, Layout(data=2, expert=2))
    check_layout(model, Layout(pipeline=2))
    with pytest.raises(BadInput, match=r"tensor=2 cuts its experts.*split it by expert and"):
        check_layout(model, Layout(tensor=2, sequence_parallel=True))
    with pytest.raises(BadInput, match=r"context=2.*not with interleave or context"):
        check_layout(model, Layout(context=2))
    whole = weight_share(model, Layout(), 0)
    half = weight_share(model, Layout(pipeline=2), 0)
    assert whole.dense + whole.experts == model.counted[0]
    assert half.experts == whole.experts // 2 and half.dense < whole.dense
    assert read_parent(sinks, "random", "megatron-bridge") == model
    with pytest.raises(
        BadInput, match=r"'gemma3_text' model with backend=megatron-bridge: .*gpt_oss"
    ):
        choose_backend("gemma3_text", "megatron-bridge")


def test_what_the_bridge_does_not_train_is_refused() -> None:
    check_bridged(Hyperparameters(steps=1))
    with pytest.raises(BadInput, match=r"LoRA with backend=transformers"):
        check_bridged(Hyperparameters(steps=1, lora=Lora()))
    with pytest.raises(BadInput, match=r"fp8=blockwise"):
        check_bridged(Hyperparameters(steps=1, fp8="blockwise", dtype="bfloat16"))


@pytest.mark.skipif(why_not_installed() is None, reason="Megatron-Bridge is installed")
def test_without_megatron_bridge_the_obstacle_is_named(
    sinks: Path, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_backend("gpt_oss", None, Layout(tensor=2)) == "transformers"
    reason = r"Python 3\.12.*cray-agents\[bridge\]|not installed: pip install .*\[bridge\]"
    with pytest.raises(
        BadInput, match=rf"'gpt_oss' model with backend=megatron-bridge: .*({reason})"
    ):
        read_architecture(sinks, "megatron-bridge")
    with pytest.raises(BadInput, match=rf"tensor=2.*only data parallelism.*({reason})"):
        check_layout(read_architecture(sinks), Layout(tensor=2))
    assert all(why_not_bridged(kind) == why_not_installed() for kind in BRIDGED)
    monkeypatch.setattr(bridged_kinds, "sys", SimpleNamespace(version_info=(3, 12, 1)))
    assert why_not_installed() == (
        "Megatron-Bridge 0.6 is not installed: pip install 'cray-agents[bridge]'"
    )
    monkeypatch.setattr(bridged_kinds, "find_spec", lambda name: name)
    versions = {"megatron-bridge": "0.6.9", "megatron-core": "0.16.1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert (
        "megatron-core 0.16.1 is installed, and backend=megatron-bridge was tried with 0.19"
        in str(why_not_installed())
    )
    versions["megatron-core"] = "0.19.0"
    assert why_not_installed() is None


@pytest.mark.slow
def test_nothing_imports_megatron_bridge_before_a_bridged_job() -> None:
    program = (
        "import sys\n"
        "from cray_agents.trainers.models import backends\n"
        "from cray_agents.trainers.job import rank\n"
        "from cray_agents.trainers.models.architecture import choose_backend\n"
        "from cray_agents.training_jobs import Layout\n"
        "choose_backend('gpt_oss', None, Layout(tensor=2))\n"
        "print([name for name in sys.modules if name.startswith('megatron')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip().startswith("[") and "megatron.bridge" not in done.stdout, done.stderr
