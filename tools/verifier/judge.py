"""Judge: question the agent's code in its sandbox, and compare the answers outside of it.

The expected values never enter the sandbox, in no file, argument, variable or memory of a process
there: the judge is this process. The code can therefore deceive only its own Python,
call_worker.py, and any result of that is an answer, right or wrong. Called by __init__.py. Read
next: call_worker.py; plain_answers.py, the comparison of values.
"""

import asyncio
import contextlib
import functools
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cray_agents.agent import user_code
from cray_agents.errors import SetupError
from cray_agents.rewards.reward import TIMEOUT, Verdict
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.sandbox.process import BLOCK, START, TOO_MUCH, SandboxedProcess, SandboxLost
from cray_agents.tools.verifier import plain_answers
from cray_agents.tools.verifier.cases import Case

Files = Mapping[str, str | bytes]
Accepts = Callable[[Any, Case], bool]

WORKER = Path(__file__).with_name("call_worker.py")
READY = b'{"ready": true}\n'
BUSY = 20  # clock time on a busy machine, in multiples of processor time


class Suspect(Exception):
    """The code did something that honest code does not do, and earns nothing."""


@dataclass
class AnswerTally:
    """The count of right answers, and the problems of the others."""

    cases: int
    right: int = 0
    wrong: list[str] = field(default_factory=list)

    def verdict(self, partial: bool) -> Verdict:
        """Return 1.0 if all are right, else 0.0; with `partial` their share."""
        comment = f"{self.right} of {self.cases} tests passed"
        if self.wrong:
            comment += f"; {self.wrong[0]}"
        share = self.right / self.cases
        return Verdict(share if partial else float(share == 1.0), comment)


@dataclass(frozen=True)
class JudgeRules:
    """Rules for right answers. With `partial`, questions go on after a wrong answer."""

    partial: bool
    tolerance: float
    accepts: Accepts | None

    async def right(self, answer: Any, case: Case) -> bool:
        """Return True if an answer is right for the case. Raises Suspect."""
        if self.accepts is None:
            if case.stdin is not None:
                return plain_answers.outputs_equal(answer, case.expected, self.tolerance)
            expected = plain_answers.read(plain_answers.to_json(case.expected))
            return plain_answers.values_equal(answer, expected, self.tolerance)
        try:
            given = answer if case.stdin is not None else plain_answers.native(answer)
            return bool(
                await user_code.call(functools.partial(self.accepts, given, case), timeout=TIMEOUT)
            )
        except Exception as error:
            raise Suspect(f"`accepts` failed: {type(error).__name__}") from error


def with_processor_limit(sandbox: Sandbox | None) -> Sandbox:
    """Return a sandbox with a limit on processor time, which is fair on a busy machine.

    It keeps all output that may be an answer.
    """
    sandbox = replace(sandbox or Sandbox(), output_chars=plain_answers.SIZE)
    if sandbox.cpu_seconds is not None:
        return sandbox
    return replace(sandbox, cpu_seconds=sandbox.seconds, seconds=BUSY * sandbox.seconds)


