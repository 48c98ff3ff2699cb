"""`cray-agents up` on a root of its own, which a benchmark starts and kills."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from bench.rivals.server_process import answers, free_port, program, wait_until
from cray_agents.paths import Home


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
