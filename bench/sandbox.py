"""Time that a sandbox adds to the start and end of a program, in each layer that works here."""

import asyncio
import statistics
import sys
import time
from pathlib import Path

from bench.rounds import Measure, row, side_by_side
from cray_agents.tools.python import PythonSession
from cray_agents.tools.sandbox import Sandbox, backends

RUNS = 20
AT_ONCE = 32


async def main(home: Path) -> None:
    """Programs that do nothing, one after the other and many at once; a session's calls."""
    boxes = {
        layer: Sandbox(layer=layer)
        for layer in backends.CONFINING
        if backends.layer_problem(layer) is None
    }
    for name, argv in {"true": ["true"], "python -c pass": [sys.executable, "-c", "pass"]}.items():
        measures: dict[str, Measure] = {
            layer: lambda box=box, argv=argv: _sandboxed(box, argv)  # type: ignore[misc]
            for layer, box in boxes.items()
        }
        measures["no sandbox"] = lambda argv=argv: _bare(argv)  # type: ignore[misc]
        await side_by_side(f"one run of `{name}`", "ms", measures)
    for layer, box in boxes.items():
        begun = time.perf_counter()
        await asyncio.gather(*(box.run(["true"]) for _ in range(AT_ONCE)))
        rate = AT_ONCE / (time.perf_counter() - begun)
        row(f"{AT_ONCE} runs of `true` at once", layer, f"{rate:.0f} runs/s")
        session = PythonSession(box)
        try:
            await session.python("x = 1")
            times = []
            for _ in range(100):
                begun = time.perf_counter()
                await session.python("x + 1")
                times.append(1000 * (time.perf_counter() - begun))
            row("a call of a Python session", layer, f"{statistics.median(times):.2f} ms")
        finally:
            await session.teardown()


async def _sandboxed(box: Sandbox, argv: list[str]) -> float:
    begun = time.perf_counter()
    for _ in range(RUNS):
        await box.run(argv)
    return 1000 * (time.perf_counter() - begun) / RUNS


async def _bare(argv: list[str]) -> float:
    begun = time.perf_counter()
    for _ in range(RUNS):
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        await process.communicate()
    return 1000 * (time.perf_counter() - begun) / RUNS
