"""An agent loop's own time: ours, openai-agents' and pydantic-ai's on the same scripted server.

The server answers at once, from a process of its own: nine turns that call a tool, and an answer.
Each framework runs in a process of its own, ours from .venv, the others from .venv-foreign, and in
turn with a bare loop of the openai client that sends the same requests: what a conversation takes
longer than the bare one is the framework's own time. Our engine takes less than the openai client
that it is made of, as it does not parse what it does not need; so our loop alone is also measured
against a bare loop of our engine. Medians over ROUNDS pairs; processor time besides, which noisy
neighbours do not touch. See agent_clients.py.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.rounds import row

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ROUNDS = 30
TURNS = 10


async def main(home: Path) -> None:
    """A row for each framework: µs a turn beyond the bare loop, and ratios to its time."""
    script = ROOT / "requirements" / "environment.sh"
    await asyncio.to_thread(subprocess.run, [str(script), "foreign"], check=True)
    print("| what | of | median | ratio |\n|---|---|---|---|", flush=True)
    with scripted_server() as url:
        for name, venv in (
            ("cray-agents", ".venv"),
            ("cray-agents, loop alone", ".venv"),
            ("openai-agents", ".venv-foreign"),
            ("pydantic-ai", ".venv-foreign"),
        ):
            measured = await asyncio.to_thread(_measured, ROOT / venv / "bin" / "python", name, url)
            row(f"agent loop, {TURNS} turns, scripted server", name, _figure(measured))


def _measured(python: Path, name: str, url: str) -> dict[str, list[list[float]]]:
    command = [str(python), str(HERE / "agent_clients.py"), name, url, str(ROUNDS), str(TURNS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    measured: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _figure(measured: dict[str, list[list[float]]]) -> str:
    """Of [bare, framework] pairs of seconds a conversation, wall-clock and processor."""
    words = []
    for clock, pairs in measured.items():
        own = statistics.median(framework - bare for bare, framework in pairs) / TURNS
        ratio = statistics.median(framework / bare for bare, framework in pairs)
        words.append(f"{1e6 * own:+,.0f} µs a turn ({ratio:.2f} × the bare loop's) {clock}")
    return ", ".join(words)


@contextmanager
def scripted_server() -> Iterator[str]:
    """The URL of agent_server.py, in a process of its own."""
    command = [sys.executable, str(HERE / "agent_server.py"), str(TURNS)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