async def guard_verdict(judge: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """Return the verdict, or 0.0 with the reason of suspicion. Raises SetupError without a run."""
    try:
        return await judge()
    except SandboxLost:
        return Verdict(0.0, "the sandbox failed while it ran", suspect=True)
    except Suspect as error:
        return Verdict(0.0, str(error), suspect=True)


async def judge_calls(
    sandbox: Sandbox, files: Files, cases: Sequence[Case], rules: JudgeRules
) -> Verdict:
    """Send all calls to one process, in order, until it ends.

    Raises SetupError if it could not be started, Suspect, and SandboxLost.
    """
    tally = AnswerTally(len(cases))
    argv = [sys.executable, "-I", "-c", WORKER.read_text()]
    async with sandbox.start(argv, files=files) as confined:
        code = _Code(confined, sandbox)
        await code.begin()
        for number, case in enumerate(cases, 1):
            answer = await code.ask(case.question)
            problem = await _problem(answer, case, rules)
            if problem is None:
                tally.right += 1
                continue
            tally.wrong.append(f"test {number}: {problem}")
            if not rules.partial or ("returned" not in answer and "raised" not in answer):
                break
    return tally.verdict(rules.partial)


async def judge_programs(
    sandbox: Sandbox, command: Sequence[str], files: Files, cases: Sequence[Case], rules: JudgeRules
) -> Verdict:
    """Run the program once for each case, in order, until it meets a limit.

    Raises as `judge_calls` does.
    """
    tally = AnswerTally(len(cases))
    for number, case in enumerate(cases, 1):
        outcome = await sandbox.run(command, files=files, stdin=case.stdin or "")
        problem = None
        if outcome.limit is not None:
            problem = TOO_MUCH[outcome.limit]
        elif outcome.truncated:
            problem = TOO_MUCH["output"]
        elif outcome.returncode != 0:
            problem = f"exit status {outcome.returncode}"
        elif not await rules.right(outcome.stdout, case):
            problem = "wrong output"
        if problem is None:
            tally.right += 1
            continue
        tally.wrong.append(f"test {number}: {problem}")
        if not rules.partial or outcome.limit is not None:
            break
    return tally.verdict(rules.partial)


async def check_program(sandbox: Sandbox, program: str) -> None:
    """Raise SetupError if a program is not in the sandbox, before any code of the agent runs.

    Afterwards the exit statuses 126 and 127 can only be the code's own.
    """
    try:
        outcome = await sandbox.run(["sh", "-c", 'command -v -- "$0"', program])
    except SandboxLost as error:
        raise SetupError(str(error)) from error
    if outcome.returncode != 0:
        raise SetupError(f"there is no program {program!r} in the sandbox")


async def _problem(answer: dict[str, Any], case: Case, rules: JudgeRules) -> str | None:
    """Return the problem of an answer without revealing the expected one; None: it is right."""
    if "limit" in answer:
        return str(answer["limit"])
    if "broken" in answer:
        return f"solution.py ended with {_exception_name(answer['broken'])}"
    if "raised" in answer:
        right = case.awaits(answer["raised"])
        return None if right else f"it raised {_exception_name(answer['raised'])}"
    if case.raises is not None:
        return "it raised nothing"
    return None if await rules.right(answer["returned"], case) else "wrong answer"


class _Code:
    """The code's process, for questions of the judge."""

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

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the result: {"returned" | "raised" | "broken" | "limit"}. Raises Suspect."""
        if self._buffer:
            raise Suspect("it wrote before it was asked")
        mark = secrets.token_hex(8)
        request = json.dumps({"id": mark, **question}).encode() + b"\n"
        line: bytes | None = None
        if self._sandbox.cpu_seconds is not None:
            self._confined.allow(self._sandbox.cpu_seconds)
        try:
            async with asyncio.timeout(self._sandbox.seconds):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._confined.stdin.write(request)
                    await self._confined.stdin.drain()
                line = await self._read_line(plain_answers.SIZE)
        except TimeoutError:
            self._confined.kill("seconds")
        if line is None and self._confined.limit is not None:
            return {"limit": TOO_MUCH[self._confined.limit]}
        if line is None:
            raise Suspect("it ended without an answer")
        try:
            answer = plain_answers.read(line)
        except plain_answers.Malformed as error:
            raise Suspect("it wrote what is no answer") from error
        if not isinstance(answer, plain_answers.AnswerLine) or answer.words.pop("id", None) != mark:
            raise Suspect("it wrote an answer that it was not asked for")
        ((kind, of),) = answer.words.items() if len(answer.words) == 1 else [("", None)]
        if kind != "returned" and not (kind in ("raised", "broken") and isinstance(of, str)):
            raise Suspect("it wrote what is no answer")
        return answer.words

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
