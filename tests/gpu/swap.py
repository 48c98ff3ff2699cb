"""Swap stage: a replica of vLLM changes its weights; its logprobs must be those of the new ones.

Needs vLLM's CUDA build, and first shows that our plug-ins work inside it: a request's tokens are
captured, and another version is refused. The truth is transformers in float32 on the CPU.
"""

import asyncio
import json
import statistics
import time
from pathlib import Path

from cray_agents.errors import SetupError
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess, has_gpu_build
from tests.gpu.bench import Bench
from tests.support.vllm_pool import Serving, golden_probe

SIZES = ("small", "1B")
SWAPS = 3


def main(bench: Bench, stage: str) -> None:
    """Change between two models of each size, there and back, and write the seconds."""
    try:
        there = bench.on_cpu or has_gpu_build()
    except SetupError:
        there = False
    if not there:
        bench.report.add(stage, note="vLLM's CUDA build is not installed: not run")
        return
    for size in SIZES[:1] if bench.on_cpu else SIZES:
        if bench.over:
            bench.report.add(stage, model=size, problem="no time left")
            return
        asyncio.run(measure(bench, stage, size))


async def measure(bench: Bench, stage: str, size: str) -> None:
    """One replica: start it, answer, and swap SWAPS times."""
    models = {f"m@{n}": write_model(bench, size, n) for n in (1, 2)}
    settings = EngineSettings(threads=1, start_timeout=1200)
    pool = Pool([VllmProcess("m", settings, bench.folder / f"vllm-{size}.log")])
    begun = time.monotonic()
    await pool.start(models["m@1"], "m@1", golden_probe(models["m@1"]))
    start = time.monotonic() - begun
    try:
        serving = Serving(pool, models)
        request = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 8}
        seconds = []
        for number in range(SWAPS):
            version = f"m@{2 - number % 2}"
            probe = golden_probe(models[version])
            begun = time.monotonic()
            await pool.swap(models[version], version, probe)
            seconds.append(time.monotonic() - begun)
            await serving.chat(version, request)
        (status,) = pool.status()
        bench.report.add(
            stage,
            model=size,
            start_seconds=start,
            swap_seconds=statistics.median(seconds),
            logprobs_apart=status["probe"]["max_logprob_diff"],
        )
    finally:
        await pool.stop()


def write_model(bench: Bench, size: str, seed: int) -> Path:
    """Write a model of random weights, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cray_agents.trainers.models.seed_model import make_seed_model

    folder = bench.folder / "swap" / f"{size}-{seed}"
    make_seed_model(folder, seed=seed, corpus=["What is 1 + 1?"])
    special = json.loads((folder / "config.json").read_bytes())
    ids = {name: special[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocab = max(special["vocab_size"], bench.scale.config(size)["vocab_size"])
    (folder / "config.json").write_text(
        json.dumps(bench.scale.config(size) | ids | {"vocab_size": vocab})
    )
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
