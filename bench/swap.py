"""A change of weights under 32 concurrent streams on real vLLM: what is lost, how long it takes.

Each client asks for one stream after the other. A figure is the median of ROUNDS swaps, there and
back: the longest that a stream stood still between two tokens, that a request waited for its first
one, and that nobody got any; beside the undisturbed ones, and what a replica spent the time on. An
adapter is loaded, proven and promoted beside the weights; each time it is another one.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from bench.rounds import ROUNDS, row
from cray_agents.ports import EngineCall
from cray_agents.records import ProbePrompt, new_id
from cray_agents.runtime.pool.pool import Pool, SwapMode
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from tests.runtime.conftest import make_tiny_model
from tests.support.vllm_pool import CHAT, adapted, golden_probe, manifest_of

STREAMS = 32
TOKENS = 128
SCENARIOS: tuple[tuple[int, SwapMode, int], ...] = (
    *((2, "drain", 0), (1, "drain", 0), (1, "keep", 0)),
    (1, "drain", 8),  # the largest rank of an adapter; 0: weights are swapped
)
PHASES = ("pause", "load", "prove", "resume")
ASK: dict[str, Any] = {
    "messages": CHAT,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass
class Model:
    """A checkpoint and its golden probe."""

    directory: Path
    probe: list[ProbePrompt]


@dataclass
class Traffic:
    """STREAMS clients of a pool by a name that means `alias`; what they saw since `begin`."""

    pool: Pool
    alias: str
    answered: int = 0
    crossed: int = 0  # streams that two versions answered
    faults: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds until a first token
    gaps: list[float] = field(default_factory=list)  # the longest of each stream
    arrivals: list[float] = field(default_factory=list)
    ended: bool = False

    async def client(self) -> None:
        """One stream after the other, until it is ended."""
        while not self.ended:
            await self._one()

    async def _one(self) -> None:
        asked = EngineCall("/v1/chat/completions", dict(ASK), new_id("x")[2:])
        times, seen = [time.perf_counter()], []
        async for piece in self.pool.answer(lambda: self.alias, asked):
            chunks = [orjson.loads(p[6:]) for p in piece.split(b"\n\n") if p[:7] == b"data: {"]
            tokens = [t for c in chunks for x in c["choices"] for t in x.get("token_ids") or ()]
            if tokens:
                seen += tokens
                times.append(time.perf_counter())
        (sample,) = asked.samples
        self.answered += 1
        self.crossed += bool(sample.seams)
        if seen != sample.token_ids or len(seen) != TOKENS or len(sample.logprobs) != TOKENS:
            self.faults.append(f"{asked.id}: {len(seen)} tokens came of {len(sample.token_ids)}")
        if not sample.version:
            self.faults.append(f"{asked.id}: nobody knows what sampled it")
        self.first.append(times[1] - times[0])
        self.gaps.append(max((b - a for a, b in pairwise(times[1:])), default=0.0))
        self.arrivals += times[1:]

    def silence(self) -> float:
        """The longest that no token came, in seconds."""
        times = sorted(self.arrivals)
        return max(b - a for a, b in pairwise(times))

    def forget(self) -> None:
        """Begin a new measurement."""
        self.first, self.gaps, self.arrivals = [], [], []


async def main(home: Path) -> None:
    """Each scenario, there and back."""
    models = {}
    for number in (1, 2):
        directory = make_tiny_model(home / f"m{number}", tie=False, seed=number)
        models[f"m@{number}"] = Model(directory, golden_probe(directory))
    manifest_of(models["m@1"].directory)
    for number in range(3, 4 + ROUNDS):
        directory = adapted(home / f"m{number}", models["m@1"].directory, seed=number)
        models[f"m@{number}"] = Model(directory, golden_probe(directory))
    for replicas, mode, rank in SCENARIOS:
        await _scenario(home, models, replicas, mode, rank)


async def _scenario(
    home: Path, models: dict[str, Model], replicas: int, mode: SwapMode, rank: int
) -> None:
    how = "an adapter" if rank else mode
    what = f"swap under {STREAMS} streams, {how}, {replicas} replica{'s' * (replicas > 1)}"
    found: list[dict[str, float]] = []
    async with _traffic(home, models, replicas, mode, rank) as traffic:
        for number in range(ROUNDS + 1):  # the first one is to warm up
            version = f"m@{3 + number if rank else 2 - number % 2}"
            measured = await _swap(traffic, models, version)
            found += [measured] if number else []
    assert not traffic.faults, traffic.faults
    middle = {name: statistics.median(m[name] for m in found) for name in found[0]}
    row(what, "answered, failed, lost, doubled", f"{traffic.answered}, 0, 0, 0")
    row(what, "streams answered by two versions", f"{traffic.crossed}")
    for name in ("gap", "first", "silence"):
        told = {
            "gap": "longest pause within a stream",
            "first": "longest wait for a first token",
            "silence": "longest time without any token",
        }[name]
        usual = middle[f"{name} before"]
        row(what, told, f"{1000 * middle[name]:.0f} ms (undisturbed {1000 * usual:.0f} ms)")
    split = " + ".join(f"{1000 * middle[phase]:.0f}" for phase in PHASES)
    row(what, " + ".join(PHASES), f"{split} ms")
    row(what, "until all hold it, draining included", f"{1000 * middle['all']:.0f} ms")


@asynccontextmanager
async def _traffic(
    home: Path, models: dict[str, Model], replicas: int, mode: SwapMode, rank: int
) -> AsyncIterator[Traffic]:
    settings = EngineSettings(threads=1, max_lora_rank=rank)
    logs = [home / f"{mode}-{rank}-{number}.log" for number in range(replicas)]
    pool = Pool([VllmProcess("m", settings, log) for log in logs], swap_mode=mode)
    await pool.start(models["m@1"].directory, "m@1", models["m@1"].probe)
    try:
        traffic = Traffic(pool, "m@1")
        async with asyncio.TaskGroup() as clients:
            for _ in range(STREAMS):
                clients.create_task(traffic.client())
            yield traffic
            traffic.ended = True
    finally:
        await pool.stop()


async def _swap(traffic: Traffic, models: dict[str, Model], version: str) -> dict[str, float]:
    """Promote a version under traffic; seconds."""
    model, pool = models[version], traffic.pool
    before = await _watch(traffic)
    begun = time.perf_counter()
    await pool.stage(model.directory, version, model.probe)
    traffic.alias = version
    pool.wake()
    await pool.swap(model.directory, version, model.probe)
    seconds = {"all": time.perf_counter() - begun}
    during = await _watch(traffic, begun)
    for phase in PHASES:
        spent = [status["probe"]["seconds"].get(phase, 0.0) for status in pool.status()]
        seconds[phase] = max(spent)
    return seconds | during | {f"{name} before": value for name, value in before.items()}


async def _watch(traffic: Traffic, begun: float | None = None) -> dict[str, float]:
    """Until each client has answered twice, since now or with what was seen already."""
    if begun is None:
        traffic.forget()
    end = traffic.answered + 2 * STREAMS
    while traffic.answered < end:  # noqa: ASYNC110 - the clients have no event for it
        await asyncio.sleep(0.01)
    found = {
        "gap": max(traffic.gaps),
        "first": max(traffic.first),
        "silence": traffic.silence(),
    }
    traffic.forget()
    return found
