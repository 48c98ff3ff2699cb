"""A cold start of a CPU replica with the demo's model: seconds and processor seconds, by phase.

The first of ROUNDS + 1 starts is to warm the disk's cache. Beside other work the processor seconds
say more than the seconds.
"""

import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

from bench.rounds import ROUNDS, row
from cray_agents.cli.calculator_loop import make_model
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.scheduler.supervisor import descendants

WHAT = "cold start of a replica on CPU, the demo's model"


async def main(home: Path) -> None:
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


def _processor_seconds(pid: int | None) -> float:
    """Of a process and all that it has started."""
    assert pid is not None
    stats = [Path(f"/proc/{one}/stat").read_text() for one in (pid, *descendants(pid))]
    ticks = sum(int(n) for stat in stats for n in stat.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")
