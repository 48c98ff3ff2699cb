"""Conversations and their KV: of the prompt tokens that a cache could give, how many it gives.

Some vLLM replicas answer many runs at once, by the default of `replica_affinity` and without it. A
run begins with a text of its own, and each turn adds to it. A cache could give the whole blocks
that a prompt shares with an earlier call of its run; what it gave, and the tokens that a replica
computed, are vLLM's counters. As on a GPU, a replica's KV cache has room for its share of the runs
and some more, not for all.
"""

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from bench.gateway import PATH, session
from bench.rivals.process_tree import tree_of
from bench.rounds import row
from cray_agents.config import load_config
from cray_agents.server.platform_process import serving
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

SAMPLED, ADDED, TEMPLATE = 32, 100, 16  # tokens of an answer, of a turn's text, and around them
READ = 3  # tokens for one of a random answer's, when it is read as text
ROOM = 1.0  # of a replica's share of the runs
PAUSE = 0.2  # seconds between two turns, at most
HITS, PROMPT, DECODED = (
    f"vllm:{name}_total" for name in ("prefix_cache_hits", "prompt_tokens", "generation_tokens")
)
Calls = list[tuple[list[int], list[int]]]  # a run's prompts and answers, as tokens


async def main(home: Path) -> None:
    """Print the rows at full size."""
    await measure(home)


async def measure(
    home: Path, *, replicas: int = 4, runs: int = 64, turns: int = 12, begin: int = 1500
) -> None:
    """Print a row for each routing. `begin`: tokens of a run's first text."""
    longest = begin + turns * (ADDED + READ * SAMPLED + TEMPLATE)
    shape = ModelShape(context=longest + 256, init_std=0.15)
    draw = random.Random(0)
    words = [str(draw.randrange(10_000)) for _ in range(2000)]
    make_seed_model(home / "model", seed=0, corpus=[" ".join(words)], shape=shape)
    tokenizer = Tokenizer.from_file(str(home / "model" / "tokenizer.json"))

    def text(tokens: int) -> str:
        said = ""
        while len(tokenizer.encode(said).ids) < tokens:
            said += " ".join(draw.choices(words, k=10)) + " "
        return said

    texts = [[text(begin), *(text(ADDED) for _ in range(turns - 1))] for _ in range(runs)]
    token = 4 * 2 * shape.layers * shape.kv_heads * shape.head_size  # bytes of KV
    room = max(shape.context, ROOM * longest * runs / replicas) + 1024
    serve = {"max_model_len": shape.context, "threads": 1, "kv_cache_gib": room * token / 2**30}
    ways: dict[str, dict[str, float]] = {"default": {}, "0": {"replica_affinity": 0.0}}
    for name, setting in ways.items():
        config = load_config({"home": home / f"affinity-{name}", **serve, **setting})
        with serving(config, model=home / "model", name="m", replicas=replicas) as info:
            async with session() as http:
                while await serving_replicas(http, info["url"]) < replicas:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                before, _ = await counters(http, info["url"])
                conversations = (converse(http, info["url"], one) for one in texts)
                calls = await asyncio.gather(*conversations)
                after, block = await counters(http, info["url"])
            memory = sum(map(resident_gib, tree_of(info["pid"])))
        assert len(calls[0][0][0]) >= begin
        counts = [
            {counter: after[place][counter] - before[place][counter] for counter in after[place]}
            for place in after
        ]
        hits = sum(count[HITS] for count in counts) / sum(cacheable(one, block) for one in calls)
        computed = [count[PROMPT] - count[HITS] + count[DECODED] for count in counts]
        load = max(computed) / sum(computed) * replicas
        row(
            f"{runs} runs of {turns} turns from {begin:,} tokens, {replicas} replicas",
            f"replica_affinity {name}",
            f"{hits:.2f} of what a cache could give; {sum(computed):,.0f} tokens computed, "
            f"the busiest replica {load:.2f} of the mean; {memory:.1f} GiB",
        )


async def serving_replicas(http: aiohttp.ClientSession, url: str) -> int:
    """How many have started."""
    async with http.get(url + "/v1/pool") as response:
        pool = await response.json()
    return sum(replica["state"] == "serving" for replica in pool["data"])


async def converse(http: aiohttp.ClientSession, url: str, texts: list[str]) -> Calls:
    """Ask a run's turns."""
    messages: list[dict[str, Any]] = []
    calls: Calls = []
    pauses = random.Random(texts[0])
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": messages, "max_tokens": SAMPLED, "ignore_eos": True,
                "return_samples": True}  # fmt: skip
        async with http.post(url + PATH, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        (sample,) = answer["samples"]
        calls.append((sample["prompt_token_ids"], sample["token_ids"]))
        said = answer["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": said})
        await asyncio.sleep(pauses.uniform(0, PAUSE))
    return calls


async def counters(
    http: aiohttp.ClientSession, url: str
) -> tuple[dict[str, dict[str, float]], int]:
    """vLLM's counts by replica, and the tokens of a block."""
    async with http.get(url + "/metrics/engines") as response:
        text = await response.text()
        assert response.status == 200, text
    counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    block = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (HITS, PROMPT, DECODED):
                counts[sample.labels["replica"]][sample.name] += sample.value
            block = int(sample.labels.get("block_size", block))
    return counts, block


def cacheable(calls: Calls, block: int) -> int:
    """Prompt tokens of a run in whole blocks of an earlier call; of each one is always computed."""
    tokens = 0
    for number, (prompt, _) in enumerate(calls):
        known = (shared(prompt, [*asked, *said[:-1]]) for asked, said in calls[:number])
        tokens += min(max(known, default=0), len(prompt) - 1) // block * block
    return tokens


def shared(one: list[int], other: list[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def resident_gib(pid: int) -> float:
    """GiB of a process; what several share counts once for all of them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 2**20
    return 0.0
