"""KV in files: a prompt of 4,000 tokens on a replica that another one has computed it for.

Two vLLM servers share a KV tier. Of each prompt the first computes all, and the second loads what
the first has written. Then the second starts anew, and loads a prompt again. A figure is the time
until the first token, the median of ROUNDS prompts, beside computing it.
"""

import asyncio
import statistics
import time
from pathlib import Path

import orjson

from bench.rounds import ROUNDS
from cray_agents.ports import EngineCall
from cray_agents.records import new_id
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.server.permissions import prepare_kv_tier
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from tests.support.vllm_pool import golden_probe, manifest_of

TOKENS = 4000
SHAPE = ModelShape(hidden=512, layers=8, heads=8, kv_heads=4, head_size=64, feed_forward=1536,
                   context=8192)  # fmt: skip
SETTLE = 1.0  # seconds until all blocks are written


async def ask(pool: Pool, number: int) -> tuple[float, float, int]:
    """Seconds until the first token after a prompt, its logprob, and the tokens from a cache."""
    prompt = [5 + (i * 7919 + number * 104729) % 250 for i in range(TOKENS)]
    body = {"prompt": [prompt], "max_tokens": 1, "temperature": 0}
    asked = EngineCall("/v1/completions", body, new_id("x")[2:])
    begun = time.perf_counter()
    pieces = [piece async for piece in pool.answer("m@1", asked)]
    seconds = time.perf_counter() - begun
    (sample,) = asked.samples
    assert orjson.loads(b"".join(pieces))["choices"]
    return seconds, sample.logprobs[0] or 0.0, sample.cached_tokens


async def main(home: Path) -> None:
    """Print a row each for a second replica and for a restart."""
    model, tier = home / "model", home / "kv"
    make_seed_model(model, seed=1, corpus=["1 2 3 4 5 6 7 8 9"], shape=SHAPE)
    manifest_of(model)
    prepare_kv_tier(tier)
    settings = EngineSettings(
        max_model_len=8192, kv_cache_gib=0.5, threads=1, kv_tier=tier, kv_tier_memory_gib=0.5
    )
    probe, pools = golden_probe(model), []
    for number in range(2):
        pools.append(Pool([VllmProcess("m", settings, home / f"replica-{number}.log")]))
        await pools[-1].start(model, "m@1", probe)
        await ask(pools[-1], -1 - number)  # warm
    computed, read, files = [], [], []
    for number in range(ROUNDS):
        anew, told, _ = await ask(pools[0], number)
        await asyncio.sleep(SETTLE)
        again, same, cached = await ask(pools[1], number)
        assert abs(told - same) < 1e-3 and cached > 0.9 * TOKENS, (told, same, cached)
        computed.append(anew)
        read.append(again)
    for number in range(ROUNDS):
        await pools[1].stop()
        pools[1] = Pool([VllmProcess("m", settings, home / "replica-1.log")])
        await pools[1].start(model, "m@1", probe)
        await ask(pools[1], -9)  # warm
        files.append((await ask(pools[1], number))[0])
    for pool in pools:
        await pool.stop()
    for what, seconds in (("a second replica", read), ("after a restart", files)):
        ratio = statistics.median(a / b for a, b in zip(seconds, computed, strict=True))
        figures = f"{statistics.median(seconds):.2f} / {statistics.median(computed):.2f} s"
        print(f"| {TOKENS:,} tokens, {what} | files / computed | {figures} | {ratio:.2f} |")
