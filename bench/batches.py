"""The batch queue: lines taken per second, a worker's memory, and what a line costs."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import openai
from openai.types import Batch

from bench.rounds import row
from cray_agents.paths import Home
from cray_agents.runtime.files.files import Files
from tests.support.gateway_process import gateway

LINE = (
    '{"custom_id":"line-%d","method":"POST","url":"/v1/chat/completions","body":{"model":"m",'
    '"messages":[{"role":"user","content":"What is %d + 385? Answer with the number alone."}]}}\n'
)
CHAT: Final = "/v1/chat/completions"


async def main(home: Path) -> None:
    """Enqueue 10,000 and 1,000,000 lines; answer 20,000 with an engine that answers at once."""
    root = home / "root"
    with gateway(root) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for lines in (10_000, 1_000_000):
            with _worker(root, url) as process:
                seconds = await asyncio.to_thread(_enqueue, client, Home(root), lines)
                peak = _peak_mib(process.pid)
                row(f"batch of {lines:,} lines enqueued", "with its validation",
                    f"{lines / seconds:,.0f} lines/s; worker's peak {peak:.0f} MiB")  # fmt: skip
        with _worker(root, url) as process:
            lines = 20_000
            batch = _create(client, Home(root), lines)
            begun = time.perf_counter()
            await asyncio.to_thread(_until, client, batch, "completed")
            seconds = time.perf_counter() - begun
            figure = f"{1000 * seconds / lines:.2f} ms; peak {_peak_mib(process.pid):.0f} MiB"
            row(f"batch of {lines:,} lines, engine that answers at once", "per line", figure)


def _enqueue(client: openai.OpenAI, home: Home, lines: int) -> float:
    batch = _create(client, home, lines)
    begun = time.perf_counter()
    _until(client, batch, "in_progress")
    seconds = time.perf_counter() - begun
    client.batches.cancel(batch.id)
    _until(client, batch, "cancelled")
    return seconds


def _create(client: openai.OpenAI, home: Home, lines: int) -> Batch:
    files = Files(home)
    draft = files.blobs.draft()
    for start in range(0, lines, 10_000):
        draft.write("".join(LINE % (n, n) for n in range(start, start + 10_000)).encode())
    made = files.publish(draft.publish(), filename="bench.jsonl", purpose="batch")
    return client.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")


def _until(client: openai.OpenAI, batch: Batch, status: str) -> None:
    while (now := client.batches.retrieve(batch.id)).status != status:
        assert now.status in ("validating", "in_progress", "finalizing", "cancelling"), now
        time.sleep(0.02)


@contextmanager
def _worker(home: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "cray_agents.runtime.batches.worker", str(home), url]
    process = subprocess.Popen([*argv, "--parent", str(os.getpid())])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
