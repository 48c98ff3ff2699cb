"""The gateway, capture on, against the same vLLM directly, with LiteLLM's proxy beside it."""

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from cray_agents import local_platform
from cray_agents.cli.agent.agents import load
from cray_agents.runtime.vllm_plugins.lock import HEADER
from tests.bench.litellm import litellm_proxy
from tests.bench.rounds import Measure, row, side_by_side
from tests.support.gateway_process import gateway as scripted_gateway
from tests.support.vllm_pool import secret_of

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "cookbook" / "02_calculator_loop.py"
PATH = "/v1/chat/completions"
CONCURRENT = 32
REQUESTS = int(os.environ.get("CRAY_BENCH_REQUESTS", "1000000"))  # of `memory`
SHARES = 10  # after which it looks
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 47 + 385?"}],
    "max_tokens": 64,
    "min_tokens": 64,
    "ignore_eos": True,
}


def session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Its idle connections are dropped before vLLM drops them."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=1.5),
        headers={
            "content-type": "application/json",
            "authorization": "Bearer none",
            **(headers or {}),
        },
    )


def throughput(http: aiohttp.ClientSession, url: str, body: dict[str, Any], total: int) -> Measure:
    """Requests per second at CONCURRENT concurrent requests."""
    content = orjson.dumps(body)

    async def measure() -> float:
        left = iter(range(total))

        async def work() -> None:
            for _ in left:
                async with http.post(url, data=content) as response:
                    await response.read()
                    assert response.status == 200, await response.text()

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
        return total / (time.perf_counter() - begun)

    return measure


def latencies(http: aiohttp.ClientSession, urls: dict[str, str], body: dict[str, Any]) -> Any:
    """Median milliseconds of one request at a time, all URLs in turn."""
    content = orjson.dumps(body)

    async def measure(count: int = 100) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in urls}
        for _ in range(count):
            for name, url in urls.items():
                begun = time.perf_counter()
                async with http.post(url, data=content) as response:
                    await response.read()
                times[name].append(1000 * (time.perf_counter() - begun))
        return {name: statistics.median(found) for name, found in times.items()}

    return measure


async def against_vllm(home: Path) -> None:
    """Throughput and latency through the gateway and through LiteLLM, against vLLM itself."""
    script = ROOT / "requirements" / "environment.sh"
    await asyncio.to_thread(subprocess.run, [str(script), "litellm"], check=True)
    load(BOOK).make_model(home / "model")
    with ExitStack() as stack:
        platform = stack.enter_context(
            local_platform(home / "root", model=home / "model", name="calc")
        )
        replica = (await platform.pool())[0]
        await platform.close()
        direct = f"http://127.0.0.1:{replica['port']}"
        unlock = {HEADER: secret_of(replica["pid"])}
        python = ROOT / ".venv-litellm" / "bin" / "python"
        litellm = stack.enter_context(litellm_proxy(direct, "calc", python, unlock))
        urls = {"gateway": platform.url, "LiteLLM": litellm, "vLLM": direct}
        urls = {name: url + PATH for name, url in urls.items()}
        async with session(unlock) as http:
            for stream in (False, True):
                body = {**CHAT, "model": "calc", "stream": stream}
                measures = {n: throughput(http, url, body, 320) for n, url in urls.items()}
                for measure in measures.values():
                    await measure()  # warm
                what = f"{CONCURRENT} concurrent, 64 tokens{', streaming' if stream else ''}"
                await side_by_side(what, "requests/s", measures)
            await _latency(http, urls)


async def _latency(http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
    measure = latencies(http, urls, {**CHAT, "model": "calc", "max_tokens": 1, "min_tokens": 1})
    await measure(20)
    rounds = [await measure() for _ in range(5)]
    for name in ("gateway", "LiteLLM"):
        added = statistics.median(found[name] - found["vLLM"] for found in rounds)
        alone = statistics.median(found["vLLM"] for found in rounds)
        row("one at a time, 1 token", f"{name}, over vLLM's {alone:.1f} ms", f"{added:+.2f} ms")


async def memory(home: Path) -> None:
    """The gateway's own memory over REQUESTS conversations, each another, on a scripted engine."""
    with scripted_gateway(home / "scripted") as (url, process):
        numbers = iter(range(REQUESTS))

        async def work(http: aiohttp.ClientSession, last: int) -> None:
            for number in numbers:
                said = [{"role": "user", "content": f"What is {number} + 385?"}]
                async with http.post(url + PATH, json={"model": "m", "messages": said}) as response:
                    assert response.status == 200, await response.text()
                if number >= last:
                    return

        for share in range(1, SHARES + 1):
            last = REQUESTS * share // SHARES - CONCURRENT
            async with session() as http:
                await asyncio.gather(*(work(http, last) for _ in range(CONCURRENT)))
            what = f"after {REQUESTS * share // SHARES:,} requests"
            row("scripted engine, one process", what, f"{_anonymous(process.pid):,.0f} MiB")


def _anonymous(pid: int) -> float:
    """MiB of a process that are no file's."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell the memory of {pid}")


async def alone(home: Path) -> None:
    """The gateway in front of a scripted engine that answers at once."""
    with scripted_gateway(home / "scripted") as (url, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "What is 47 + 385?"}]}
        async with session() as http:
            for stream in (False, True):
                ask = throughput(http, url + PATH, {**body, "stream": stream}, 2000)
                await ask()
                figure = statistics.median([await ask() for _ in range(5)])
                what = f"scripted engine, one process{', streaming' if stream else ''}"
                row(what, f"{CONCURRENT} concurrent", f"{figure:,.0f} requests/s")
