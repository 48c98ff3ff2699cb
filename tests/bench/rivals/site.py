"""`cray-agents up` on a root of its own, and other programs that a benchmark starts and kills."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from cray_agents.paths import Home
from tests.bench.rivals.litellm import free_port
from tests.bench.rivals.process_tree import kill_tree

SECONDS = 900.0  # that a program may take to get ready


class Site:
    """A platform that serves `calc`: started, killed, and started again by the same command."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "root")
        self.url = f"http://127.0.0.1:{free_port()}"
        words = ["up", "--name", "calc", "--scheduler", "local", "--model", model]
        words += ["--port", self.url.rpartition(":")[2], "--home", self.home.root]
        self.argv = [sys.executable, "-m", "cray_agents", *map(str, words)]

    @contextmanager
    def running(self) -> Iterator[int]:
        """The platform's pid, once its replica serves."""
        with program(self.argv, self.folder, os.environ) as process:
            wait_until(lambda: answers(f"{self.url}/health/ready"), process, self.folder)
            yield process.pid

    @property
    def client(self) -> openai.OpenAI:
        """A client of its own each time: connections do not outlive a platform."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")


@contextmanager
def program(
    argv: list[str], folder: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in the log; it and what it started are killed with the block."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def log_of(folder: Path) -> str:
    """What the programs of a folder have written."""
    return (folder / "log").read_text(errors="replace")


def wait_until(what: Callable[[], Any], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until it is so. Raises RuntimeError with the end of the log if the program ends before."""
    deadline = time.monotonic() + SECONDS
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "does not get ready" if process.poll() is None else "ended"
            raise RuntimeError(f"{process.args!r} {state}:\n{log_of(folder)[-3000:]}")
        time.sleep(0.05)


def answers(url: str) -> bool:
    """Whether a GET of it succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
