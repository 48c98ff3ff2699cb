"""`cray-agents upload` of a large file, against cp + sha256sum of the same one."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.rounds import row, side_by_side
from tests.support.gateway_process import gateway

SIZE = 1 << 30
BLOCK = 16 << 20


async def main(home: Path) -> None:
    """A new file each round: what is there already would not be sent."""
    number = iter(range(10**9))
    current = home / "none"

    def fresh() -> Path:
        nonlocal current
        current.unlink(missing_ok=True)
        current = home / f"file{next(number)}"
        with current.open("wb") as file:
            for _ in range(SIZE // BLOCK):
                file.write(os.urandom(BLOCK))
            file.flush()
            os.fsync(file.fileno())
        return current

    with gateway(home / "root") as (url, _):

        async def ours() -> float:
            file = await asyncio.to_thread(fresh)
            seconds, _ = await asyncio.to_thread(_upload, file, url)
            return SIZE / 1e6 / seconds

        async def theirs() -> float:
            return SIZE / 1e6 / await asyncio.to_thread(_copy, current, home / "copy")

        measures = {"upload": ours, "cp + sha256sum": theirs}
        await side_by_side("upload of 1 GiB", "MB/s", measures)
        again = [await asyncio.to_thread(_upload, current, url) for _ in range(5)]
        seconds = statistics.median(seconds for seconds, _ in again)
        sent = max(sent for _, sent in again)
        row("the same 1 GiB again", "whole command", f"{seconds:.1f} s, {sent} bytes sent")


def _upload(file: Path, url: str) -> tuple[float, int]:
    begun = time.perf_counter()
    argv = [sys.executable, "-m", "cray_agents", "upload", str(file), "--url", url, "--json"]
    told = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - begun, json.loads(told)["sent"]


def _copy(file: Path, copy: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["cp", file, copy], check=True)
    subprocess.run(["sha256sum", copy], check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    copy.unlink()
    return seconds
