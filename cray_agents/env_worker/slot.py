"""Slot: a process of the worker that carries out one run at a time, and can be killed.

`SlotProcess` starts it as `launcher.py --slot`, `serve` is what runs there. The worker sends a run
as a line of JSON, and reads a line back. An environment may print: what it prints goes to stderr. A
slot has a session of its own, so that it is ended with what it started. Whoever left that session
too is found as its descendant. Called by leased_runs.py.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cray_agents.env_worker.adapters import (
    Adapter,
    EnvironmentFailed,
    Rollout,
    UsageError,
    make_adapter,
)
from cray_agents.processes import die_with_parent

MAX_PROCESSES = 64  # of a slot, between runs
ANSWER_BYTES = 16 * 2**20
START_SECONDS = 600.0
LOOK_SECONDS = 0.5
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_CHARS = 2000
HEAD_CHARS = 600  # of a longer one; the rest is its end, where a traceback names the cause
#: Classes of openai, httpx and chat.py whose errors say that the model's server failed.
SERVER_ERRORS = {
    "APIConnectionError",
    "APITimeoutError",
    "ConnectError",
    "InternalServerError",
    "RateLimitError",
    "ServerFailed",
    "ServerUnreachable",
}


class SlotDied(Exception):
    """The slot's process ended, was silent for too long, or answered without end."""


class SlotProcess:
    """A slot. `command`: the words of its process up to the descriptor for answers."""

    def __init__(self, command: list[str]) -> None:
        reading, writing = os.pipe()
        self._answers, self._unread = reading, b""
        self._process = subprocess.Popen(
            [sys.executable, *command, str(writing)],
            stdin=subprocess.PIPE,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)

    def wait_ready(self, stopping: Callable[[], bool]) -> None:
        """Wait until the environment is loaded. Raises UsageError, SlotDied."""
        begun = self._read(time.monotonic() + START_SECONDS, lambda: None, stopping)
        if "unusable" in begun:
            raise UsageError(begun["unusable"])

    def ask(
        self,
        request: dict[str, Any],
        seconds: float,
        each_look: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> dict[str, Any]:
        """Return the answer to a request. Raises SlotDied; TimeoutError after `seconds`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SlotDied(self._ending()) from None
        return self._read(time.monotonic() + seconds, each_look, stopping)

    def _read(
        self, deadline: float, each_look: Callable[[], None], stopping: Callable[[], bool]
    ) -> dict[str, Any]:
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if stopping():
                raise SlotDied("the worker was stopped")
            each_look()
            if not select.select([self._answers], [], [], min(LOOK_SECONDS, left))[0]:
                continue
            piece = os.read(self._answers, 2**20)
            if not piece:
                raise SlotDied(self._ending())
            self._unread += piece
            if len(self._unread) > ANSWER_BYTES:
                raise SlotDied(f"the slot answered with more than {ANSWER_BYTES} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is None:
            return "the environment's process closed its answers"
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the environment's process died with {end}"

    def leaks(self) -> int:
        """Return the number of processes that the slot has now, if they are too many; else 0."""
        count = len(descendants(self._process.pid))
        return count if count > MAX_PROCESSES else 0

    def end(self) -> None:
        """End the slot and all its descendants."""
        pids = descendants(self._process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._answers)


def descendants(pid: int) -> list[int]:
    """Return the processes below one; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            after_name = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    below, new = list[int](), [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        below += new
    return below


def serve(adapter: str, environment: str, options: Mapping[str, str], answers: int) -> None:
    """Carry out runs from stdin until it ends. `answers`: the descriptor to write lines to."""
    die_with_parent()
    if sys.platform == "linux":  # orphans of the environment stay descendants, and can be ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # prints of the environment
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        try:
            made = make_adapter(adapter, environment, options)
        except UsageError as error:
            _write(out, {"unusable": str(error)})
            return
        _write(out, {"ready": True})
        for line in requests:
            _write(out, _result(made, Rollout(**json.loads(line))))


def _result(adapter: Adapter, rollout: Rollout) -> dict[str, Any]:
    """Return the outcome of a run as JSON, or the error of its environment."""
    try:
        return adapter.run(rollout).checked()
    except Exception as error:  # noqa: BLE001 - whatever the environment raises
        traceback.print_exc()
        return {"error": {"type": blamed(error), "message": _message_of(error)}}


def blamed(error: BaseException | None) -> str:
    """Return the type of a run's error: the model's server is not the environment."""
    while error is not None:
        if type(error).__name__ in SERVER_ERRORS:
            return "ServerFailed"
        error = error.__cause__ or error.__context__
    return "EnvironmentFailed"


def _message_of(error: BaseException) -> str:
    own = isinstance(error, EnvironmentFailed)
    text = str(error) if own else f"{type(error).__name__}: {error}"
    if len(text) <= MESSAGE_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n[...]\n{text[HEAD_CHARS - MESSAGE_CHARS :]}"


def _write(out: IO[str], value: Any) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def write_tasks(adapter: Adapter, path: str) -> int:
    """Write the environment's tasks as JSON lines; return their number."""
    count = 0
    with sys.stdout if path == "-" else open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
        for task in adapter.tasks():
            out.write(json.dumps(task, ensure_ascii=False) + "\n")
            count += 1
    return count
