"""Values held against JSON schemas of other people, off the event loop and with a deadline.

A schema can be made so that a check takes for ever, and holds all of Python while it does: by a
regular expression, or by references that double. So checks are made in a process of their own
(schema_worker.py), which the kernel ends when one takes longer than SECONDS. Called by
from_schema.py; mcp_client.py has one per server, so that none waits for another's.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, SetupError, ToolError

SECONDS = 1.0  # of processor time, for a check
MAX_CHARS = 100_000  # of a schema, as JSON
WORKER = Path(__file__).with_name("schema_worker.py")


class SchemaChecks:
    """A process that checks, started by the first check. `close` ends it; so does its own end.

    Raises SetupError where jsonschema is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise SetupError(
                "tools with a JSON schema need jsonschema: pip install 'cray-agents[tools]'"
            )
        self._turn = ThreadPoolExecutor(1, "cray-agents-schemas")
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[Any, SchemaChecks] | None = None

    def text_of(self, name: str, schema: Any) -> str:
        """The schema of a tool as text, once it is known to be one. Raises BadInput."""
        try:
            text = json.dumps(schema)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadInput(f"tool {name!r} has a broken JSON schema: {error}") from error
        if len(text) > MAX_CHARS:
            raise BadInput(
                f"tool {name!r} has a JSON schema of {len(text):,} characters: "
                f"at most {MAX_CHARS:,} are taken"
            )
        try:
            problem = self._submitted([text]).result()
        except ToolError as error:
            raise BadInput(f"tool {name!r} has a broken JSON schema: {error}") from error
        if problem is not None:
            raise BadInput(f"tool {name!r} has a broken JSON schema: {problem}")
        return text

    async def problem(self, text: str, value: Any) -> str | None:
        """What is wrong with a value, in words for a model; None: nothing. Raises ToolError."""
        return await asyncio.wrap_future(self._submitted([text, value]))

    def close(self) -> None:
        """End the process; a later check starts another."""
        self._turn.submit(self._end).result()

    def _submitted(self, asked: list[Any]) -> "Future[str | None]":
        try:
            line = json.dumps(asked).encode() + b"\n"
        except RecursionError as error:
            raise ToolError("this is nested too deeply to be checked") from error
        return self._turn.submit(self._answer, line)

    def _answer(self, line: bytes) -> str | None:
        for _ in range(2):  # the first may find that the process was killed since
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if answer.endswith(b"\n"):
                found: str | None = json.loads(answer)
                return found
            self._end()
            if process.returncode == -signal.SIGPROF:
                raise ToolError(
                    f"its JSON schema takes more than {SECONDS:g} s to check: it may be made so "
                    "(a regular expression that goes back, or references that double)"
                )
        raise ToolError("its JSON schema cannot be checked: nested too deeply, or too large")

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ended = weakref.finalize(self, _ended, process, os.getpid())
        return process

    def _end(self) -> None:
        self._process = None
        if self._ended is not None:
            self._ended()


def _ended(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Close the pipes of a process, which ends it, and wait; not in a fork of who started it."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue
    process.wait()
