"""The gateway, capture on, against the same vLLM directly, with LiteLLM's proxy beside it.

The routers cannot take part: a replica answers only who knows its secret, also when a router asks
for its health. gateway.py has them, over a scripted engine.
"""

import asyncio
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.gateway import CHAT, CONCURRENT, PATH, latencies, session, throughput
from bench.gateways import started
from bench.rivals.environments import ROOT, make_environments
from bench.rivals.litellm import litellm_proxy
from bench.rivals.report import Report
from bench.rounds import ROUNDS
from cray_agents import local_platform
from cray_agents.cli.user_files import load
from cray_agents.runtime.vllm_plugins.wire import HEADER
from tests.support.unix_servers import socket_of
from tests.support.vllm_pool import secret_of

BOOK = ROOT / "cray_agents" / "cli" / "calculator_loop.py"
LOCKED = "a replica of ours answers only who knows its secret, also about its health"
MISSING = dict.fromkeys(("vllm-router", "sglang-router"), LOCKED)


async def main(home: Path) -> None:
    """Throughput and latency through the gateway and through LiteLLM, against vLLM itself."""
    rivals = await asyncio.to_thread(make_environments, {"LiteLLM": ("litellm", "litellm")})
    rivals.missing |= MISSING
    load(BOOK).make_model(home / "model")
    with ExitStack() as stack:
        platform = stack.enter_context(
            local_platform(home / "root", model=home / "model", name="calc")
        )
        replica = (await platform.pool())[0]
        await platform.close()
        path = socket_of(replica["pid"])
        direct, _ = stack.enter_context(started("tests.support.unix_servers", path))
        unlock = {HEADER: secret_of(replica["pid"])}
        urls = {"vLLM": direct, "cray-agents": platform.url}
        for name, python in rivals.pythons.items():
            urls[name] = stack.enter_context(litellm_proxy(direct, "calc", python, unlock))
        urls = {name: url + PATH for name, url in urls.items()}
        report = Report("vllm-gateway", "Gateways over vLLM", ["what", *urls])
        async with session(unlock) as http:
            for stream in (False, True):
                await _throughput(report, http, urls, stream)
            await _latency(report, http, urls)
    report.notes.append(f"Medians of {ROUNDS} rounds; in brackets the share of vLLM's own rate.")
    report.publish(rivals)


async def _throughput(
    report: Report, http: aiohttp.ClientSession, urls: dict[str, str], stream: bool
) -> None:
    body: dict[str, Any] = {**CHAT, "model": "calc", "stream": stream}
    measures = {name: throughput(http, url, body, 320) for name, url in urls.items()}
    for measure in measures.values():
        await measure()  # warm
    rounds = [{name: await measure() for name, measure in measures.items()} for _ in range(ROUNDS)]
    cells = []
    for name in urls:
        rate = statistics.median(found[name] for found in rounds)
        share = statistics.median(found[name] / found["vLLM"] for found in rounds)
        cells.append(f"{rate:,.1f} ({share:.2f})")
    what = f"requests/s, {CONCURRENT} concurrent, 64 tokens{', streaming' if stream else ''}"
    report.add(what, *cells)


async def _latency(report: Report, http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
    measure = latencies(http, urls, {**CHAT, "model": "calc", "max_tokens": 1, "min_tokens": 1})
    await measure(20)
    rounds = [await measure() for _ in range(ROUNDS)]
    cells = [f"{statistics.median(found[name] for found in rounds):.1f}" for name in urls]
    report.add("ms of one at a time, 1 token", *cells)
