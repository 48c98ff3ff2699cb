"""Judge: question the agent's code in its sandbox, and compare the answers outside of it.

The expected values never enter the sandbox, in no file, argument, variable or memory of a process
there: the judge is this process. The code can therefore deceive only its own Python,
call_worker.py, and any result of that is an answer, right or wrong. Called by __init__.py. Read
next: call_worker.py; cases.py, the comparison of values.
"""

import asyncio
import contextlib
import functools
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, RewardError, SetupError
from cray_agents.rewards.reward import Verdict
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.sandbox.process import BLOCK, START, TOO_MUCH, SandboxedProcess, SandboxLost
from cray_agents.tools.verifier.cases import (
    ANSWER_BYTES,
    Case,
    Malformed,
    check_answer,
    expected_answer,
    outputs_equal,
    values_equal,
)

Files = Mapping[str, str | bytes]
Ask = Callable[[Case], Awaitable[tuple[str, Any]]]

WORKER = Path(__file__).with_name("call_worker.py")
READY = b'{"ready": true}\n'
BUSY = 20  # clock time on a busy machine, in multiples of processor time


class Suspect(Exception):
    """The code did something that honest code does not do, and earns nothing."""


def with_processor_limit(sandbox: Sandbox | None) -> Sandbox:
    """Return a sandbox with a limit on processor time, which is fair on a busy machine.

    It keeps all output that may be an answer.
    """
    sandbox = replace(sandbox or Sandbox(), output_chars=ANSWER_BYTES)
    if sandbox.cpu_seconds is not None:
        return sandbox
    return replace(sandbox, cpu_seconds=sandbox.seconds, seconds=BUSY * sandbox.seconds)


