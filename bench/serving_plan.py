"""Serving plan against a load: `plan serve` is calibrated by some loads, and foretells others.

A platform of its own with one replica of a random model answers calls that come at random, as of an
open load. Its plan for loads of another rate and shape is held against what they then took.
"""

import asyncio
import random
import time
from pathlib import Path
from statistics import fmean

from bench.rounds import row
from cray_agents.agent.user_code import wait_for
from cray_agents.config import load_config
from cray_agents.config.settings import PriceSettings
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.accounting.holdings import read_holdings
from cray_agents.runtime.accounting.serve_plan import ServedLoad, calibrate, plan_load
from cray_agents.runtime.store import Store
from cray_agents.server.platform_process import client, serving
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

SHAPE = ModelShape(layers=8, hidden=256, heads=8, kv_heads=4, feed_forward=1024)
SECONDS = 60.0  # of a load
MEASURED = ((1, 40, 32), (4, 100, 24), (8, 20, 32))  # requests a second, words, tokens sampled
FORETOLD = ((3, 60, 48), (6, 80, 24))


async def main(home: Path) -> None:
    """Print a row for each load that was foretold."""
    await asyncio.to_thread(wait_for, compare(home))


async def compare(home: Path) -> None:
    """Measure, plan, and measure again."""
    words = [f"word{n}" for n in range(500)]
    make_seed_model(home / "model", seed=0, corpus=words, shape=SHAPE)
    with serving(load_config({"home": home / "home"}), model=home / "model", name="m") as info:
        engine, platform = OpenAIEngine(info["url"]), client(info)
        for rate, prompt, sampled in MEASURED:
            await load(engine, words, rate, prompt, sampled)
        root = Home(home / "home")
        store = Store(root)
        measured = calibrate(store, read_holdings(root), "m")
        for rate, prompt, sampled in FORETOLD:
            since = time.time()
            await load(engine, words, rate, prompt, sampled)
            calls = [call for run in store.stream(RunQuery(since=since)) for call in run.calls]
            tokens = fmean(len(call.prompt_token_ids) - call.cached_tokens for call in calls)
            asked = ServedLoad(len(calls) / SECONDS, tokens, sampled)
            plan = plan_load(measured, asked, None, PriceSettings())
            took = fmean(call.seconds for call in calls)
            told = f"{plan.seconds:.3f} s by plan, {took:.3f} s measured: {plan.seconds / took:.2f}"
            row(f"plan serve, {rate}/s, {tokens:.0f} + {sampled} tokens", "1 replica", told)
        await store.close()
        await platform.close()


async def load(
    engine: OpenAIEngine, words: list[str], rate: float, prompt: int, sampled: int
) -> None:
    """Send requests that come at random for SECONDS, each with words of its own."""
    draw, end, asked = random.Random(rate), time.monotonic() + SECONDS, []
    while time.monotonic() < end:
        text = " ".join(draw.choices(words, k=prompt))
        request = {"model": "m", "messages": [{"role": "user", "content": text}],
                   "max_tokens": sampled, "ignore_eos": True}  # fmt: skip
        asked.append(asyncio.create_task(engine.chat(request)))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*asked)
