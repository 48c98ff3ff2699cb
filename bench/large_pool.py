"""One gateway with 200 replicas and 2,000 open streams: its memory, a choice, and a poll of all.

The replicas are ports of one process, which sends prepared answers (gateways.py). A stream stands
still after its first event until all are open. Run as a script it is the replicas.
"""

import asyncio
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import aiohttp
import uvloop

from bench.affinity import resident_gib
from bench.gateway import PATH, session
from bench.gateways import STREAMED, PreparedAnswers, published_root, started
from bench.rounds import ROUNDS, row
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.processes import die_with_parent
from cray_agents.runtime.pool.published_replicas import FollowedPool
from cray_agents.runtime.pool.vllm_engine import ReplicaServer, VllmEngine
from cray_agents.runtime.telemetry.call_metrics import scrape

REPLICAS, STREAMS = 200, 2000
HELD = 5.0  # seconds that all streams stay open
QUESTION = "What is 47 + 385? Think step by step. " * 50
METRICS = b"".join(b"vllm:series_%d 1.0\n" % number for number in range(200))


class HeldStreams(PreparedAnswers):
    """Connections to the replicas: all streams go on when the last one has been open for HELD."""

    streams = STREAMS
    held: ClassVar[list[tuple[asyncio.Transport, bytes]]] = []

    def answer(self, head: bytes, body: bytes) -> None:
        """Send a stream's first event, or all of the metrics."""
        if head.startswith(b"get"):
            first = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(first % len(METRICS) + METRICS)
            return
        event, end, rest = self.named(STREAMED, head).partition(b"\n\n")
        self._transport.write(event + end)
        self.held.append((self._transport, rest))
        if len(self.held) == self.streams:
            asyncio.get_running_loop().call_later(HELD, self._go_on)

    def _go_on(self) -> None:
        for transport, rest in self.held:
            transport.write(rest)
        self.held.clear()


async def _replicas(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(HeldStreams, "127.0.0.1", 0) for _ in range(count)]
    print(",".join(str(server.sockets[0].getsockname()[1]) for server in servers), flush=True)
    await asyncio.Event().wait()


async def main(home: Path) -> None:
    """Print the rows at full size."""
    await measure(home)


async def measure(home: Path, *, replicas: int = REPLICAS, streams: int = STREAMS) -> None:
    """Print a row each for memory, choices, and polls."""
    what = f"{replicas} replicas, {streams:,} open streams, one gateway"
    sizes = (str(os.getpid()), str(replicas), str(streams))
    with started("bench.large_pool", *sizes) as (ports, _):
        root = published_root(home / "root", ports.split(","))
        argv = ["cray_agents", "up", "--gateway-only", "--home", str(root.root), "--port", "0"]
        with started(*argv, says="further gateway", cwd=root.root) as (url, pid):
            idle = resident_gib(pid)
            opened = await _open_streams(url.removesuffix("/v1") + PATH, streams, pid)
        added = (opened - idle) * 2**20 / streams
        row(what, "memory", f"{1024 * opened:,.0f} MiB, {added:.0f} KiB a stream")
        for name, microseconds in (await _choices(root, streams)).items():
            row(what, f"choice of a replica, {name}", f"{microseconds:.0f} µs")
        asked = 1000 * await _poll([int(port) for port in ports.split(",")])
        row(what, "one poll of all replicas' metrics", f"{asked:.0f} ms")


async def _open_streams(url: str, count: int, pid: int) -> float:
    """The gateway's GiB while all streams are open."""
    opened = asyncio.Barrier(count + 1)

    async def ask(http: aiohttp.ClientSession, number: int) -> None:
        said = [{"role": "user", "content": f"{number}. {QUESTION}"}]
        body = {"model": "m", "messages": said, "stream": True}
        async with http.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            await response.content.readany()
            await opened.wait()
            assert b"[DONE]" in await response.read()

    async with session() as http, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(ask(http, number))
        await opened.wait()
        return resident_gib(pid)


async def _choices(root: Home, streams: int) -> dict[str, float]:
    """Microseconds of processor time of a choice: in a gateway alone, and beside others."""
    figures = {}
    pool = FollowedPool(root.serving, answer_timeout=60, on_failure=lambda *failure: None)
    await pool.look()
    calls = [
        EngineCall(PATH, {"messages": [{"role": "user", "content": f"{n}. {QUESTION}"}]}, "x",
                   conversation=f"run-{n}")
        for n in range(streams)
    ]  # fmt: skip
    with ExitStack() as stack:
        for replica in pool._replicas:
            for _ in range(streams // len(pool._replicas)):
                stack.enter_context(replica.requests.track("m@1"))
        for pool.shared in (False, True):
            pool._places.clear()
            for turn in ("first call", "next call"):
                begun = time.process_time()
                for call in calls:
                    await pool._pick("m@1", 0.0, (), call)
                spent = time.process_time() - begun
                beside = " beside other gateways" if pool.shared else ""
                figures[f"a conversation's {turn}{beside}"] = 1e6 * spent / streams
    await pool.close()
    return figures


async def _poll(ports: list[int]) -> float:
    """Seconds until all replicas have told their metrics; the first round connects."""
    engines = [
        ReplicaServer(str(port), "host", "m@1", VllmEngine(f"http://127.0.0.1:{port}", "m", "s"))
        for port in ports
    ]
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        assert all(one.text is not None for one in await scrape(engines))
        rounds.append(time.perf_counter() - begun)
    for each in engines:
        assert each.engine is not None
        await each.engine.close()
    return statistics.median(rounds)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    HeldStreams.streams = int(sys.argv[3])
    uvloop.run(_replicas(int(sys.argv[2])))
