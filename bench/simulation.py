"""A day of a simulated cluster that serves and trains: the controller beside the best static split.

The training queue is never empty, and a sleeping replica leaves its GPUs to others. A replica
starts in 90 s and wakes in 5 or 20 s, an answer takes 20 s, a job saves in 30 s and loads in 60 s.

CRAY_BENCH_TRACE: bursty (default), diurnal or failures; CRAY_BENCH_NODES: 64; CRAY_BENCH_SEED: 1.
"""

import os
from pathlib import Path

from bench.cluster.comparison import compare
from bench.cluster.traces import make_trace
from bench.rounds import row

FIGURES = ("goodput", "of_static", "utilisation", "wait_p50", "wait_p99", "steps_lost")
LIMIT = 60.0  # seconds of waiting after which an answer counts for nothing


async def simulation(home: Path) -> None:
    """Goodput as a share of all node-hours, and waits in seconds, under each way."""
    kind = os.environ.get("CRAY_BENCH_TRACE", "bursty")
    nodes, seed = (
        int(os.environ.get(f"CRAY_BENCH_{n}", d)) for n, d in (("NODES", 64), ("SEED", 1))
    )
    for way in compare(make_trace(kind, seed, nodes, 24.0), LIMIT):
        figures = ", ".join(f"{name} {way[name]:.3g}" for name in FIGURES)
        row(f"{kind}, seed {seed}, {nodes} nodes, simulated", way["way"], figures)
