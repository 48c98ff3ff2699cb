"""The store: writers at once, an index over a million runs, and what comes out as Parquet."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.corpus import START, write_corpus
from bench.rounds import row, side_by_side
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.datasets.reader import shards
from cray_agents.runtime.exports.exporter import export, open_dataset
from cray_agents.runtime.exports.formats.tokens import TOKENS
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import cache_of

WRITERS = 4
RECORDS = 5_000  # of each writer
CALLERS = 16  # of each writer: requests under way at once
RUNS = int(os.environ.get("CRAY_BENCH_RUNS", "1000000"))
BLOCK = 1 << 20

FILTERS = {
    "none": RunQuery(limit=100),
    "loop + iteration": RunQuery(loop="loop-3", iteration=7, limit=100),
    "agent, reward >= 1, newest first": RunQuery(
        agent="coder", min_reward=1.0, order="newest", limit=100
    ),
    "one task": RunQuery(task="t00500", limit=100),
    "a version": RunQuery(model="calc@3", limit=100),
    "held out": RunQuery(split="holdout", limit=100),
    "error class": RunQuery(error="EngineTimeout", limit=100),
    "a tag": RunQuery(tags=["night"], limit=100),
    "an hour, oldest first": RunQuery(
        since=START + RUNS / 2, until=START + RUNS / 2 + 3600, order="oldest", limit=100
    ),
    "nothing matches": RunQuery(loop="loop-3", stop_reason="cancelled", limit=100),
    "the last page by id": RunQuery(after=f"run_{RUNS - 50:09d}", limit=100),
}


async def writers(home: Path) -> None:
    """Durable 4 KB calls from four processes on one root, and write + fsync of the same bytes."""
    number = iter(range(10**9))

    def measure(mode: str) -> Callable[[], "asyncio.Future[float]"]:
        async def once() -> float:
            return await asyncio.to_thread(_writers, home / f"{mode}{next(number)}", mode)

        return once  # type: ignore[return-value]

    await side_by_side(
        f"durable 4 KB calls, {WRITERS} writers x {CALLERS} callers",
        "records/s",
        {"store": measure("store"), "write+fsync": measure("raw")},
    )


def _writers(root: Path, mode: str) -> float:
    """Records a second over all writers, from the moment all are ready."""
    argv = [sys.executable, "-m", "bench.writer", str(root), mode, str(RECORDS), str(CALLERS)]
    processes = [
        subprocess.Popen([*argv, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in range(WRITERS)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    begun = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert all(process.wait() == 0 for process in processes)
    return WRITERS * RECORDS / (time.perf_counter() - begun)


async def listing(root: Path) -> None:
    """A million runs: the index is made, asked, and thrown away."""
    home = Home(root / "many")
    await asyncio.to_thread(write_corpus, home, RUNS)
    files = sorted(home.segments.glob("*.zst"))
    size = sum(path.stat().st_size for path in files)
    disk = _seconds(lambda: _read_all(files))
    store = Store.__new__(Store)

    def rebuild() -> None:
        nonlocal store
        store = Store(home)

    seconds = _seconds(rebuild)
    row(
        f"index of {RUNS:,} runs rebuilt",
        f"{size / 2**20:,.0f} MiB of segments",
        f"{seconds:.1f} s = {size / seconds / 2**20:,.0f} MiB/s; "
        f"reading the files alone {size / disk / 2**20:,.0f} MiB/s",
    )
    row("its size", "", f"{cache_of(home).stat().st_size / 2**20:,.0f} MiB")
    row("opening a store", "median of 5", f"{1000 * _median(rebuild):.1f} ms")
    for name, query in FILTERS.items():
        took = _median(lambda query=query: list(store.facts(query)))  # type: ignore[misc]
        row(f"first page of {RUNS:,} runs", name, f"{1000 * took:.1f} ms")
    took = _median(lambda: store.runs(RunQuery(limit=100)))
    row("a page of 100 runs, whole", "by id", f"{1000 * took:.1f} ms")
    begun, count = time.perf_counter(), 0
    for _ in store.stream(RunQuery(limit=min(RUNS, 50_000))):
        count += 1
    row("whole runs read", "by id", f"{count / (time.perf_counter() - begun):,.0f} runs/s")
    await store.close()


async def exporting(root: Path) -> None:
    """A dataset as token Parquet, against pyarrow writing the same columns; all runs as lines."""
    home = Home(root / "many")
    await asyncio.to_thread(write_corpus, home, RUNS)
    recipe = DatasetRecipe(loop="loop-3", min_reward=0, iterations=list(range(8)))
    store = await asyncio.to_thread(Store, home)
    begun = time.perf_counter()
    made = await asyncio.to_thread(build_dataset, store, home, recipe)
    seconds = time.perf_counter() - begun
    rate = f"{made['considered_runs'] / seconds:,.0f} runs/s"
    row(f"dataset of {made['samples']:,} samples", "runs considered", rate)
    table = pa.concat_tables(map(pq.read_table, shards(home, made["id"])))
    folder = iter(root / f"out{n}" for n in range(10**9))

    async def ours() -> float:
        target = next(folder)
        begun = time.perf_counter()
        source = open_dataset(home, made["id"], TOKENS, "train", skip_missing=False)
        done = await asyncio.to_thread(export, source, TOKENS, target)
        return done.records / (time.perf_counter() - begun)

    await ours()
    written = pa.concat_tables(map(pq.read_table, sorted((root / "out0").rglob("*.parquet"))))
    assert written.num_rows == table.num_rows

    async def theirs() -> float:
        target = next(folder)
        begun = time.perf_counter()
        await asyncio.to_thread(pq.write_table, written, target)
        os.sync()
        return written.num_rows / (time.perf_counter() - begun)

    what = f"token Parquet of {written.num_rows:,} samples"
    await side_by_side(what, "samples/s", {"export": ours, "pyarrow from memory": theirs})
    for runs in (RUNS // 20, RUNS):
        seconds, peak = await asyncio.to_thread(_export, home, runs, next(folder))
        figure = f"{runs / seconds:,.0f} runs/s; peak {peak:.0f} MiB"
        row(f"{runs:,} runs exported as jsonl", "by the command", figure)


def _export(home: Home, runs: int, target: Path) -> tuple[float, float]:
    """Seconds, and the process's peak in MiB."""
    argv = ["export", "--home", str(home.root), "--format", "jsonl", "--until"]
    until = datetime.fromtimestamp(START + runs - 0.5, UTC).isoformat()
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "cray_agents", *argv, until, "-o", f"{target}.jsonl", "--quiet"]
    )
    peak = 0.0
    while process.poll() is None:  # not wait4's: that counts what this process held at the fork
        status = Path(f"/proc/{process.pid}/status").read_text()
        if "VmHWM:" in status:
            peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        time.sleep(0.05)
    assert process.returncode == 0
    return time.perf_counter() - begun, peak


def _read_all(files: list[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK):
                pass


def _seconds(what: Callable[[], object]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def _median(what: Callable[[], object]) -> float:
    return statistics.median(_seconds(what) for _ in range(5))