async def guard_verdict(name: str, judging: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Return the verdict, or 0.0 with the reason of suspicion. Raises RewardError without a run."""
    try:
        return await judging()
    except SandboxLost:
        return Verdict(0.0, "the sandbox failed while it ran", suspect=True)
    except (Suspect, BadInput) as error:  # BadInput: names of files, which depend on the run
        return Verdict(0.0, str(error), suspect=True)
    except SetupError as error:
        raise RewardError(f"{name} could not be run: {error}") from error


async def judge(
    sandbox: Sandbox,
    command: Sequence[str],
    files: Files,
    cases: Sequence[Case],
    *,
    partial: bool,
    tolerance: float,
) -> Verdict:
    """Ask all cases in order: of one process that answers calls, or of a new program for each.

    Returns 1.0 if all answers are right, else 0.0; with `partial` their share, and questions go on
    after a wrong answer. Raises SetupError if the code could not be started, Suspect, and
    SandboxLost.
    """
    right, first_problem = 0, ""
    async with contextlib.AsyncExitStack() as stack:
        ask: Ask = functools.partial(_ask_program, sandbox, command, files)
        if cases[0].stdin is None:
            argv = [sys.executable, "-I", "-c", WORKER.read_text()]
            confined = await stack.enter_async_context(sandbox.start(argv, files=files))
            code = _Code(confined, sandbox)
            await code.begin()
            ask = code.ask
        for number, case in enumerate(cases, 1):
            kind, answer = await ask(case)
            problem = _problem(kind, answer, case, tolerance)
            if problem is None:
                right += 1
                continue
            first_problem = first_problem or f"; test {number}: {problem}"
            if not partial or kind in ("limit", "broken"):
                break
    share = right / len(cases)
    comment = f"{right} of {len(cases)} tests passed{first_problem}"
    return Verdict(share if partial else float(share == 1.0), comment)


async def _ask_program(
    sandbox: Sandbox, command: Sequence[str], files: Files, case: Case
) -> tuple[str, Any]:
    """Run a program for a case; return the kind of its answer ("returned", "limit", ...) and it."""
    outcome = await sandbox.run(command, files=files, stdin=case.stdin or "")
    if outcome.limit is not None or outcome.truncated:
        return "limit", TOO_MUCH[outcome.limit or "output"]
    if outcome.returncode != 0:
        return "status", outcome.returncode
    return "returned", outcome.stdout


class ProgramFinder:
    """Raises SetupError if a program is not in the sandbox, before any code of the agent runs.

    Afterwards the exit statuses 126 and 127 can only be the code's own.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._present: set[str] = set()

    async def __call__(self, program: str) -> None:
        """Look for a program, once."""
        if program in self._present:
            return
        try:
            outcome = await self._sandbox.run(["sh", "-c", 'command -v -- "$0"', program])
        except SandboxLost as error:
            raise SetupError(str(error)) from error
        if outcome.returncode != 0:
            raise SetupError(f"there is no program {program!r} in the sandbox")
        self._present.add(program)


def _problem(kind: str, answer: Any, case: Case, tolerance: float) -> str | None:
    """Return the problem of an answer without revealing the expected one; None: it is right."""
    match kind:
        case "limit":
            return str(answer)
        case "status":
            return f"exit status {answer}"
        case "broken":
            return f"solution.py ended with {_exception_name(answer)}"
        case "raised":
            return None if case.awaits(answer) else f"it raised {_exception_name(answer)}"
    if case.raises is not None:
        return "it raised nothing"
    if case.stdin is not None:
        return None if outputs_equal(answer, case.expected, tolerance) else "wrong output"
    right = values_equal(answer, expected_answer(case.expected), tolerance)
    return None if right else "wrong answer"


class _Code:
    def __init__(self, confined: SandboxedProcess, sandbox: Sandbox) -> None:
        self._confined = confined
        self._sandbox = sandbox
        self._buffer = bytearray()

    async def begin(self) -> None:
        """Wait for call_worker.py, which then imports the code. Raises SetupError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START):
                if await self._read_line(len(READY)) == READY:
                    return
        self._confined.kill()
        message = (await self._confined.stderr.read()).decode(errors="replace").strip()
        raise SetupError(f"Python did not start in the sandbox: {message[-500:]}")

    async def ask(self, case: Case) -> tuple[str, Any]:
        """Return the kind of the answer ("returned", "raised", "broken", "limit") and the answer.

        Raises Suspect.
        """
        if self._buffer:
            raise Suspect("it wrote before it was asked")
        mark = secrets.token_hex(8)
        request = json.dumps({"id": mark, **case.question}).encode() + b"\n"
        line: bytes | None = None
        if self._sandbox.cpu_seconds is not None:
            self._confined.allow(self._sandbox.cpu_seconds)
        try:
            async with asyncio.timeout(self._sandbox.seconds):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._confined.stdin.write(request)
                    await self._confined.stdin.drain()
                line = await self._read_line(ANSWER_BYTES)
        except TimeoutError:
            self._confined.kill("seconds")
        if line is None and self._confined.limit is not None:
            return "limit", TOO_MUCH[self._confined.limit]
        if line is None:
            raise Suspect("it ended without an answer")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Suspect("it wrote what is no answer") from error
        if not isinstance(answer, dict) or answer.pop("id", None) != mark:
            raise Suspect("it wrote an answer that it was not asked for")
        ((kind, value),) = answer.items() if len(answer) == 1 else [("", None)]
        try:
            if kind == "returned":
                check_answer(value)
            elif kind not in ("raised", "broken") or not isinstance(value, str):
                raise Malformed(kind)
        except Malformed as error:
            raise Suspect("it wrote what is no answer") from error
        return kind, value

    async def _read_line(self, most: int) -> bytes | None:
        """Return the next line, None if there is none or it is too long. Keep the text after it."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > most:
                self._confined.kill("output")
                return None
            block = await self._confined.stdout.read(BLOCK)
            if not block:
                return None
            self._buffer += block
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line


def _exception_name(name: str) -> str:
    """Return the name of an exception, if the code chose a valid one."""
    return name if name.isidentifier() and name.isascii() else "an exception"
