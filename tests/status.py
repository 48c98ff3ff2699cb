"""Status: where each feature runs, by the tests that prove it; docs/status.md is made of this.

python -m tests.status              writes the page anew
python -m tests.status GPU.JSON     first records the stages of a report of `make gpu`

Results of long campaigns and of GPUs are in docs/results.json; `make soak` records there what it
ran. tests/test_status.py compares the table with the tests, and the page with the table.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.soak import RESULTS, ROOT, SOAKS, commit, read_results, record

TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "status.md"
PARTS = {"vllm": "vLLM", "megatron": "Megatron-core"}  # real parts, by the mark of a test
#: feature: tests without Slurm; tests on Slurm; stages of `make gpu`
FEATURES = {
    "agents, tools, handoffs": ("cray_agents/test_agent.py cray_agents/test_tool.py", "", ""),
    "sandbox and verifier": ("tools/test_sandbox.py tools/test_verifier_attacks.py", "", ""),
    "environments of other frameworks": (
        "test_environments.py test_environments_learn.py", "", "",
    ),
    "a loop that learns": ("test_demo.py", "", ""),
    "a loop that goes on after kills": ("test_loop_kills.py", "", ""),
    "promotion test": ("cray_agents/test_promotion.py", "", ""),
    "training methods": (
        "trainers/methods/test_grpo.py trainers/methods/test_preferences.py"
        " trainers/test_methods_in_layouts.py", "test_training.py", "golden train-1B train-4B",
    ),
    "distillation": ("trainers/test_distillation.py", "", ""),
    "LoRA": ("trainers/test_lora.py", "", "lora-8B"),
    "layouts over ranks": ("trainers/test_numerics.py trainers/test_context.py", "", "parallel"),
    "full sharding": ("trainers/universal/test_weight_shards.py", "", "sharding"),
    "any model of transformers": (
        "trainers/universal/test_universal_jobs.py", "", "transformers",
    ),
    "Megatron-Bridge": ("trainers/bridge/test_bridge_choice.py", "", ""),
    "fused kernels, Transformer Engine, FP8": (
        "trainers/test_kernels.py trainers/test_layer_choice.py", "", "train-1B",
    ),
    "jobs that go on after failures": (
        "trainers/test_resume.py trainers/test_job.py", "trainers/test_faults.py", "hang",
    ),
    "training sessions": (
        "trainers/test_session.py test_training_session.py", "", "session session-lora",
    ),
    "agreement of trainer and engine": ("trainers/test_engine_agreement.py", "", "logprobs"),
    "estimates of `plan`": ("trainers/test_plan.py trainers/test_planned_memory.py", "", ""),
    "APIs of OpenAI and Anthropic": (
        "runtime/test_vllm_apis.py runtime/test_anthropic_shapes.py", "", "",
    ),
    "Tinker scripts": ("runtime/test_tinker.py", "", ""),
    "batches, files, fine-tuning": (
        "runtime/test_batches.py runtime/test_fine_tuning.py", "", "",
    ),
    "changes of version without lost requests": ("runtime/test_vllm.py", "", ""),
    "adapters in vLLM": ("runtime/test_adapters.py", "", ""),
    "weights sent by NCCL or IPC": ("runtime/test_weight_transfer.py", "", ""),
    "GPUs divided, or used by turns": (
        "runtime/test_gpu_placement.py cray_agents/test_gpu_turns.py", "", "",
    ),
    "replicas as Slurm jobs": (
        "", "runtime/test_slurm_replicas.py test_up_replicas.py", "",
    ),
    "replicas that come and go": (
        "runtime/test_scaling.py",
        "cray_agents/test_preemption.py runtime/test_warm_replicas.py", "",
    ),
    "several gateways, standbys": (
        "runtime/test_further_gateways.py test_standby.py", "test_cluster_faults.py", "",
    ),
    "jobs of a site's Slurm": ("", "runtime/test_slurm.py runtime/test_schedulers.py", ""),
    "a store that survives kills": ("test_store_kills.py test_event_kills.py", "", ""),
    "damage that is noticed": ("test_bit_flips.py", "", ""),
    "datasets, imports, exports": (
        "runtime/datasets/test_dataset_building.py runtime/imports/test_import_formats.py"
        " runtime/exports/test_formats.py", "", "",
    ),
    "keys, roles, owners": ("runtime/test_role_matrix.py runtime/test_owners.py", "", ""),
    "metrics, traces, hardware": (
        "runtime/observability/test_metrics_families.py runtime/observability/test_live_traces.py"
        " runtime/hardware/test_hardware.py", "", "",
    ),
    "dashboard": ("test_dashboard.py", "", ""),
}  # fmt: skip
HEAD = """\
# Status

This page says what was run, and where. `python -m tests.status` writes it.

- **CPU in CI**: tests that `make test` runs without a GPU. In brackets are the real parts that a
  test starts: vLLM's CPU build, and Megatron-core over gloo.
- **Private Slurm**: tests on a real Slurm that they start on one host, with up to 16 virtual nodes.
- **GPU**: stages of `make gpu` with a recorded result. "Not run" means that no GPU has run it.

| feature | CPU in CI | private Slurm | GPU |
|---|---|---|---|
"""
SOAK_HEAD = """
## Long campaigns

`make soak` runs each for minutes or hours, and records its last result in `docs/results.json`. "Not
run" means that no result is recorded.

| campaign | tests | date | commit | result |
|---|---|---|---|---|
"""


def page(results: dict[str, Any]) -> str:
    """The page as it is to be."""
    rows = [
        f"| {name} | {_tests(cpu)} | {_tests(slurm)} | {_stages(gpu, results['gpu'])} |\n"
        for name, (cpu, slurm, gpu) in FEATURES.items()
    ]
    campaigns = [
        f"| {soak.name} | {_names(soak.tests)} | {_result(soak.name, results['soak'])} |\n"
        for soak in SOAKS
    ]
    return "".join([HEAD, *rows, SOAK_HEAD, *campaigns])


def marks(test: str) -> set[str]:
    """Marks of a file's tests."""
    return set(re.findall(r"pytest\.mark\.(\w+)", (TESTS / test).read_text()))


def _tests(tests: str) -> str:
    cells = []
    for test in tests.split():
        parts = [part for mark, part in PARTS.items() if mark in marks(test)]
        cells.append(f"`{test}`" + (f" ({', '.join(parts)})" if parts else ""))
    return ", ".join(cells) or "no test"


def _names(words: str) -> str:
    files = [word.removeprefix("tests/") for word in words.split() if word.endswith(".py")]
    return ", ".join(f"`{file}`" for file in files)


def _stages(stages: str, found: dict[str, Any]) -> str:
    ended = [f"`{name}` {found[name]['result']}, {found[name]['device']}, {found[name]['date']}"
             for name in stages.split() if name in found]  # fmt: skip
    return "; ".join(ended) or "not run"


def _result(name: str, results: dict[str, Any]) -> str:
    if found := results.get(name):
        return f"{found['date']} | {found['commit']} | {found['result']}"
    return "| | not run"


def main(reports: list[str]) -> None:
    """Record the reports' stages, and write the page."""
    for report in reports:
        content = json.loads(Path(report).read_bytes())
        if (device := content["about"]["device"]) == "CPU":
            sys.exit(f"{report} is of a CPU")
        for stage, found in content["stages"].items():
            record("gpu", stage, RESULTS, date=time.strftime("%Y-%m-%d"), commit=commit(),
                   device=device, result=found["state"])  # fmt: skip
    PAGE.write_text(page(read_results(RESULTS)))


if __name__ == "__main__":
    main(sys.argv[1:])
