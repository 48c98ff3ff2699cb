"""`make bench`: ratios measured side by side in one run, medians of ROUNDS rounds. No assertions.

Prints Markdown rows for BENCHMARKS.md. Runs real vLLM (about two minutes on two cores).
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import orjson

from cray_agents import Agent, ScriptedEngine, local_platform
from cray_agents.cli.agents import load
from cray_agents.paths import Home
from cray_agents.records import Event, ModelCall
from cray_agents.runtime.store import Store
from cray_agents.scripted import tool_call
from cray_agents.tools.calculator import calculator

ROUNDS = 5
BOOK = Path(__file__).parents[1] / "cookbook" / "02_calculator_loop.py"
CHAT = {
    "messages": [{"role": "user", "content": "What is 47 + 385?"}],
    "max_tokens": 64,
    "min_tokens": 64,
    "ignore_eos": True,
}
Measure = Callable[[], Awaitable[float]]


async def side_by_side(what: str, unit: str, ours: Measure, theirs: Measure, names: str) -> None:
    """Measure both in turn, ROUNDS times; print the medians and the median ratio."""
    pairs = [(await ours(), await theirs()) for _ in range(ROUNDS)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"| {what} | {names} | {first:,.1f} / {second:,.1f} {unit} | {ratio:.2f} |", flush=True)


def load_of(session: aiohttp.ClientSession, url: str, model: str, stream: bool) -> Measure:
    """Requests per second at 32 concurrent requests of 64 tokens."""

    async def measure(total: int = 192) -> float:
        places = asyncio.Semaphore(32)

        async def one() -> None:
            async with (
                places,
                session.post(url, json={**CHAT, "model": model, "stream": stream}) as r,
            ):
                await r.read()
                assert r.status == 200

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(total)))
        return total / (time.perf_counter() - begun)

    return measure


def latency_of(session: aiohttp.ClientSession, url: str, model: str) -> Measure:
    """Median milliseconds of a one-token request, one at a time."""

    async def measure() -> float:
        times = []
        for _ in range(40):
            begun = time.perf_counter()
            body = {**CHAT, "model": model, "max_tokens": 1, "min_tokens": 1}
            async with session.post(url, json=body) as response:
                await response.read()
            times.append(1000 * (time.perf_counter() - begun))
        return statistics.median(times)

    return measure


async def gateway(home: Path) -> None:
    """The gateway, capture on, against the same vLLM directly."""
    book = load(BOOK)
    book.make_model(home / "model")
    with local_platform(home / "root", model=home / "model", name="calc") as platform:
        port = (await platform.pool())[0]["port"]
        chat = "/v1/chat/completions"
        through, direct = platform.url + chat, f"http://127.0.0.1:{port}{chat}"
        async with aiohttp.ClientSession() as session:
            for stream in (False, True):
                ours = load_of(session, through, "calc", stream)
                theirs = load_of(session, direct, "calc", stream)
                await ours(), await theirs()  # warm
                what = f"32 concurrent, 64 tokens{', streaming' if stream else ''}"
                await side_by_side(what, "requests/s", ours, theirs, "gateway / vLLM")
            ours, theirs = (latency_of(session, url, "calc") for url in (through, direct))
            await side_by_side("one at a time, 1 token", "ms", ours, theirs, "gateway / vLLM")
        await platform.close()


async def store(home: Path) -> None:
    """Durable appends of 4 KB records by 64 callers, against write + fsync of the same bytes."""
    said = {"role": "assistant", "content": "x" * 3700}
    call = ModelCall(id="c", run_id="r", model="m@1", messages=[], message=said)
    record = orjson.dumps(call.model_dump()) + b"\n"
    number = iter(range(10**9))

    async def ours(total: int = 4000) -> float:
        events = Store(Home(home / f"store{next(number)}"))

        async def one(caller: int) -> None:
            for n in range(total // 64):
                name = f"{caller}.{n}"
                body = {**call.model_dump(), "id": name, "run_id": name}
                await events.append([Event(id=name, run_id=name, kind="call", body=body)])

        begun = time.perf_counter()
        await asyncio.gather(*(one(caller) for caller in range(64)))
        seconds = time.perf_counter() - begun
        await events.close()
        return total / seconds

    async def theirs(total: int = 1000) -> float:
        with (home / "raw").open("ab", buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(total):
                file.write(record)
                os.fsync(file.fileno())
        return total / (time.perf_counter() - begun)

    await side_by_side(
        "durable 4 KB records, 64 callers", "records/s", ours, theirs, "store / write+fsync"
    )


async def agent() -> None:
    """The agent's own time per turn: a scripted model, a real tool."""
    times = []
    for _ in range(200):
        engine = ScriptedEngine([tool_call("calculator", expression="1 + 1"), "2"])
        runner = Agent(name="a", tools=[calculator], engine=engine)
        begun = time.perf_counter()
        await runner.run("1 + 1?")
        times.append(1000 * (time.perf_counter() - begun) / 2)
    median = statistics.median(times)
    print(f"| agent loop, scripted model, one tool | per turn | {median:.2f} ms | |", flush=True)


async def main() -> None:
    """All of them."""
    print("| what | of | median | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        await agent()
        await store(Path(folder))
        await gateway(Path(folder))


if __name__ == "__main__":
    asyncio.run(main())
