"""Kinds that are trained by the transformers backend and served by a real vLLM: docs/serving.json.

`CRAY_TEST_SERVING=all`, or kinds with commas between them, in `make soak`. A trained checkpoint is
served, one that LoRA made of it takes its place in the same process and gives it back, and its
adapter is loaded beside the first. The engine's numbers on each golden probe must be the trainer's.
What is seen is written to the file.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import CrayError, JobError, SwapError
from cray_agents.records import ProbePrompt
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, LogprobLimits, bfloat16_limits
from cray_agents.runtime.pool.golden_probe import prove
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.registry.adapters import merge
from cray_agents.runtime.registry.checkpoints import ADAPTER, base_of, read_manifest
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Layout
from tests.support.trainers.running_session import RunningSession
from tests.support.trainers.tiny_families import FAMILIES, write_parent

RESULTS = Path(__file__).parents[3] / "docs/serving.json"
KINDS = [kind for kind in FAMILIES if not kind.startswith("qwen3_vl")]  # the text families
ASKED = os.environ.get("CRAY_TEST_SERVING", "")
CHOSEN = KINDS if ASKED == "all" else [kind for kind in ASKED.split(",") if kind]
SERVED = "served"
SETTINGS = EngineSettings(max_model_len=256, max_num_seqs=4, threads=1)
STEPS = {"steps": 3, "batch_size": 4, "learning_rate": 1e-2, "backend": "transformers"}
# what vLLM on a CPU has kernels for: heads of 32 and more, chunks of its blocks of 128 tokens
SIZES: dict[str, Any] = {"hidden_size": 128, "n_embd": 128, "head_dim": 32}
SIZES |= {"mamba_d_head": 32, "attention_chunk_size": 128, "linear_head_dim": 32}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "indexer_head_dim": 32}
OF_KINDS: dict[str, dict[str, Any]] = {
    # fields of published configs that transformers does without
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 16, "use_routing_bias": True},
    "lfm2": {"block_dim": 128, "conv_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 32,
        "route_norm": True,
        "qk_norm": True,
    },
    "afmoe": {"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    # sizes that fit the others
    "mimo_v2_flash": {
        "v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "sliding_window_size": 16,
    },
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "deepseek_v32": {"index_head_dim": 128},
    "glm_moe_dsa": {"index_head_dim": 128},
    "mistral4": {"qk_nope_head_dim": 64, "qk_head_dim": 128, "head_dim": 128},
    "falcon_h1": {"mamba_n_heads": 4},
    "mamba2": {"intermediate_size": 256},
}
#: Why vLLM differs or ends, where its own words do not tell. Each was looked for.
CAUSES = {
    "cohere2": "vLLM's window is a token longer than transformers' (with 17 for 16 both are equal)",
    "ernie4_5_moe": "vLLM's router for CPUs leaves the experts' correction bias out",
    "laguna": "vLLM's router for CPUs knows no sigmoid without groups of experts",
    "minimax_m2": "vLLM's router for CPUs knows no sigmoid without groups of experts",
    "phimoe": "vLLM runs transformers' module, whose router it replaces by one of another form",
}
PARSERS = {"gpt_oss": "openai"}  # vLLM serves it with this one alone
_ERROR = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception)): (.+)")
_WRAPPED = (
    "Engine core initialization failed",
    "Engine process failed",
    "failed to be inspected",
    "1 validation error for",
)


def write_served_parent(kind: str, folder: Path) -> Path:
    """A tiny model of the kind in sizes that vLLM has kernels for, with a tokenizer."""
    import torch

    from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

    tiny = ModelShape(hidden=32, layers=1, heads=1, kv_heads=1)
    make_seed_model(folder, seed=0, corpus=["What is 47 + 385?"], shape=tiny)
    config = FAMILIES[kind]()
    fields = config.to_dict()
    changes = {name: size for name, size in SIZES.items() if fields.get(name)}
    if fields.get("kv_lora_rank"):  # latent attention, in the one size that there is a kernel for
        changes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
        if fields.get("qk_head_dim"):
            changes["qk_head_dim"] = 64 + fields["qk_nope_head_dim"]
        changes |= {"head_dim": 64} if fields.get("head_dim") else {}  # of the rotation alone
        changes |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as published configs
    if (rope := fields.get("rope_parameters") or {}).get("rope_type") == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0}  # as published configs say
    config = type(config).from_dict(fields | changes | OF_KINDS.get(kind, {}))
    write_parent(folder, config, dtype=torch.float32)
    return folder


def refusal(error: Exception) -> str:
    """The last line of a failed job's report that names an exception, else its last line."""
    lines = str(error).splitlines()
    named = [line for line in lines if _ERROR.search(line)]
    return (named or lines or [repr(error)])[-1].strip()[:200]


def train(lab: Any, parent: Path) -> tuple[Path, Path, str]:
    """A checkpoint of the parent, one of that with an adapter, and why there is no adapter."""
    lab.dataset()
    session = RunningSession(lab.home, Layout())

    def trained(parent: Path, **more: Any) -> Path:
        spec = lab.spec(parent, hyper={**STEPS, **more})
        with suppress(AssertionError):  # the session ended with its job, whose status says why
            session.train(spec)
        status = JobJournal(lab.home, spec.id).status()
        if status is None or status.state != "succeeded":
            raise JobError(getattr(status, "error", "") or "the job has no status")
        return Path(lab.home.checkpoint(spec.id))

    first, without = trained(parent), ""
    try:
        second = trained(first, lora={"rank": 4})
    except JobError as error:  # a refused adapter, which ends the session
        without = refusal(error)
        session = RunningSession(lab.home, Layout())
        second = trained(first, seed=1)
    assert session.end() == 0
    return first, second, without


