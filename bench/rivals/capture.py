"""Our gateway beside two other servers that record exact tokens: OpenEnv's and tinker-cookbook's.

All are in front of one vLLM, a replica of ours. OpenEnv's capture server asks it for token ids and
logprobs. tinker-cookbook's capture proxy samples through Tinker's client, so it asks our platform's
Tinker API, which records too: its figures hold both. Both run with the flags of their
documentation.

An answer whose tokens nobody kept is lost: each server is killed with -9, with all it started,
while 32 clients ask, at random moments. An answer counts when its client had got it whole. Kept is
what is on the disk then: of ours in the segments of the root, of tinker-cookbook in its SQLite
file; OpenEnv's server is started again and is asked which rollouts it has.
"""

import asyncio
import json
import os
import random
import sqlite3
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.gateway import CONCURRENT, session
from bench.gateways import started
from bench.load import percentile
from bench.rivals.environments import ROOT, Rivals, make_environments
from bench.rivals.process_tree import kill_tree
from bench.rivals.report import Report
from bench.rivals.server_process import answers, foreign, free_port, program, wait_until
from bench.rivals.site import Site
from cray_agents.cli.user_files import load
from cray_agents.runtime.vllm_plugins.wire import HEADER
from tests.support.store.plain_reader import events_of
from tests.support.unix_servers import socket_of
from tests.support.vllm_pool import secret_of

KILLS = int(os.environ.get("CRAY_BENCH_KILLS", "5"))
ROUNDS = int(os.environ.get("CRAY_BENCH_ROUNDS", "3"))
REQUESTS = int(os.environ.get("CRAY_BENCH_REQUESTS", "320"))  # of a round
ALONE = 20  # of a round, one at a time
BOOK = ROOT / "cray_agents" / "cli" / "calculator_loop.py"
PLAIN = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # variables of a rival's server
CHAT = "/v1/chat/completions"
BODY = {"model": "calc", "max_tokens": 64, "temperature": 1.0,
        "messages": [{"role": "user", "content": "What is 47 + 385?"}]}  # fmt: skip
DIRECT, OURS, OPENENV, TINKER = "vLLM itself", "cray-agents", "OpenEnv", "tinker-cookbook"
WANTED = {OPENENV: ("openenv", "openenv"), TINKER: ("tinker", "tinker-cookbook")}
NAMES = (f"rollout-{number}" for number in range(10**9))  # of calls, each another


@dataclass
class Side:
    """A server under test. `pid`: what a kill ends; `kept`: the calls on the disk after it."""

    url: str
    path: str = CHAT  # with {} for the name of the call
    header: str = ""  # that takes the name
    more: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    kept: Callable[[], set[str]] = set

    async def ask(self, http: aiohttp.ClientSession, name: str, stream: bool) -> "Answer":
        """Ask it once. Raises aiohttp.ClientError, or RuntimeError where it was not whole."""
        headers = self.more | ({self.header: f"Bearer {name}"} if self.header else {})
        body, begun = json.dumps({**BODY, "stream": stream}), time.perf_counter()
        answer = Answer()
        url = self.url + self.path.format(name)
        async with http.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status}: {await response.text()}")
            whole = not stream
            async for line in response.content:
                if stream and not answer.first and _has_text(line):
                    answer.first = time.perf_counter() - begun
                whole = whole or line.startswith(b"data: [DONE]")
            answer.whole = time.perf_counter() - begun
        if not whole:
            raise RuntimeError(f"{url}: the stream ended early")
        return answer


