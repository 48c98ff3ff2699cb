"""The gateway alone, over a scripted engine; what clients of it measure is in rivals/, too."""

import asyncio
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.rounds import Measure, row
from tests.support.gateway_process import gateway as scripted_gateway

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
