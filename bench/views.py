"""Views: a run of 5,000 turns in parts, and statistics over many runs, over HTTP.

    python -m bench.views [RUNS]

Prints a line per route: the first answer, the middle and the 95th percentile of the next ones, in
milliseconds, and the longest that the gateway's event loop stood still meanwhile.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from bench.corpus import write_corpus
from cray_agents.paths import Home
from cray_agents.runtime.disk.checksums import with_crc
from cray_agents.runtime.store.segments.sealed import write_sealed
from tests.support.scripted_gateway import Gateway, served

TURNS, TURN_BYTES = 5000, 10_000
TIMES = 20
LONG = "long"


def write_long_run(home: Home) -> int:
    """Write the long run as a sealed segment; return the bytes of its events."""
    lines = [with_crc(orjson.dumps(event)) for event in _events()]
    home.segments.mkdir(parents=True, exist_ok=True)
    write_sealed(home.segments, "segment_long-0000", iter(lines))
    return sum(map(len, lines))


def _events() -> Any:
    """A description of 5,000 turns with tool calls, and calls that see the last messages only."""
    text = "abcdefghij" * 50
    turns = []
    for number in range(TURNS):
        asked = [{"role": "user", "content": f"{number - back}: {text}"} for back in range(12)]
        said = {"role": "assistant", "content": f"{number} {text}"}
        call = {
            "id": f"call-{number}",
            "run_id": LONG,
            "model": "calc@1",
            "messages": asked,
            "message": said,
            "prompt_token_ids": list(range(300)),
            "token_ids": list(range(60)),
            "logprobs": [-0.1] * 60,
            "started": float(number),
            "seconds": 0.5,
        }
        done = {"id": f"t{number}", "name": "search", "arguments": "{}", "result": text}
        turns.append({"call_id": f"call-{number}", "tool_calls": [done]})
        yield _event(f"call-{number}", "call", number, call)
    run: dict[str, Any] = {"id": LONG, "agent": "a", "model": "calc@1", "input": "q", "output": "r"}
    run |= {"stop_reason": "completed", "trajectory": {"messages": [], "turns": turns}}
    yield _event("long-run", "run", TURNS, run)


def _event(name: str, kind: str, when: float, body: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "run_id": LONG, "kind": kind, "time": float(when), "body": body}


async def measure(gateway: Gateway, path: str) -> None:
    """Ask a route again and again; print its times and the longest stop of the event loop."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before - 0.001)

    ticking = asyncio.create_task(tick())
    seconds = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        async with gateway.http.get(gateway.url + path) as response:
            size = len(await response.read())
            assert response.status == 200
        seconds.append(time.perf_counter() - begun)
    ticking.cancel()
    first, later = seconds[0], sorted(seconds[1:])
    middle, high = statistics.median(later), later[int(len(later) * 0.95)]
    print(
        f"{path[:70]:<70} {first * 1000:8.0f} {middle * 1000:8.0f} {high * 1000:8.0f}"
        f" {longest * 1000:8.0f} {size / 1e3:9.0f} KB",
        flush=True,
    )


async def run(runs: int) -> None:
    """Write a root, serve it, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        write_corpus(home, runs)
        size = write_long_run(home)
        print(f"{runs} runs, and one of {TURNS} turns and {size / 1e6:.0f} MB")
        begun = time.perf_counter()
        async with served(Path(folder)) as gateway:
            print(f"indexed after {time.perf_counter() - begun:.0f} s")
            print(f"{'':<70} {'first':>8} {'median':>8} {'p95':>8} {'stop':>8}")
            for path in (
                f"/v1/trajectories/{LONG}/outline",
                f"/v1/trajectories/{LONG}/turns?from=2500&limit=20",
                f"/v1/trajectories/{LONG}/turns?from=4999&limit=1",
                "/v1/trajectories?view=summary&order=newest&limit=50",
                "/v1/trajectories?view=summary&order=newest&limit=50&min_seconds=2",
                "/v1/trajectories/stats?percentiles=false",
                "/v1/trajectories/stats?by=model",
                "/v1/trajectories/stats?percentiles=false&facets=agent,model,split,stop_reason",
                "/v1/trajectories/stats?percentiles=false&histograms=reward,seconds,tokens",
                "/v1/usage?by=model&bucket=1d",
            ):
                await measure(gateway, path)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