@dataclass
class Answer:
    """Seconds to the first text of an answer, and to its end."""

    first: float = 0.0
    whole: float = 0.0


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:])["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


async def main(home: Path) -> None:
    """First token, requests a second, and what a kill loses."""
    rivals = await asyncio.to_thread(make_environments, WANTED)
    model = home / "calc"
    load(BOOK).make_model(model)
    names = [DIRECT, OURS, *rivals.pythons]
    report = Report("capture", "Servers that keep exact tokens, over vLLM", ["what", *names])
    async with _running(home / "speed", model, rivals) as sides, session() as http:
        await _speed(report, http, sides)
    lost = await _lost(home, model, rivals)
    report.add(f"answers that clients had whole, {KILLS} kills", "", *(f"{of:,}" for _, of in lost))
    report.add("of them their tokens lost", "", *(f"{gone:,}" for gone, _ in lost))
    report.notes += [
        f"Medians of {ROUNDS} rounds, all sides in turn; {BODY['max_tokens']} tokens an answer.",
        "tinker-cookbook's proxy samples through our Tinker API, for it needs such a server.",
        "OpenEnv keeps a rollout in memory until its caller asks for it, by design after its last "
        "call; tinker-cookbook sends its records on once a second.",
    ]
    report.publish(rivals)


# ---- the servers
@asynccontextmanager
async def _running(folder: Path, model: Path, rivals: Rivals) -> AsyncIterator[dict[str, Side]]:
    """All sides, each ready to answer."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        yield await asyncio.to_thread(_start, stack, folder, model, rivals)


def _start(stack: ExitStack, folder: Path, model: Path, rivals: Rivals) -> dict[str, Side]:
    site = Site(folder, model)
    pid = stack.enter_context(site.running())
    with urllib.request.urlopen(f"{site.url}/v1/pool", timeout=30) as response:
        replica = json.load(response)["data"][0]
    path, secret = socket_of(replica["pid"]), secret_of(replica["pid"])
    engine, _ = stack.enter_context(started("tests.support.unix_servers", path))
    sides = {
        DIRECT: Side(engine, more={HEADER: secret}),
        OURS: Side(site.url, "/runs/{}" + CHAT, pid=pid, kept=lambda: _recorded(site)),
    }
    for name, python in rivals.pythons.items():
        place = folder / name
        place.mkdir()
        serve = {OPENENV: _openenv, TINKER: _tinker}[name]
        target = {OPENENV: engine, TINKER: site.url}[name]
        sides[name] = stack.enter_context(serve(python, place, target, model, secret))
    return sides


def _recorded(site: Site) -> set[str]:
    """The runs of calls whose tokens are in the root's segments."""
    calls = (event for event in events_of(site.home) if event["kind"] == "call")
    return {call["run_id"] for call in calls if call["body"]["token_ids"]}


@contextmanager
def _openenv(python: Path, folder: Path, target: str, model: Path, secret: str) -> Iterator[Side]:
    """OpenEnv's capture server. A call is a rollout of its own, named by its key."""
    url = f"http://127.0.0.1:{free_port()}"
    words = ["-m", "openenv.core.harness.capture.server", "--llm-url", target, "--model", "calc"]
    words += ["--engine", "vllm", "--capture-level", "tokens", "--allow-unregistered"]
    words += ["--auth-header", HEADER, "--api-key", secret, "--port", url.rpartition(":")[2]]

    def kept() -> set[str]:
        """What a server has that is started again."""
        with program([str(python), *words], folder, foreign(folder, **PLAIN)) as process:
            wait_until(lambda: answers(f"{url}/health"), process, folder)
            with urllib.request.urlopen(f"{url}/sessions", timeout=30) as response:
                return {one["session_id"] for one in json.load(response)["sessions"]}

    with program([str(python), *words], folder, foreign(folder, **PLAIN)) as process:
        wait_until(lambda: answers(f"{url}/health"), process, folder)
        yield Side(url, header="authorization", pid=process.pid, kept=kept)


@contextmanager
def _tinker(python: Path, folder: Path, target: str, model: Path, secret: str) -> Iterator[Side]:
    """tinker-cookbook's capture proxy. A call has an address of its own, of which `run` is kept."""
    url, data = f"http://127.0.0.1:{free_port()}", folder / "data"
    words = ["-m", "tinker_cookbook.capture.proxy.serve", "--base-model", model]
    words += ["--renderer-name", "role_colon", "--store-data-dir", data]
    words += ["--port", url.rpartition(":")[2]]

    def kept() -> set[str]:
        """The runs of its rows."""
        with closing(sqlite3.connect(data / "capture.sqlite")) as store:
            rows = store.execute("SELECT run_id, sampled_tokens FROM wire_rows").fetchall()
        return {run for run, tokens in rows if json.loads(tokens)}

    env = foreign(folder, **PLAIN, TINKER_BASE_URL=target, TINKER_API_KEY="tml-any")
    with program([str(python), *map(str, words)], folder, env) as process:
        wait_until(lambda: answers(f"{url}/healthz"), process, folder)
        yield Side(url, "/r/run/{}" + CHAT, pid=process.pid, kept=kept)


# ---- speed
async def _speed(report: Report, http: aiohttp.ClientSession, sides: dict[str, Side]) -> None:
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            taken = await _round(http, side)
            if number:  # the first round warms
                for what, values in taken.items():
                    found.setdefault((what, name), []).extend(values)
    for what in dict.fromkeys(what for what, _ in found):
        cells = [found[what, name] for name in sides]
        if what.startswith("requests"):
            report.add(what, *(f"{statistics.median(values):,.1f}" for values in cells))
        else:
            report.add(f"{what}: median, p99", *(_milliseconds(values) for values in cells))


async def _round(http: aiohttp.ClientSession, side: Side) -> dict[str, list[float]]:
    alone = [await side.ask(http, next(NAMES), True) for _ in range(ALONE)]
    taken = {
        "ms to first token, one at a time": [answer.first for answer in alone],
        "ms of the whole answer, one at a time": [answer.whole for answer in alone],
    }
    for stream in (False, True):
        begun = time.perf_counter()
        crowd = await _crowd(http, side, stream)
        rate = REQUESTS / (time.perf_counter() - begun)
        taken[f"requests/s, {CONCURRENT} concurrent{', streaming' if stream else ''}"] = [rate]
    taken[f"ms to first token, {CONCURRENT} concurrent"] = [answer.first for answer in crowd]
    return taken


async def _crowd(http: aiohttp.ClientSession, side: Side, stream: bool) -> list[Answer]:
    """The answers to REQUESTS, CONCURRENT at a time."""
    left, crowd = iter(range(REQUESTS)), list[Answer]()

    async def work() -> None:
        for _ in left:
            crowd.append(await side.ask(http, next(NAMES), stream))

    await asyncio.gather(*(work() for _ in range(CONCURRENT)))
    return crowd


def _milliseconds(values: list[float]) -> str:
    return f"{1000 * statistics.median(values):,.0f}, {1000 * percentile(values, 0.99):,.0f}"


# ---- kills
async def _lost(home: Path, model: Path, rivals: Rivals) -> list[tuple[int, int]]:
    """For each side but the engine: answers whose tokens are lost, and all that were got whole."""
    totals: dict[str, tuple[int, int]] = {}
    for number in range(KILLS):
        chance = random.Random(number)
        async with _running(home / f"kill-{number}", model, rivals) as sides:
            for name in [*rivals.pythons, OURS]:  # ours last: the others need its engine
                got = await _killed(sides[name], chance)
                lost = got - await asyncio.to_thread(sides[name].kept)
                before = totals.get(name, (0, 0))
                totals[name] = before[0] + len(lost), before[1] + len(got)
    return [totals[name] for name in (OURS, *rivals.pythons)]


async def _killed(side: Side, chance: random.Random) -> set[str]:
    """Kill it in the midst of many calls; the calls whose answers their clients had got whole."""
    got = set[str]()
    over = asyncio.Event()

    async def work(http: aiohttp.ClientSession) -> None:
        while not over.is_set():
            name = next(NAMES)
            try:
                await side.ask(http, name, stream=chance.random() < 0.5)
            except (aiohttp.ClientError, RuntimeError):
                if not over.is_set():
                    raise
                return
            got.add(name)

    async with session() as http:
        crowd = [asyncio.create_task(work(http)) for _ in range(CONCURRENT)]
        enough = chance.randrange(2 * CONCURRENT, 8 * CONCURRENT)
        while len(got) < enough:
            await asyncio.sleep(0.01)
            for task in crowd:
                if task.done():
                    task.result()  # raises what went wrong
        await asyncio.sleep(chance.uniform(0, 0.5))
        over.set()
        kill_tree(side.pid)
        await asyncio.gather(*crowd)
    return got
