"""Workers of environments as processes, as a user starts them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cray_agents import Platform
from tests.support.environments import pythons

HERE = Path(__file__).parent
TRL = HERE / "trl_environments.py"


@dataclass
class WorkerProcess:
    """A worker, and the lines it has printed."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def command(adapter: str, env: str, *words: object, venv: Path | None = None) -> list[str]:
    """The words of `cray-agents env-worker`."""
    own = [] if venv is None else ["--venv", str(venv)]
    start = [sys.executable, "-m", "cray_agents", "env-worker", "--adapter", adapter, "--env", env]
    return [*start, *own, *map(str, words)]


@contextmanager
def worker(
    where: Platform, adapter: str, env: str, *words: object, venv: Path | None = None
) -> Iterator[WorkerProcess]:
    """A worker of a platform, until the end of the block."""
    begun = WorkerProcess(
        subprocess.Popen(
            [*command(adapter, env, "--url", where.url, *words, venv=venv)],
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    thread = threading.Thread(target=begun.read)
    thread.start()
    try:
        yield begun
    finally:
        begun.process.terminate()
        try:
            begun.process.wait(120)
        finally:
            begun.process.kill()
            thread.join()


@contextmanager
def openenv_server(kind: str) -> Iterator[str]:
    """A server of OpenEnv in a process; its URL."""
    words = [str(pythons.venv("openenv") / "bin" / "python"), str(HERE / "openenv_server.py"), kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip()
            assert port, "the server did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
