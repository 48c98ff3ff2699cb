"""Servers of others, and ours, that a benchmark starts: their log, when they answer, their end."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.rivals.process_tree import kill_tree

SECONDS = 900.0  # that a program may take to get ready


@contextmanager
def program(
    argv: Sequence[object], folder: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in the log; it and what it started are killed with the block."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*map(str, argv)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def foreign(folder: Path, **more: str) -> dict[str, str]:
    """An environment that passes nothing of ours on."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "NO_PROXY": "127.0.0.1", **more}


def log_of(folder: Path) -> str:
    """What the programs of a folder have written."""
    return (folder / "log").read_text(errors="replace")


def wait_until(
    what: Callable[[], Any],
    process: subprocess.Popen[bytes],
    folder: Path,
    seconds: float = SECONDS,
) -> None:
    """Until it is so. Raises RuntimeError with the end of the log if the program ends before."""
    deadline = time.monotonic() + seconds
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "does not get ready" if process.poll() is None else "ended"
            raise RuntimeError(f"{process.args!r} {state}:\n{log_of(folder)[-3000:]}")
        time.sleep(0.05)


def answers(request: str | urllib.request.Request, seconds: float = 5.0) -> bool:
    """Whether a URL, or a request, is answered with success."""
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
