"""Our gateway beside LiteLLM, vllm-router and sglang-router, over one scripted engine.

Ours is one process that records everything: the exact tokens of each call are on the disk before
its answer ends. Of the others none records tokens; LiteLLM is set as fast as it can fairly be (see
litellm.py), the routers send in turn, without retries. Throughput is with an engine that answers at
once, so the gateway and the client, which is Python and has the same cores, are all there is to
measure. Times to the first token and between tokens are with one that streams sixteen pieces, one
every PACE seconds. All sides in turn, ROUNDS rounds.
"""

import asyncio
import json
import os
import statistics
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.gateways import published_root, started
from bench.load import Load, ask, summary
from bench.rivals.environments import make_environments
from bench.rivals.litellm import litellm_proxy
from bench.rivals.report import Report
from bench.rivals.server_process import answers, foreign, free_port, program, wait_until

CONCURRENT = [int(n) for n in os.environ.get("CRAY_BENCH_CONCURRENT", "1,16,64,256").split(",")]
ROUNDS = int(os.environ.get("CRAY_BENCH_ROUNDS", "3"))
REQUESTS = int(os.environ.get("CRAY_BENCH_REQUESTS", "1000"))  # of a measurement, at most
PACE = 0.02  # seconds between two pieces
SAYS = [{"role": "user", "content": "What is 47 + 385?"}]
START = 120.0  # seconds that a router may take to answer
DIRECT, OURS = "engine itself", "cray-agents"
WANTED = {
    "LiteLLM": ("litellm", "litellm"),
    "vllm-router": ("vllm_router", "vllm-router"),
    "sglang-router": ("sglang_router", "sglang-router"),
}
COMMANDS = {"vllm-router": ["vllm-router"], "sglang-router": ["sglang-router", "launch"]}
ELSEWHERE = {
    "Bifrost": "its npm package (1.6.3) downloads its program from its maker's site when it is "
    "started, and brings none itself",
}


async def main(home: Path) -> None:
    """Two tables: requests a second, and the times of a stream."""
    rivals = await asyncio.to_thread(make_environments, WANTED)
    rivals.missing |= ELSEWHERE
    names = [DIRECT, OURS, *rivals.pythons]
    report = Report("gateway", "Gateways over a scripted engine", ["what", "connections", *names])
    for pace, stream, what in (
        (0.0, False, "requests/s"),
        (0.0, True, "requests/s, streaming"),
        (PACE, True, "ms to first token: median, p99"),
    ):
        with ExitStack() as stack:
            ports = _sides(stack, home / f"{what[:2]}-{pace}-{stream}", pace, rivals.pythons)
            for connections in CONCURRENT:
                loads = await _measured(ports, connections, pace, stream)
                _add(report, what, connections, loads, pace)
    report.add("records of a call", "", "nothing", "messages and exact tokens, on disk before the "
               "answer ends", *("nothing" for _ in rivals.pythons))  # fmt: skip
    report.notes.append(
        f"Medians of {ROUNDS} rounds of at most {REQUESTS} requests; in brackets the share of the "
        "engine's own rate. Where all but one reach the same rate, it is the client's limit."
    )
    report.publish(rivals)


def _sides(stack: ExitStack, home: Path, pace: float, pythons: dict[str, Path]) -> dict[str, int]:
    """Start an engine and all gateways before it; return their ports by name."""
    home.mkdir(parents=True)
    argv = ["bench.rivals.engine", str(os.getpid()), str(pace)]
    engine = stack.enter_context(started(*argv))[0]
    root = published_root(home / "root", [engine])
    (root.root / "cray-agents.toml").write_text("max_num_seqs = 4096\n")  # none waits for another
    command = ["cray_agents", "up", "--gateway-only", "--home", str(root.root), "--port", "0"]
    url, _ = stack.enter_context(started(*command, says="further gateway", cwd=root.root))
    ports = {DIRECT: int(engine), OURS: int(url.removesuffix("/v1").rpartition(":")[2])}
    target = f"http://127.0.0.1:{engine}"
    for name, python in pythons.items():
        if name == "LiteLLM":
            proxy = stack.enter_context(litellm_proxy(target, "m", python, {}))
            ports[name] = int(proxy.rpartition(":")[2])
        else:
            ports[name] = stack.enter_context(router(name, target, python, home))
    return ports


@contextmanager
def router(name: str, target: str, python: Path, folder: Path) -> Iterator[int]:
    """A router of the vLLM or the SGLang project before one server; gives its port.

    Raises RuntimeError with the end of its log if it does not answer in START seconds.
    """
    port, folder = free_port(), folder / name
    folder.mkdir()
    words = [
        "--host", "127.0.0.1", "--port", port, "--worker-urls", target, "--policy", "round_robin",
        "--prometheus-port", free_port(), "--disable-retries", "--disable-circuit-breaker",
        "--log-level", "error",
    ]  # fmt: skip
    command, *first = COMMANDS[name]
    body = json.dumps({"model": "m", "messages": SAYS}).encode()
    url, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"content-type": "application/json"}
    question = urllib.request.Request(url, body, kind)
    argv = [python.parent / command, *first, *words]
    with program(argv, folder, foreign(folder)) as process:
        wait_until(lambda: answers(question), process, folder, START)
        yield port


async def _measured(
    ports: dict[str, int], connections: int, pace: float, stream: bool
) -> dict[str, list[Load]]:
    """The loads of ROUNDS rounds, all sides in turn, after one that warms."""
    body = json.dumps({"model": "m", "messages": SAYS, "stream": stream}, separators=(",", ":"))
    # with a pace an answer takes a third of a second: three for each connection
    requests = 3 * connections if pace else min(REQUESTS, 200 * connections)
    loads: dict[str, list[Load]] = {name: [] for name in ports}
    for number in range(ROUNDS + 1):
        for name, port in ports.items():
            load = await ask(port, body.encode(), connections, requests)
            if number:
                loads[name].append(load)
    return loads


def _add(
    report: Report, what: str, connections: int, loads: dict[str, list[Load]], pace: float
) -> None:
    if not pace:
        rates = {name: [load.rate for load in found] for name, found in loads.items()}
        shares = {
            name: statistics.median(a / b for a, b in zip(found, rates[DIRECT], strict=True))
            for name, found in rates.items()
        }
        cells = [f"{statistics.median(found):,.0f} ({shares[n]:.2f})" for n, found in rates.items()]
        report.add(what, str(connections), *cells)
        return
    firsts = {n: [at for load in found for at in load.firsts] for n, found in loads.items()}
    gaps = {n: [gap for load in found for gap in load.gaps] for n, found in loads.items()}
    report.add(what, str(connections), *map(summary, firsts.values()))
    between = f"ms between tokens, of {1000 * pace:.0f}: median, p99"
    report.add(between, str(connections), *map(summary, gaps.values()))
