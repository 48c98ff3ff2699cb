"""Waits: how long a client waits at most while another key asks for all that it may.

Both keys are at one gateway over a scripted engine; the client sends one short chat after another.
"""

import asyncio
import sys
import time
from pathlib import Path

import aiohttp
import orjson

from bench.corpus import write_corpus
from bench.rounds import row
from cray_agents.paths import Home
from cray_agents.runtime.gateway.http import bounds
from tests.support.timed_gateway import TimedGateway, timed_gateway

RUNS, AT_ONCE, CHATS = 6000, 40, 100
CHAT = "/v1/chat/completions"
SAID = {"role": "user", "content": "What is 47 + 385?"}


async def main(home: Path) -> None:
    """A row for each way to keep the gateway busy."""
    write_corpus(Home(home / "root"), RUNS)
    rewards = [
        {"kind": "reward", "run_id": "r", "id": f"r{n}", "body": {"name": f"n{n}", "value": 0.5}}
        for n in range(bounds.MAX_EVENTS)
    ]
    text = {"role": "user", "content": "x" * (bounds.MAX_BODY - 100)}
    with timed_gateway(home / "root", "quick") as gateway:
        busy: dict[str, tuple[str, bytes | None, int]] = {
            "nothing else is asked": ("/v1/models", None, 0),
            f"{AT_ONCE} searches of texts are": (
                "/v1/trajectories?text=nobody-said-this&limit=1000", None, AT_ONCE,
            ),
            f"{AT_ONCE} lists with tokens are": (
                "/v1/trajectories?limit=1000&tokens=true", None, AT_ONCE,
            ),
            f"{AT_ONCE} statistics are": (
                "/v1/trajectories/stats?by=agent,task&bucket=1h&facets=agent,tag", None, AT_ONCE,
            ),
            f"8 requests of {bounds.MAX_MESSAGES:,} messages are": (
                CHAT, _chat([SAID] * bounds.MAX_MESSAGES), 8,
            ),
            "4 requests of a text of 64 MiB are": (CHAT, _chat([text]), 4),
            f"8 requests of {bounds.MAX_EVENTS:,} rewards are": (
                "/v1/trajectories/events", orjson.dumps({"events": rewards}), 8,
            ),
        }  # fmt: skip
        run = orjson.dumps({"model": "m", "messages": [SAID]})
        async with gateway.session("one") as http, http.post(f"/runs/r{CHAT}", data=run) as made:
            assert made.status == 200, await made.text()
        for what, (path, body, count) in busy.items():
            (home / "body").write_bytes(body or b"")
            asked = [gateway.url, gateway.keys["one"], path, str(home / "body"), str(count)]
            longest = await _longest_wait(gateway, asked)
            row("longest wait of another client while", what, f"{1000 * longest:,.0f} ms")


def _chat(messages: list[dict[str, str]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages})


async def _longest_wait(gateway: TimedGateway, asked: list[str]) -> float:
    """Seconds that the slowest of short chats took while another process asks.

    There are CHATS of them at least.
    """
    argv = [sys.executable, "-m", "bench.waits", *asked]
    asking = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert asking.stdout is not None
    await asking.stdout.readline()  # it has begun
    longest, count = 0.0, 0
    async with gateway.session("other") as http:
        while count < CHATS or asking.returncode is None:
            begun = time.perf_counter()
            async with http.post(CHAT, data=_chat([SAID])) as response:
                assert response.status == 200, await response.text()
            longest, count = max(longest, time.perf_counter() - begun), count + 1
    assert asking.returncode == 0
    return longest


async def _ask(url: str, key: str, path: str, body: str, count: str) -> None:
    """Ask so often at once, with what a file holds."""
    content = Path(body).read_bytes() or None
    print("begun", flush=True)

    async def ask(http: aiohttp.ClientSession) -> None:
        method = "POST" if content else "GET"
        async with http.request(method, path, data=content) as response:
            assert response.status == 200, await response.text()
            await response.read()

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, headers=headers, timeout=timeout, connector=connector
    ) as http:
        await asyncio.gather(*(ask(http) for _ in range(int(count))))


if __name__ == "__main__":
    asyncio.run(_ask(*sys.argv[1:]))
