"""The plan's arithmetic against transformers, Megatron, and figures that others published."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cray_agents.cli import app
from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.considered_runs import BuildCounts
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.planning.arithmetic import (
    adapter_weights,
    count_weights,
    flops_per_scored_token,
    flops_per_token,
    weights_per_token,
)
from cray_agents.trainers.planning.plan import Cluster, Workload, make_plan, node_bytes
from cray_agents.trainers.planning.step_time import find_gpu, identify, peak_flops, slowdown
from cray_agents.training_jobs import Layout, Lora
from tests.support.trainers.model_configs import (
    LLAMA_2_7B,
    LLAMA_2_70B,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    hyper,
    written,
)

KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3-tied", "qwen3_moe", "mixtral")


# ---- files
LARGE = {
    # name: config, GPUs, GB that a node loads, saves, publishes; GB that a serving node reads
    "8B": (LLAMA_31_8B, 8, 16.06, 96.4, 16.06, 16.06),
    "70B": (LLAMA_2_70B, 64, None, 103.5, 17.24, 137.95),
    "235B-A22B": (QWEN3_235B_A22B, 64, None, 352.6, 58.77, 470.19),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_run_fits_and_its_nodes_bytes_are_known(name: str, tmp_path: Path) -> None:
    config, gpus, load, *others = LARGE[name]
    model = written(tmp_path, config)
    plan = make_plan(model, Workload(1e9, 4096), Cluster(find_gpu("H100"), gpus), hyper())
    assert plan.choice is not None and plan.choice.fits and plan.files is not None
    found = plan.files
    assert [x / 1e9 for x in (found.save, found.publish, found.swap)] == pytest.approx(
        others, rel=1e-3
    )
    # no node reads more than the model, nor less than its share of it
    assert found.publish <= found.load <= found.swap
    if load is not None:
        assert found.load / 1e9 == pytest.approx(load, rel=1e-3)


def test_a_node_loads_what_its_ranks_hold(tmp_path: Path) -> None:
    model = written(tmp_path, MIXTRAL_8X7B)
    counts = count_weights(model)
    dense, experts = 2 * (counts.total - counts.experts), 2 * counts.experts
    for layout, expected in (
        (Layout(data=16), dense + experts),
        (Layout(data=4, tensor=4), dense + experts),
        (Layout(data=1, tensor=16), (dense + experts) / 2),
        (Layout(data=8, pipeline=2), (dense + experts) / 2),
        (Layout(data=4, pipeline=4), (dense + experts) / 2),
        (Layout(data=16, expert=8), dense + experts),
        (Layout(data=8, tensor=2, expert=8), dense + experts / 2),
    ):
        assert node_bytes(model, layout, hyper(), 8).load == pytest.approx(expected), layout


# ---- weights
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_counted_as_transformers_has_them(lab: Any, kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = lab.models(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert count_weights(read_architecture(folder)).total == sum(
        p.numel() for p in model.parameters()
    )


def test_a_token_is_multiplied_with_the_experts_it_is_sent_to(tmp_path: Path) -> None:
    """Mixtral: 12.9 billion active of 46.7, Qwen3-30B-A3B: 3.3, as their makers say."""
    mixtral = written(tmp_path, MIXTRAL_8X7B)
    assert weights_per_token(mixtral) + count_weights(mixtral).embedding == 12_879_925_248
    qwen = written(tmp_path, QWEN3_30B_A3B)
    assert (weights_per_token(qwen) + count_weights(qwen).embedding) / 1e9 == pytest.approx(
        3.35, abs=0.01
    )


def test_adapters_are_counted_as_peft_would(tmp_path: Path) -> None:
    """Rank r: r (in + out) per linear; q, k and v share an A here, as do gate and up."""
    model = written(tmp_path, LLAMA_31_8B)
    linears = {
        "qkv": (4096, 6144),
        "proj": (4096, 4096),
        "fc1": (4096, 28672),
        "fc2": (14336, 4096),
    }
    expected = 32 * 8 * sum(a + b for a, b in linears.values())
    assert adapter_weights(model, Lora(rank=8)) == expected
    assert adapter_weights(model, Lora(rank=8, targets=["proj"])) == 32 * 8 * 8192


def test_operations_of_a_token_are_those_of_the_papers(tmp_path: Path) -> None:
    """Megatron's 72 B L s h^2 (1 + s / 6h + V / 12 h L), arXiv 2104.04473 eq. 3 without recompute.

    It is of a model whose feed-forward layers have 8 h^2 weights, and counts no norms.
    """
    hidden, layers, length, vocab = 4096, 24, 2048, 51200
    model = written(
        tmp_path,
        LLAMA_2_7B
        | {"num_hidden_layers": layers, "intermediate_size": 8 * hidden, "vocab_size": vocab},
    )
    norms = 6 * (2 * layers + 1) * hidden
    gated = 6 * layers * (3 * 8 - 8) * hidden**2  # this one's are three times as large
    paper = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * hidden * layers))
    assert flops_per_token(model, length) == pytest.approx(paper + gated + norms, rel=1e-12)


def test_lora_costs_two_thirds_and_its_adapters(tmp_path: Path) -> None:
    model, lora = written(tmp_path, LLAMA_31_8B), Lora(rank=8)
    whole, low = flops_per_token(model, 0), flops_per_token(model, 0, lora)
    assert low == whole * 2 / 3 + 6 * adapter_weights(model, lora)


# ---- GPUs
@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_gpus_are_known_by_the_names_cuda_gives(device: str, teraflops: float) -> None:
    assert peak_flops(device) == teraflops * 1e12


def test_an_unknown_gpu_is_not_guessed() -> None:
    assert peak_flops("NVIDIA H1000") is None
    assert identify("NVIDIA A100-SXM4-40GB") == find_gpu("a100-40gb")
    with pytest.raises(BadInput, match=r"known are .*H200"):
        find_gpu("H2000")


# ---- time and money, as published
H100 = find_gpu("H100")


def test_eight_h100_for_an_hour_cost_what_a_p5_does() -> None:
    cluster = Cluster(H100, 8, price=12.5)
    assert cluster.dollars(3600) == 100
    assert replace(cluster, spare_nodes=2).dollars(3600) == 300  # they are paid for, too
    assert Cluster(find_gpu("B200"), 8).dollars(3600) is None


def test_methods_that_compare_read_the_data_once_more(tmp_path: Path) -> None:
    model = written(tmp_path, LLAMA_31_8B)
    cluster = Cluster(find_gpu("H200"), 8)

    def flops(method: Any, epochs: float) -> float:
        return make_plan(model, Workload(1e6, 1024, epochs, method), cluster, hyper()).flops

    once = flops("sft", 1)
    assert flops("sft", 3) == pytest.approx(3 * once)
    assert flops("dpo", 1) == pytest.approx(once * 4 / 3)
    assert flops("dpo", 3) == pytest.approx(once * (3 + 1 / 3))
    assert flops("kto", 3) == pytest.approx(once * (3 + 5 / 3))


# ---- the command
def cli(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", "train", *map(str, words)])


def test_the_command_plans_a_directory(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_31_8B)
    words = ("--model", tmp_path, "--tokens", "1e9", "--gpus", 8, "--gpu", "H100")
    made = json.loads(cli(*words, "--json").stdout)
    assert made["parameters"] == 8_030_261_248
    assert made["layout"]["tensor"] == 2
    flops = 1e9 * (6 * 7_504_924_672 + 12 * 32 * 4096 * 4096)
    assert made["flops"] == flops
    sizes = hyper(max_tokens_per_microbatch=made["microbatch_tokens"])
    layout = Layout(**made["layout"])
    slower = slowdown(read_architecture(tmp_path), layout, sizes, 4096, 8, gpu=find_gpu("H100"))
    assert made["seconds"] == pytest.approx(flops / (H100.reached * 989.4e12 * 8) * slower)
    assert made["cluster"]["mfu"] == H100.reached
    half = json.loads(cli(*words, "--json", "--mfu", H100.reached / 2).stdout)
    assert half["seconds"] == pytest.approx(2 * made["seconds"])
    fp8 = json.loads(cli(*words, "--json", "--fp8", "tensorwise").stdout)
    assert fp8["seconds"] < made["seconds"] / 1.2
    assert made["dollars"] == pytest.approx(made["gpu_hours"] * 4.92)
    assert made["layouts"][0]["hours"] == pytest.approx(made["seconds"] / 3600)
    said = cli(*words)
    assert said.exit_code == 0
    text = " ".join(said.stdout.split())
    for word in ("8,030,261,248 parameters", "data=4 tensor=2", "GPU-hours", "recompute"):
        assert word in text
    # FlashAttention 2 is slower than 3
    plain, attention = made["without_transformer_engine"]
    assert 1 < attention < attention + 0.05 < plain < 1.4
    assert f"without Transformer Engine {plain - 1:.0%} longer, and {attention - 1:.0%}" in text


def test_the_command_plans_the_transformers_backend_and_a_teacher(tmp_path: Path) -> None:
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    for folder, layers in ((student, 2), (teacher, 8)):
        folder.mkdir()
        written(folder, LLAMA_31_8B | {"num_hidden_layers": layers})
    words = ("--model", student, "--tokens", "1e6", "--gpus", 8, "--method", "distill", "--json")
    megatron = json.loads(cli(*words).stdout)
    made = json.loads(cli(*words, "--backend", "transformers").stdout)
    assert made["parameters"] == megatron["parameters"]
    assert {row["sharding"] for row in made["layouts"]} == {"optimizer", "full"}
    assert {row["sharding"] for row in megatron["layouts"]} == {"optimizer"}
    assert {row["data"] for row in made["layouts"]} == {8}
    assert "teacher" not in made["memory_gib"]
    judged = json.loads(cli(*words, "--teacher", teacher).stdout)
    more = flops_per_scored_token(read_architecture(teacher), 4096)
    more -= flops_per_scored_token(read_architecture(student), 4096)
    assert judged["flops"] == pytest.approx(megatron["flops"] + 1e6 * more)
    weights = count_weights(read_architecture(teacher)).total
    assert judged["memory_gib"]["teacher"] * 2**30 > 2 * weights / judged["layout"]["tensor"]
    assert any("the teacher takes" in reason for reason in judged["reasons"])


def test_the_command_plans_a_size(tmp_path: Path) -> None:
    words = ("--model", "70B", "--bytes", 15.6e6, "--bytes-per-token", 1, "--gpus", 1)
    made = json.loads(cli(*words, "--json").stdout)
    assert made["gpu_hours"] == pytest.approx(4.60, abs=0.01)
    assert made["least_gib"] == pytest.approx(70e9 * 18 / 2**30)
    assert (made["layout"], made["layouts"]) == (None, [])
    said = cli(*words).stdout
    assert "4.6 h" in said
    assert "0.125 s at 1 Gb/s" in said
    assert "config.json" in said


def test_the_command_reads_a_dataset(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    counts = BuildCounts(DatasetRecipe(loop="l"))
    counts.splits["train"] = Counter(samples=10, tokens=5000)
    counts.splits["validation"] = Counter(samples=90, tokens=9000)
    home.dataset("ds").mkdir(parents=True)
    (home.dataset("ds") / "manifest.json").write_text(json.dumps(counts.manifest_fields()))
    words = ("--model", "7B", "--home", home.root, "--epochs", 2, "--json", "--dataset")
    made = json.loads(cli(*words, "ds").stdout)
    assert made["workload"]["tokens"] == 5000
    assert made["workload"]["sequence_length"] == 500
    assert made["flops"] == 6 * 7e9 * 5000 * 2
    assert isinstance(cli(*words, "none").exception, NotFound)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "7B"], "--dataset, --tokens, --samples or --bytes"),
        (["--model", "7B", "--tokens", 5, "--bytes", 5], "once"),
        (["--model", "7B", "--tokens", 5, "--gpu", "H9"], "no GPU 'H9' is known"),
        (["--model", "7B", "--tokens", 5, "--mfu", 40], "--mfu 40 must be above 0 and at most 1"),
        (["--model", "7B", "--tokens", 5, "--method", "ppo"], "sft, dpo, kto, grpo, distill"),
        (["--model", ".", "--tokens", 5, "--teacher", "."], "no effect with --method sft"),
        (
            ["--model", ".", "--tokens", 5, "--backend", "megatron-bridge"],
            "its layouts are not planned",
        ),
        (
            ["--model", ".", "--tokens", 5, "--backend", "other"],
            "choose one of megatron, transformers",
        ),
        (["--model", "7B", "--tokens", 5, "--backend", "megatron"], "give --model DIR"),
        (["--model", "7B", "--tokens", 5, "--gpus", 9, "--nodes", 1], "--nodes 1"),
        (["--model", "7B", "--tokens", 5, "--fp8", "int4"], "tensorwise, delayed, blockwise"),
        (["--model", "7B", "--tokens", 5, "--recompute", "all"], "--recompute 'all' names 'all'"),
        (["--model", "7B", "--tokens", "inf"], "--tokens inf must be above 0"),
        (["--model", ".", "--tokens", 5, "--sequence-length", 9999], "attends to 4,096"),
        (["--model", ".", "--tokens", 5, "--microbatch-tokens", 99], "--microbatch-tokens 99"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planned_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], says: str
) -> None:
    written(tmp_path, LLAMA_2_7B)
    monkeypatch.chdir(tmp_path)
    refused = cli(*words).exception
    assert isinstance(refused, BadInput)
    assert says in str(refused)


@pytest.mark.slow
def test_planning_needs_no_torch() -> None:
    """`plan` answers on a machine that only starts jobs."""
    script = (
        "import sys, cray_agents.cli.plan, cray_agents.trainers.planning.plan\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
