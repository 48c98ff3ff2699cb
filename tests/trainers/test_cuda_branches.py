"""The trainer's CUDA branches, traced on fake tensors: see tests/support/trainers/fake_gpu.py.

Each case trains a step of a tiny model on a GPU that is not there. What a step waits for is pinned:
a read of the host drains the GPU's queue. PLACES lists every function that asks which device it is
on; a new one fails here until a trace goes through it, or a reason says why none can.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).parent.parent.parent
ADDED, NORM = "trainers/training/parallel_groups.py:add_up", "megatron/core/optimizer/clip_grads.py"
TOKENS = "megatron/core/distributed/finalize_model_grads.py:finalize_model_grads"
#: What every step reads: the number of tokens, the gradient's norm, and the sums of its reports.
STEP = {TOKENS: 1, f"{NORM}:get_grad_norm_fp32": 1, ADDED: 1}
EXPERTS = "megatron/core/transformer/moe"
LAYERS = 2
#: Without Transformer Engine a mixture's layer asks for sizes: twice as it sorts tokens by expert,
#: and once for the number of each expert's.
MIXTURE = {
    f"{EXPERTS}/moe_utils.py:permute": 2 * LAYERS,
    f"{EXPERTS}/token_dispatcher.py:_maybe_dtoh_and_synchronize": LAYERS,
}
ON_LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "sequence_parallel": True},
    {"context": 2},
    {"data": 2},
]
OF_TRANSFORMERS = {"backend": "transformers"}
CASES: dict[str, dict[str, Any]] = {  # first those that go through every place
    **{f"layout {n}": {"parent": "qwen3", "layout": one} for n, one in enumerate(ON_LAYOUTS)},
    "transformers": {
        "method": "grpo",
        "parent": "qwen3",
        "most_logits": 20000,
        "hyper": OF_TRANSFORMERS,
        "parts": ["score", "save", "export"],
    },
    "sft": {"parent": "qwen3"},
    "dpo": {"method": "dpo", "parent": "qwen3"},
    "kto": {"method": "kto", "parent": "qwen3"},
    "distill": {"method": "distill", "parent": "qwen3"},
    "grpo, its head in chunks": {
        "method": "grpo",
        "parent": "qwen3-tied",
        "most_logits": 20000,
        "hyper": {"policy": {"temperature": 0.7}},
        "parts": ["score", "evaluate", "settle", "to weights", "save", "export", "accumulate"],
    },
    "lora": {
        "parent": "qwen3",
        "hyper": {"lora": {"rank": 4}},
        "parts": ["settle", "save", "export"],
    },
    "a mixture": {"method": "grpo", "parent": "qwen3_moe", "chosen": 2},
    "float32, a call per length": {"parent": "qwen3", "hyper": {"dtype": "float32"}},
    "recomputed layers": {"parent": "qwen3", "recompute": "full"},
    "recomputed modules": {"parent": "qwen3", "recompute": "layernorm,mlp"},
    "lora of transformers": {"parent": "qwen3", "hyper": {**OF_TRANSFORMERS, "lora": {"rank": 4}}},
    "broken: reads a number": {"parent": "qwen3", "broken": "reads"},
    "broken: mixes devices": {"parent": "qwen3", "broken": "mixes"},
}
#: Parts that wait by their nature, once, or once for what they bring to the host.
ONCE = {
    "score": {"trainers/training/parallel_groups.py:collect": 2},  # logprobs, most likely tokens
    "evaluate": {ADDED: 1},
    "settle": {},
    "to weights": {},
    "save": {
        "trainers/checkpointing/save.py:_stage": 1,
        "trainers/checkpointing/state.py:adam_steps": 1,
    },
}

EXPORTED = {
    "trainers/checkpointing/weight_files.py:write_files",
    "trainers/models/transformers_backend/parent_files.py:<lambda>",
}
CPU_ONLY = "asks for what the CPU build alone has"
IN_VLLM = "runs in vLLM's worker on a real device"
NO_LINK = "NCCL's and CUDA's own hand-shake; test_weight_transfer.py has the protocol"
PROCESS = "begins or ends a process on a GPU; its CPU branch is in test_job.py, test_session.py"
#: Every function that asks for a device: None where a case goes through it, else why none does.
PLACES: dict[str, str | None] = {
    "runtime/vllm_plugins/kv_tier.py:_place": "names the device, as a part of a hash",
    "runtime/vllm_plugins/worker.py:Extension._ask_for_amx": CPU_ONLY,
    "runtime/vllm_plugins/worker.py:Extension._pack_experts_anew": CPU_ONLY,
    "runtime/vllm_plugins/worker.py:Extension._skip_generators": IN_VLLM,
    "runtime/vllm_plugins/worker.py:Extension.gpu_uuid": IN_VLLM,
    "runtime/vllm_plugins/worker.py:Extension.patch_weights": IN_VLLM,
    "runtime/vllm_plugins/worker.py:Extension.repack_kept_weights": CPU_ONLY,
    "trainers/checkpointing/save.py:Saver._stage": None,
    **{
        f"trainers/checkpointing/weight_sender.py:{name}": NO_LINK
        for name in (
            "IpcLink.__init__",
            "IpcLink.close",
            "IpcLink.describe",
            "NcclGroup.__init__",
            "NcclGroup.send",
            "WeightSender.__init__",
            "WeightSender._set_device",
        )
    },
    "trainers/job/failures/failure.py:_verdict": "reads the text of an error",
    "trainers/job/failures/health_gate.py:check_ranks": None,
    "trainers/job/failures/health_gate.py:sum_over_nodes": "by gloo in test_preflight.py",
    "trainers/job/job.py:_train": PROCESS,
    "trainers/job/launch.py:be_spawned_rank.main": PROCESS,
    "trainers/job/launch.py:load_for_ranks": None,
    "trainers/job/rank.py:execute": PROCESS,
    "trainers/job/rank.py:join": None,
    "trainers/job/rank.py:memory_gib": None,
    "trainers/job/rank.py:step": "returns free memory on a CPU; on a GPU it does nothing more",
    "trainers/job/rank.py:write_step_event": "needs a job's journal; reads a name and a maximum",
    "trainers/models/attention.py:RMSNorm.forward": None,
    "trainers/models/attention.py:send": None,
    "trainers/models/backends.py:build_chunks": None,
    "trainers/models/backends.py:choose_layers_of": None,
    **{
        f"trainers/models/megatron_bridge/bridged_model.py:{name}": "in its own environment"
        for name in ("_options", "build_bridged", "load_bridge")
    },
    "trainers/models/megatron_fixes.py:load_megatron": None,
    "trainers/models/model.py:build_model": None,
    "trainers/models/model.py:finish_chunk": None,
    "trainers/models/transformers_backend/causal_model.py:TransformersModel.__init__": None,
    "trainers/models/transformers_backend/packed_attention.py:flash_works": None,
    "trainers/planning/arithmetic.py:layer_activations": "plans, on any machine: test_plan.py",
    "trainers/progress.py:OwnWork._now": None,
    "trainers/session/parked_states.py:_copy": PROCESS,
    "trainers/session/resident.py:Resident._load_start": PROCESS,
    "trainers/session/resident.py:Resident.leave_gpu": PROCESS,
    "trainers/session/session_process.py:run": PROCESS,
    "trainers/training/offload.py:Offload._finish": PROCESS,
    "trainers/training/parallel_groups.py:Ranks.__init__": None,
    "trainers/training/parallel_groups.py:join_ranks": None,
}
WALKED = [place for place, excuse in PLACES.items() if excuse is None]


@pytest.fixture(scope="module")
def traced(
    shared_lab: Any, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """By case: the waits of its parts, or what went wrong. `places`: the functions gone through."""
    folder = tmp_path_factory.mktemp("traced")
    for parent in {case["parent"] for case in CASES.values()}:
        (folder / parent).symlink_to(models(parent))
    (folder / "home").symlink_to(shared_lab.home.root)
    for method in {case.get("method", "sft") for case in CASES.values()}:
        shared_lab.dataset(method, 8, method=method)
    program = [sys.executable, "-m", "tests.support.trainers.cuda_trace", str(folder)]
    ran = subprocess.run(
        [*program, json.dumps(CASES), json.dumps(WALKED)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith('["')]
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(json.loads(line) for line in lines)


@pytest.mark.slow
def test_steps_mix_no_devices_and_wait_only_where_pinned(traced: dict[str, Any]) -> None:
    for name, case in CASES.items():
        if "broken" in case:
            continue
        parts = traced[name]
        assert isinstance(parts, dict), f"{name}: {parts}"
        mixture = MIXTURE if case["parent"] == "qwen3_moe" else {}
        assert parts.pop("step") == {**STEP, **mixture}, name
        accumulated, exported = parts.pop("accumulate", None), parts.pop("export", None)
        if accumulated is not None:  # five passes and a step, whose tokens a client counts
            assert accumulated == {
                f"{NORM}:get_grad_norm_fp32": 1,
                ADDED: 5,
                "trainers/training/parallel_groups.py:collect": 5,
            }
        if exported is not None:  # each tensor of the files, when it is written
            assert len(exported) == 1 and set(exported) <= EXPORTED, name
        assert parts == {part: ONCE[part] for part in parts}, name


@pytest.mark.slow
def test_a_number_that_is_read_and_a_tensor_of_the_host_are_noticed(traced: dict[str, Any]) -> None:
    more = traced["broken: reads a number"]["step"].items() - STEP.items()
    assert more == {("trainers/training/train_step.py:_loss", 1)}
    assert "two devices, cuda:0 and cpu" in traced["broken: mixes devices"]


@pytest.mark.slow
def test_every_place_that_asks_for_a_device_is_walked_or_excused(traced: dict[str, Any]) -> None:
    found = {place for folder in ("trainers", "runtime", "cray_agents") for place in asking(folder)}
    assert found == set(PLACES)
    assert set(WALKED) - set(traced["places"]) == set()


def asking(folder: str) -> set[str]:
    """The functions in a folder's files that name torch.cuda, or decide by a device."""
    found = set()

    def visit(node: ast.AST, name: str, file: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".removeprefix(".")
            decides = isinstance(child, ast.If | ast.IfExp) and any(
                map(is_device, ast.walk(child.test))
            )
            named = ast.unparse(child) if isinstance(child, ast.Attribute) else ""
            if decides or named.startswith("torch.cuda."):
                found.add(f"{file}:{inner}")
            visit(child, inner, file)

    for path in sorted((ROOT / folder).rglob("*.py")):
        visit(ast.parse(path.read_bytes()), "", str(path.relative_to(ROOT)))
    return found


def is_device(node: ast.AST) -> bool:
    """Whether an expression is a device's type, or says that it is the CPU."""
    if isinstance(node, ast.Attribute | ast.Name):
        return getattr(node, "attr", getattr(node, "id", "")) in ("is_cuda", "is_cpu", "on_cpu")
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    values = [side.value for side in sides if isinstance(side, ast.Constant)]
    return any(str(value).startswith(("cuda", "cpu")) for value in values)
