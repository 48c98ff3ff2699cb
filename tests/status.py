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
#: Feature | tests without Slurm | tests on Slurm | stages of `make gpu`. `a/b` is a/test_b.py.
TABLE = """
agents, tools, handoffs | cray_agents/agent cray_agents/tool | |
sandbox and verifier | tools/sandbox tools/verifier_attacks | |
environments of other frameworks | environments environments_learn | |
a loop that learns | demo | |
an agent of one's own, by the tutorial | tutorial | |
a loop that continues after kills | loop_kills | |
a loop that improves prompts | loop_prompts | |
training on live traffic, also by the clock | live_training | |
evaluation without a loop | evaluation cray_agents/figures | |
promotion test | cray_agents/promotion | |
hazards as a guard of promotion | hazards | |
a watch over live traffic | cray_agents/live_watch runtime/blocks | |
judges, also of whole groups | cray_agents/llm_judge rollouts | |
training methods | trainers/methods/learning trainers/methods_in_layouts | training | train-1B
master weights over iterations | trainers/master_weights | | session-small-rate
mixtures of experts | trainers/numerics | | train-moe
distillation | trainers/distillation | |
LoRA | trainers/lora trainers/adapter_versions | | lora-8B session-lora
documents, larger than memory | runtime/datasets/documents trainers/documents_training | |
layouts over ranks | trainers/numerics trainers/context | | parallel resume train-all
full sharding | trainers/transformers_backend/weight_shards | | sharding
any model of transformers | trainers/transformers_backend/transformers_jobs | | transformers
parents as GGUF files, or by a hub's name | runtime/named_models | |
versions exported for other programs, GGUF among them | runtime/model_export | |
Megatron-Bridge | trainers/megatron_bridge/bridge_choice | |
fused kernels, Transformer Engine, FP8 | trainers/kernels trainers/layer_choice | | train-1B
losses of the head, compiled on GPUs | trainers/head | | train-1B
sinks and windows without a sequence's square | trainers/transformers_backend/passes | |
the trainer's CUDA branches, on tensors without numbers | trainers/cuda_branches | |
vLLM's parser and plug-ins for GPUs | runtime/vllm_for_gpus | |
internals of vLLM and torch that are used | runtime/vllm_contract trainers/torch_contract | |
jobs that continue after failures | trainers/resume trainers/job | trainers/faults | hang
resume points on the nodes' own disks | trainers/local_points | trainers/spare_nodes |
versions while a job trains | trainers/job_versions loop_versions | |
a spare node in place of a lost one | | trainers/spare_nodes |
training sessions | trainers/session training_session | | session session-lora
agreement of trainer and engine | trainers/engine_agreement | | logprobs
router replay, from recorded experts | runtime/datasets/routes trainers/router_replay | |
estimates of `plan train` | trainers/plan trainers/planned_memory | | train-1B train-3B train-moe
replicas for a load: `plan serve` | runtime/cost/serve_plan | |
APIs of OpenAI and Anthropic | runtime/vllm_apis runtime/anthropic_shapes | |
Tinker scripts | runtime/tinker | |
batches, files, fine-tuning | runtime/batches runtime/fine_tuning | |
changes of version without lost requests | runtime/vllm | | swap
adapters in vLLM | runtime/adapters | |
KV of prompts in files that replicas share | runtime/kv_tier | |
weights sent by NCCL or IPC | runtime/weight_transfer | |
GPUs divided, or used by turns | runtime/gpu_placement cray_agents/gpu_turns | |
a training suspended for requests, by a scripted `cuda-checkpoint` | cray_agents/gpu_turns | |
replicas as Slurm jobs | | runtime/slurm_replicas up_replicas |
weights copied to the replicas' hosts | runtime/weight_copies | runtime/weight_copies |
replicas that come and go | runtime/scaling | cray_agents/preemption runtime/warm_replicas |
several gateways, standbys | runtime/further_gateways standby | cluster_faults |
jobs of a site's Slurm | | runtime/slurm runtime/schedulers |
the chart's objects and commands, without Kubernetes | chart | |
a release's artefacts, the image's context | release | |
preflight of a machine and a cluster | cray_agents/preflight | cray_agents/preflight |
a store that survives kills | store_kills event_kills | |
damage that is noticed | bit_flips | |
backups, also of a root at work | backup | |
roots of older and of newer versions | old_root newer_records | |
datasets | runtime/datasets/dataset_building runtime/datasets/dataset_samples | |
imports, exports | runtime/imports/import_formats runtime/exports/formats | |
keys, roles, owners | runtime/role_matrix runtime/owners | |
trackers | trackers | |
metrics, hardware | runtime/observability/metrics_families runtime/hardware/hardware | |
dashboard | dashboard | |
"""
FEATURES = {
    name: tuple(cells) for name, *cells in (
        [cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()
    )
}  # fmt: skip
HEAD = """\
# Status

This page says what was run, and where, by the test files in `tests/`.
`python -m tests.status` writes it.

- **CPU in CI**: tests that `make test` runs without a GPU. In brackets are the real parts that a
  test starts: vLLM's CPU build, and Megatron-core over gloo.
- **Private Slurm**: tests on a real Slurm that they start on one host, with up to 16 virtual nodes.
- **GPU**: stages of `make gpu` with a recorded result. "Not run" means that none is recorded.

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
    """Marks of a file's tests, but for those that run in `make soak` alone."""
    blocks = path(test).read_text().split("\n\n\n")
    text = "\n".join(block for block in blocks if '="make soak"' not in block)
    return set(re.findall(r"pytest\.mark\.(\w+)", text))


def path(test: str) -> Path:
    """The file of a test of the table."""
    return (TESTS / test).with_name(f"test_{Path(test).name}.py")


def _tests(tests: str) -> str:
    cells = []
    for test in tests.split():
        parts = [part for mark, part in PARTS.items() if mark in marks(test)]
        name = path(test).relative_to(TESTS)
        cells.append(f"`{name}`" + (f" ({', '.join(parts)})" if parts else ""))
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
