"""Load format: which reader of weights vLLM is started with; no GPU and no reader is needed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cray_agents.config import Config
from cray_agents.errors import SetupError
from cray_agents.runtime.pool.serving_plan import FAST, load_format
from cray_agents.runtime.pool.vllm_process import EngineSettings, command


def installed(*packages: str) -> Callable[[str], bool]:
    return lambda name: name in packages


ALL = installed(*FAST.values())


@pytest.mark.parametrize(
    ("packages", "gpu", "chosen"),
    [
        (ALL, True, "instanttensor"),
        (installed("fastsafetensors", "runai_model_streamer"), True, "fastsafetensors"),
        (installed("runai_model_streamer"), True, "runai_streamer"),
        (installed(), True, "auto"),
        (ALL, False, "auto"),
    ],
)
def test_the_fastest_installed_reader_on_gpus_and_vllms_own_on_cpu(
    packages: Callable[[str], bool], gpu: bool, chosen: str
) -> None:
    assert load_format("auto", gpu=gpu, has_package=packages) == chosen


def test_a_named_reader_is_taken_if_it_is_installed() -> None:
    assert load_format("fastsafetensors", gpu=True, has_package=ALL) == "fastsafetensors"
    assert load_format("safetensors", gpu=True, has_package=ALL) == "safetensors"
    assert load_format("runai_streamer", gpu=False, has_package=ALL) == "runai_streamer"


@pytest.mark.parametrize(
    ("wanted", "gpu", "why"),
    [
        ("tensorizer", True, "is none of auto, safetensors, instanttensor.* Usable here: auto, sa"),
        ("instanttensor", True, "needs the package instanttensor.* Usable here: .*runai_streamer"),
        ("fastsafetensors", False, "reads to GPUs alone"),
    ],
)
def test_others_are_refused_with_what_is_usable(wanted: str, gpu: bool, why: str) -> None:
    packages = installed("fastsafetensors", "runai_model_streamer")
    with pytest.raises(SetupError, match=f"load_format = '{wanted}' {why}"):
        load_format(wanted, gpu=gpu, has_package=packages)


def test_it_stands_on_the_command_line_unless_vllm_chooses() -> None:
    assert "--load-format" not in command(Path("/model"), ("m",), EngineSettings())
    settings = EngineSettings(load_format="fastsafetensors", engine_args=("--load-format", "mine"))
    line = command(Path("/model"), ("m",), settings)
    places = [n for n, word in enumerate(line) if word == "--load-format"]
    assert [line[n + 1] for n in places] == ["fastsafetensors", "mine"], "the user's comes last"
    assert Config().load_format == EngineSettings().load_format
