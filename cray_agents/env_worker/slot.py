"""Slot: a process of the worker that carries out one run at a time, and can be killed.

The worker sends a run as a line of JSON, and reads a line back. An environment may print: what it
prints goes to stderr. Started by slot_process.py as `launcher.py --slot`.
"""

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import IO, Any

from cray_agents.env_worker.adapters import make_adapter
from cray_agents.env_worker.rollout import Adapter, EnvironmentFailed, Rollout, UsageError
from cray_agents.processes import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_CHARS = 2000
HEAD_CHARS = 600  # of a longer one; the rest is its end, where a traceback names the cause
#: Classes of openai, httpx and http_client.py whose errors say that the model's server failed.
SERVER_ERRORS = {
    "APIConnectionError",
    "APITimeoutError",
    "ConnectError",
    "InternalServerError",
    "RateLimitError",
    "ServerFailed",
    "ServerUnreachable",
}


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
