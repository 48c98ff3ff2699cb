"""Serving plan: what is chosen for a model on a device; no GPU and no vLLM is needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import Config, load_config
from cray_agents.errors import BadInput, ConfigError, SetupError
from cray_agents.records import LogprobDistance
from cray_agents.runtime.pool.serving_plan import (
    ServedModel,
    ServingDevice,
    check_fast_rollouts,
    check_kv_tier,
    plan_serving,
)
from cray_agents.runtime.pool.vllm_process import EngineSettings, command
from cray_agents.server.platform_process import ReplicaCount
from cray_agents.server.replica_count import serving_device
from cray_agents.trainers.planning.cluster_resources import cpu_has_bfloat16

TOY = ServedModel("toy", 1_600_000, "float32", 1024, 2 * 2 * 3 * 32)
SMOLLM2 = ServedModel("SmolLM2-135M", 269_060_552, "bfloat16", 8192, 30 * 2 * 3 * 64)
LLAMA_1B = ServedModel("1B", 2_470_000_000, "bfloat16", 131_072, 16 * 2 * 8 * 64)
LLAMA_8B = ServedModel("8B", 16_060_000_000, "bfloat16", 131_072, 32 * 2 * 8 * 128)
LLAMA_70B = ServedModel("70B", 141_100_000_000, "bfloat16", 131_072, 80 * 2 * 8 * 128)
LAPTOP = ServingDevice(24, cores=2, bfloat16=True)
OLD_LAPTOP = ServingDevice(24, cores=2)
RTX, A100 = ServingDevice(24, 1, "RTX-4090"), ServingDevice(80, 1, "A100")
H100, H200 = ServingDevice(79, 1, "H100"), ServingDevice(140, 1, "H200")
FOUR_H100, UNKNOWN = ServingDevice(79, 4, "H100"), ServingDevice(gpus=1)


def chosen(config: Config) -> tuple[Any, ...]:
    return (
        *(config.dtype, config.threads, config.max_num_seqs, config.kv_cache_gib),
        *(config.start_timeout, config.load_timeout, config.swap_timeout),
    )


@pytest.mark.parametrize(
    ("model", "device", "expected", "told"),
    [  # dtype, threads, requests, KV cache, and seconds to start, to load and to wait
        (TOY, LAPTOP, ("float32", 1, 64, 1, 300, 300, 120), "1024 tokens"),
        (SMOLLM2, LAPTOP, ("bfloat16", 2, 64, 3, 301, 301, 121), "8192 tokens of context (the mo"),
        (
            SMOLLM2,
            OLD_LAPTOP,
            ("float32", 2, 64, 3, 301, 301, 121),
            "bfloat16, and a CPU without it",
        ),
        (LLAMA_1B, LAPTOP, ("bfloat16", 2, 64, 3, 312, 312, 132), "about 98304 tokens of context"),
        (LLAMA_8B, LAPTOP, ("bfloat16", 2, 48, 3, 375, 375, 195), "about 24576 tokens of context"),
        (TOY, RTX, ("auto", 0, 256, 0, 300, 300, 120), "1024 tokens"),
        (LLAMA_8B, RTX, ("auto", 0, 87, 0, 375, 375, 195), "about 44"),
        (LLAMA_8B, A100, ("auto", 0, 256, 0, 375, 375, 195), "131072 tokens of context"),
        (LLAMA_8B, H100, ("auto", 0, 835, 0, 375, 375, 195), "131072 tokens of context"),
        (LLAMA_8B, H200, ("auto", 0, 1024, 0, 375, 375, 195), "131072 tokens of context"),
        (LLAMA_70B, FOUR_H100, ("auto", 0, 878, 0, 957, 957, 777), "131072 tokens of context"),
        (LLAMA_70B, UNKNOWN, ("auto", 0, 256, 0, 957, 957, 777), "1 GPU of unknown memory"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_model_device_and_memory_decide(
    model: ServedModel, device: ServingDevice, expected: tuple[Any, ...], told: str
) -> None:
    config, line = plan_serving(Config(), model, device)
    assert chosen(config) == expected
    assert told in line and "\n" not in line
    assert config.max_model_len == 0, "vLLM takes what fits"


@pytest.mark.parametrize("device", [LAPTOP, RTX, H100])
def test_weights_that_do_not_fit_are_refused(device: ServingDevice) -> None:
    with pytest.raises(BadInput, match=r"the weights of 70B take 131.4 GiB"):
        plan_serving(Config(), LLAMA_70B, device)


def test_what_is_set_is_taken_and_said() -> None:
    given: dict[str, Any] = {
        "max_model_len": 4096, "max_num_seqs": 7, "dtype": "float32", "threads": 1,
        "kv_cache_gib": 0.5, "start_timeout": 9, "load_timeout": 8, "swap_timeout": 7,
    }  # fmt: skip
    config, line = plan_serving(Config(**given), SMOLLM2, LAPTOP)
    assert config == Config(**given)
    assert all(f"({key} is set)" in line for key in given), line
    assert "4096 tokens of context" in line
    on_gpu = plan_serving(Config(threads=3), SMOLLM2, H100)[1]
    assert "threads has no effect" in on_gpu and "kv_cache_gib" not in on_gpu


def test_a_model_is_read_as_far_as_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert ServedModel.of("m", tmp_path) == ServedModel("m", 1000)
    text = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    whole = {"dtype": "bfloat16", "text_config": {**text, "max_position_embeddings": 77}}
    latent = {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for config, expected in (
        (whole, ServedModel("m", 1000, "bfloat16", 77, 3 * 2 * 4 * 16)),
        (latent, ServedModel("m", 1000, "float32", 0, 3 * 576)),
        ({"num_hidden_layers": "three", "head_dim": -1}, ServedModel("m", 1000)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert ServedModel.of("m", tmp_path) == expected
    plan, line = plan_serving(Config(), ServedModel("m", 1000), LAPTOP)
    assert chosen(plan)[:4] == ("float32", 1, 64, 1)
    assert "a context that vLLM finds" in line


def test_replicas_of_a_host_share_its_cores_and_memory(tmp_path: Path) -> None:
    one, two = (serving_device(Config(), ReplicaCount(n), gpu=False) for n in (1, 2))
    assert (two.gib, two.cores) == (one.gib / 2, max(1, one.cores // 2))
    assert serving_device(Config(), ReplicaCount(0), gpu=False) == ServingDevice()
    named = load_config({"train_gpu": "H100", "engine_args": ["-tp", "2"]}, tmp_path)
    assert serving_device(named, ReplicaCount(jobs=1), gpu=True) == ServingDevice(79, 2, "H100")
    cpuinfo = tmp_path / "cpuinfo"
    for flags, fast in (("avx2 avx512_bf16", True), ("fpu amx_bf16 x", True), ("avx2", False)):
        cpuinfo.write_text(f"model name\t: x\nflags\t\t: {flags}\n")
        assert cpu_has_bfloat16(cpuinfo) is fast


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--dtype", "half"], "--dtype: give the setting dtype"),
        (["--max-model-len=9"], "--max-model-len: give the setting max_model_len"),
        (["--max_num_seqs", "9"], "--max-num-seqs: give the setting max_num_seqs"),
        (["--logprobs-mode", "raw_logprobs"], "leave it out"),
        (["--speculative-config={}"], "give the settings speculative and speculative_tokens"),
    ],
)
def test_flags_that_would_overrule_a_setting_are_refused(
    tmp_path: Path, flags: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"engine_args": flags}, tmp_path)
    with pytest.raises(ConfigError, match="'bfloat16' or 'float16'"):
        load_config({"dtype": "bf16"}, tmp_path)


def test_the_rounding_that_a_trainer_is_told() -> None:
    assert EngineSettings(dtype="float32").rounding is None
    assert EngineSettings(dtype="float16").rounding == "bfloat16"
    quantized = EngineSettings(dtype="float32", engine_args=("--quantization", "fp8"))
    assert (quantized.rounding, quantized.quantized) == ("bfloat16", "--quantization")
    in_fp8 = EngineSettings(dtype="float32", quantization="fp8")
    assert in_fp8.rounding == "fp8"
    emulated = LogprobDistance(tokens=402, mean=0.205, p99=1.2, max=1.7, equal_argmax=0.88)
    damaged = LogprobDistance(tokens=402, mean=0.5, p99=2.5, max=9.0, equal_argmax=0.88)
    assert not in_fp8.probe_limits.exceeded(emulated) and in_fp8.probe_limits.exceeded(damaged)
    assert EngineSettings(dtype="bfloat16").probe_limits.exceeded(emulated)


@pytest.mark.parametrize(
    ("settings", "gpu", "why"),
    [
        ({"quantization": "fp8"}, False, "quantization = 'fp8' needs replicas on GPUs"),
        ({"quantization": "fp8", "engine_args": ["--quantization=awq"]}, True, "give one"),
        ({"speculative": "ngram"}, False, "computes wrong log-probabilities"),
        ({"speculative": "ngrams"}, True, "neither ngram nor a directory with config.json"),
    ],
)
def test_fp8_and_speculative_decoding_are_refused_where_they_cannot_be(
    tmp_path: Path, settings: dict[str, Any], gpu: bool, why: str
) -> None:
    with pytest.raises(SetupError, match=why):
        check_fast_rollouts(load_config(settings, tmp_path), gpu=gpu)


def test_the_memory_before_a_kv_tier_holds_some_steps_of_prompts(tmp_path: Path) -> None:
    config = load_config({"kv_tier": str(tmp_path)}, tmp_path)
    for model, device, gib in ((TOY, LAPTOP, 1), (LLAMA_70B, FOUR_H100, 10)):
        assert plan_serving(config, model, device)[0].kv_tier_memory_gib == gib
    assert "KV tier" not in plan_serving(load_config({}, tmp_path), TOY, LAPTOP)[1]


@pytest.mark.parametrize(
    ("settings", "sleeps", "why"),
    [
        ({"router_replay": True}, False, "router_replay"),
        ({"replica_nodes": 2}, False, "replica_nodes"),
        ({}, True, "share_gpus"),
        ({"engine_args": ["--no-enable-prefix-caching"]}, False, "--no-enable-prefix-caching"),
    ],
)
def test_a_kv_tier_is_refused_beside_what_vllm_cannot_do_with_it(
    tmp_path: Path, settings: dict[str, Any], sleeps: bool, why: str
) -> None:
    check_kv_tier(load_config(settings, tmp_path), sleeps=sleeps)
    settings = settings | {"kv_tier": str(tmp_path / "kv")}
    with pytest.raises(SetupError, match=f"kv_tier does not go with .*{why}"):
        check_kv_tier(load_config(settings, tmp_path), sleeps=sleeps)


def test_fp8_and_speculative_decoding_on_a_gpus_command_line(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    draft = str(tmp_path / "draft")
    config = load_config({"quantization": "fp8", "speculative": draft}, tmp_path)
    check_fast_rollouts(config, gpu=True)

    def line(**settings: Any) -> str:
        return " ".join(command(Path("/model"), ("m",), EngineSettings(**settings)))

    assert "--quantization" not in line() and "--speculative-config" not in line()
    assert "--quantization fp8_per_channel" in line(quantization="fp8")  # "fp8": stored so
    guess = json.dumps({"model": draft, "num_speculative_tokens": 2})
    assert f"--speculative-config {guess}" in line(speculative=draft, speculative_tokens=2)
    assert '{"method": "ngram", "num_speculative_tokens": 4}' in line(speculative="ngram")
