"""Schema checks: check values against foreign JSON schemas, in a process with a deadline.

A malicious schema can make a check endless and block all of Python: by a regular expression, or by
references that double. Checks are therefore made in their own process (schema_worker.py). The
kernel ends it when a check takes longer than SECONDS. Called by from_schema.py. mcp_client.py has
one process per server, so that no server delays another's checks.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, SetupError, ToolError
from cray_agents.processes import python

SECONDS = 1.0  # processor time of a check
MAX_CHARS = 100_000  # length of a schema as JSON
WORKER = Path(__file__).with_name("schema_worker.py")


class SchemaChecks:
    """A process that checks values, started by the first check and ended by `close`.

    Garbage collection of this object ends the process, too. Raises SetupError without jsonschema.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise SetupError(
                "tools with a JSON schema need jsonschema: pip install 'cray-agents[tools]'"
            )
        self._turn = ThreadPoolExecutor(1, "cray-agents-schemas")
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, SchemaChecks] | None = None

    def text_of(self, name: str, schema: Any) -> str:
        """Check the schema of a tool, and return it as text. Raises BadInput."""
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
            problem = self._submit([text]).result()
        except ToolError as error:
            raise BadInput(f"tool {name!r} has a broken JSON schema: {error}") from error
        if problem is not None:
            raise BadInput(f"tool {name!r} has a broken JSON schema: {problem}")
        return text

    async def problem(self, text: str, value: Any) -> str | None:
        """Return the problem of a value in words for a model, or None. Raises ToolError."""
        return await asyncio.wrap_future(self._submit([text, value]))

    def close(self) -> None:
        """End the process; a later check starts another."""
        self._turn.submit(self._end).result()

    def _submit(self, request: list[Any]) -> "Future[str | None]":
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError as error:
            raise ToolError("this is nested too deeply to be checked") from error
        return self._turn.submit(self._answer, line)

    def _answer(self, line: bytes) -> str | None:
        for _ in range(2):  # the first try fails if the process was killed meanwhile
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if answer.endswith(b"\n"):
                problem: str | None = json.loads(answer)
                return problem
            self._end()
            if process.returncode == -signal.SIGPROF:
                raise ToolError(
                    f"its JSON schema takes more than {SECONDS:g} s to check: it may be made so "
                    "(a regular expression that goes back, or references that double)"
                )
        raise ToolError("its JSON schema cannot be checked: nested too deeply, or too large")

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = process = subprocess.Popen(
            python(str(WORKER), str(SECONDS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._finalizer = weakref.finalize(self, _stop, process, os.getpid())
        return process

    def _end(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _stop(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process by closing its pipes, and wait. Do nothing in a fork of its owner."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue
    process.wait()
