"""The parts of `make bench ARGS=rivals`, by their names."""

import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.rivals import (
    agent_overhead,
    batch,
    capture,
    gateway,
    resume,
    steps,
    training,
    vllm_gateway,
)

PARTS: dict[str, Callable[[Path], Awaitable[None]]] = {
    "gateway": gateway.main,
    "vllm-gateway": vllm_gateway.main,
    "agents": agent_overhead.main,
    "steps": steps.main,
    "training": training.main,
    "batch": batch.main,
    "capture": capture.main,
    "resume": resume.main,
}


async def main(names: list[str]) -> None:
    """Those of these names, or all. Exits with their names where one is not known."""
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"no part {', '.join(unknown)}: there is {', '.join(PARTS)}")
    for name in names or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            await PARTS[name](Path(folder))
