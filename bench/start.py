"""A cold start of a CPU replica with the demo's model: seconds and processor seconds, by phase.

The first of ROUNDS + 1 starts is to warm the disk's cache. Beside other work the processor seconds
say more than the seconds. Then a larger model's wake from the disk, beside what `plan start` says.
"""

import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

from bench.rounds import ROUNDS, row, side_by_side
from cray_agents.cli.calculator_loop import make_model
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.registry.deltas import rebuilt_bytes
from cray_agents.runtime.scheduler.supervisor import descendants
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model

WHAT = "cold start of a replica on CPU, the demo's model"
LARGE = ModelShape(hidden=1024, layers=16, heads=16, kv_heads=16, head_size=64, feed_forward=4096)


async def main(home: Path) -> None:
    """Measure starts, then wakes."""
    await _starts(home)
    await _wakes(home)


async def _starts(home: Path) -> None:
    """Start replicas, one after the other, each until its first token."""
    make_model(home / "model")
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        replica = VllmProcess("calc", EngineSettings(), home / f"{number}.log")
        begun = time.perf_counter()
        try:
            await replica.start(home / "model", "calc@1")
            up = time.perf_counter()
            await replica.engine.score([])
            seconds = {str(phase): took for phase, took in replica.phases.items()}
            seconds["first_token"] = time.perf_counter() - up
            seconds["all"] = time.perf_counter() - begun
            seconds["processor"] = _processor_seconds(replica.pid)
        finally:
            await replica.release()
        for phase, took in seconds.items():
            found[phase] += [took] * (number > 0)
    for phase, times in found.items():
        row(WHAT, phase, f"{statistics.median(times):.2f} s")


async def _wakes(home: Path) -> None:
    """Wake a replica that kept no weights, its files out of the page cache; read them plainly."""
    model, version = home / "large", "large@1"
    make_seed_model(model, seed=0, corpus=["0 1 2 3 4 5 6 7 8 9"] * 3, shape=LARGE)
    (file,) = model.glob("*.safetensors")
    weights = rebuilt_bytes(model)

    async def wake() -> float:
        await replica.engine.sleep(2)
        _drop(file)
        begun = time.perf_counter()
        await replica.engine.wake(model, version)
        await replica.engine.load(model, version)
        await replica.engine.resume()
        return time.perf_counter() - begun

    async def plan() -> float:
        _drop(file)
        begun = time.perf_counter()
        with file.open("rb", buffering=0) as source:
            buffer = bytearray(1 << 24)
            while source.readinto(buffer):
                pass
        storage = file.stat().st_size / (time.perf_counter() - begun)  # bytes a second
        return weights / storage  # as `plan start` counts

    replica = VllmProcess("large", EngineSettings(sleeps=True), home / "large.log")
    try:
        await replica.start(model, version)
        what = f"a wake that reads {weights / 1e9:.2f} GB from the disk"
        await side_by_side(what, "s", {"seen": wake, "`plan start` at a plain read's speed": plan})
    finally:
        await replica.release()


def _drop(file: Path) -> None:
    """Let the page cache forget a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _processor_seconds(pid: int | None) -> float:
    """Of a process and all that it has started."""
    assert pid is not None
    stats = [Path(f"/proc/{one}/stat").read_text() for one in (pid, *descendants(pid))]
    ticks = sum(int(n) for stat in stats for n in stat.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")