def reason(replica: VllmProcess, error: Exception) -> str:
    """The first line of the error in vLLM's log that ended it, else the error's."""
    found = replica.death_reason()
    if not found:
        text = replica.log.read_text(errors="replace") if replica.log.exists() else ""
        lines = [": ".join(match) for match in _ERROR.findall(text) if "ulimit" not in match[1]]
        lines += re.findall(r"Value error, (.+)", text)
        own = [line for line in lines if not any(known in line for known in _WRAPPED)]
        found = own[-1] if own and "ended while starting" in str(error) else str(error)
    return re.sub(r"/[^\s:]*/| \[type=.*", "", found.splitlines()[0])[:200]


def probe_of(checkpoint: Path) -> list[ProbePrompt]:
    probe = read_manifest(checkpoint).probe
    assert probe
    return probe


async def serve(
    settings: EngineSettings, first: Path, second: Path, dtype: str, rank: int, log: Path
) -> dict[str, Any]:
    """Serve the first, reload, and adapt; say how it went."""
    limits: LogprobLimits = FLOAT32_PROBE if dtype == "float32" else bfloat16_limits()
    settings = replace(settings, dtype=dtype, max_lora_rank=rank)
    log.unlink(missing_ok=True)
    replica = VllmProcess("m", settings, log)
    found: dict[str, Any] = {"dtype": dtype}
    one, two = probe_of(first), probe_of(second)
    try:
        await replica.start(first, "m@1")
        report = await prove(replica.engine, "m@1", one, limits)
        found |= {"vllm": SERVED, "probe": float(f"{report.max_logprob_diff:.1e}")}
        try:
            await replica.engine.load(second if base_of(second) is None else merge(second), "m@2")
            await prove(replica.engine, "m@2", two, limits)
            found["reload"] = SERVED
            with suppress(SwapError):
                await prove(replica.engine, "m@1", one, limits)
                found["reload"] = "the probe does not tell the two apart"
            await replica.engine.load(first, "m@1")
            await prove(replica.engine, "m@1", one, limits)
        except CrayError as error:
            found["reload"] = reason(replica, error)
        if rank:
            try:
                engine = await replica.engine.load_adapter(second / ADAPTER, "m@2 adapter")
                await prove(engine, "m@2", two, limits)
                found["lora"] = SERVED
            except CrayError as error:
                found["lora"] = reason(replica, error)
    except CrayError as error:
        found["vllm"] = reason(replica, error)
    finally:
        await replica.stop()
    return found


async def tried(
    settings: EngineSettings, first: Path, second: Path, without: str, log: Path
) -> dict[str, Any]:
    """Try with adapters in float32; without, or in bfloat16, where vLLM asks for that.

    Adapters of a mixture need Triton, which is not there.
    """
    dtype, rank = "float32", 0 if without else 8
    while True:
        found = await serve(settings, first, second, dtype, rank, log)
        said = found["vllm"]
        if said == SERVED:
            break
        if rank and re.search(r"lora|triton", said, re.IGNORECASE):
            rank, without = 0, said
        elif dtype == "float32" and re.search(r"bfloat16|bf16|float16|16.bit", said, re.IGNORECASE):
            dtype = "bfloat16"
        else:
            break
    return found if rank else found | {"lora": without}


def explained(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """What was seen, with the cause where the kind was not served and the cause is known."""
    known = found["vllm"] != SERVED and kind in CAUSES
    return found | {"cause": CAUSES[kind]} if known else found


def note(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write what was seen of a kind; return what the file had."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = results.get(kind, {})
    results[kind] = found
    text = json.dumps(dict(sorted(results.items())), indent=1)
    RESULTS.write_text(text + "\n")
    return dict(before)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.skipif(not CHOSEN, reason="CRAY_TEST_SERVING names no kinds")
@pytest.mark.parametrize("kind", CHOSEN)
async def test_a_kind_is_trained_and_served(lab: Any, tmp_path: Path, kind: str) -> None:
    try:
        checkpoints = train(lab, write_served_parent(kind, tmp_path / "parent"))
    except JobError as error:
        found: dict[str, Any] = {"vllm": f"not trained: {refusal(error)}"}
    else:
        settings = replace(SETTINGS, tool_call_parser=PARSERS.get(kind, SETTINGS.tool_call_parser))
        found = await tried(settings, *checkpoints, tmp_path / "replica.log")
    before = note(kind, explained(kind, found))
    print(kind, json.dumps(found), flush=True)
    for name in ("vllm", "reload", "lora"):
        assert before.get(name) != SERVED or found.get(name) == SERVED, (name, found)


def test_the_file_tells_of_kinds_that_exist() -> None:
    results = json.loads(RESULTS.read_text())
    assert results and set(results) <= set(KINDS)
    for kind, found in results.items():
        assert found["vllm"] and "/" not in found.get("dtype", ""), kind
        assert (found["vllm"] == SERVED) == ("reload" in found), kind
