"""The judge: asks the agent's code in its sandbox, and compares what it answers, outside of it.

What is expected never enters the sandbox, in no file, argument, variable or memory of a process
there: the judge is this process. So the code can deceive nobody but its own Python, worker.py, and
whatever it does there is an answer, right or wrong. Called by verifier/__init__.py. Read next:
worker.py; answers.py, what equals what.
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

WORKER = Path(__file__).with_name("worker.py")
READY = b'{"ready": true}\n'
BUSY = 20  # a busy machine may take so many times as long as the code computes


class Suspect(Exception):
    """The code did what honest code does not do: it earns nothing at all."""


@dataclass
class AnswerTally:
    """How many of the answers were right, and of what the first other one was."""

    cases: int
    right: int = 0
    wrong: list[str] = field(default_factory=list)

    def verdict(self, partial: bool) -> Verdict:
        """1.0 for all of them; `partial`: their share."""
        comment = f"{self.right} of {self.cases} tests passed"
        if self.wrong:
            comment += f"; {self.wrong[0]}"
        share = self.right / self.cases
        return Verdict(share if partial else float(share == 1.0), comment)


@dataclass(frozen=True)
class JudgeRules:
    """What counts as right, and whether the questions go on after a wrong answer."""

    partial: bool
    tolerance: float
    accepts: Accepts | None

    async def right(self, answer: Any, case: Case) -> bool:
        """Whether it is the answer to the case. Raises Suspect."""
        if self.accepts is None:
            if case.stdin is not None:
                return plain_answers.alike_text(answer, case.expected, self.tolerance)
            expected = plain_answers.read(plain_answers.written(case.expected))
            return plain_answers.alike(answer, expected, self.tolerance)
        try:
            given = answer if case.stdin is not None else plain_answers.native(answer)
            return bool(
                await user_code.call(functools.partial(self.accepts, given, case), timeout=TIMEOUT)
            )
        except Exception as error:
            raise Suspect(f"`accepts` failed: {type(error).__name__}") from error


def fair(sandbox: Sandbox | None) -> Sandbox:
    """A sandbox whose limit is of processor time, which a busy machine takes from nobody.

    It keeps all output that may be an answer.
    """
    cell = replace(sandbox or Sandbox(), output_chars=plain_answers.SIZE)
    if cell.cpu_seconds is not None:
        return cell
    return replace(cell, cpu_seconds=cell.seconds, seconds=BUSY * cell.seconds)


async def judged(asking: Callable[[], Awaitable[Verdict]]) -> Verdict:
    """The verdict, or 0.0 and why it is suspect. Raises SetupError if the code could not be run."""
    try:
        return await asking()
    except SandboxLost:
        return Verdict(0.0, "the sandbox failed while it ran", suspect=True)
    except Suspect as error:
        return Verdict(0.0, str(error), suspect=True)


async def judge_calls(
    cell: Sandbox, files: Files, cases: Sequence[Case], rules: JudgeRules
) -> Verdict:
    """Ask one process all the calls, in their order. What ends the process ends the questions.

    Raises SetupError if it could not be started, Suspect, and SandboxLost.
    """
    tally = AnswerTally(len(cases))
    argv = [sys.executable, "-I", "-c", WORKER.read_text()]
    async with cell.start(argv, files=files) as confined:
        code = _Code(confined, cell)
        await code.begin()
        for number, case in enumerate(cases, 1):
            found = await code.ask(case.question)
            problem = await _problem(found, case, rules)
            if problem is None:
                tally.right += 1
                continue
            tally.wrong.append(f"test {number}: {problem}")
            if not rules.partial or ("returned" not in found and "raised" not in found):
                break
    return tally.verdict(rules.partial)


async def judge_programs(
    cell: Sandbox, command: Sequence[str], files: Files, cases: Sequence[Case], rules: JudgeRules
) -> Verdict:
    """Run the program once for each case, in their order; a limit ends the questions.

    Raises as `judge_calls` does.
    """
    tally = AnswerTally(len(cases))
    for number, case in enumerate(cases, 1):
        outcome = await cell.run(command, files=files, stdin=case.stdin or "")
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


async def check_program(cell: Sandbox, program: str) -> None:
    """Raises SetupError if a program is not in the sandbox. Nothing of the agent's has run there.

    Afterwards the exit statuses 126 and 127 can only be the code's own.
    """
    try:
        found = await cell.run(["sh", "-c", 'command -v -- "$0"', program])
    except SandboxLost as error:
        raise SetupError(str(error)) from error
    if found.returncode != 0:
        raise SetupError(f"there is no program {program!r} in the sandbox")


async def _problem(found: dict[str, Any], case: Case, rules: JudgeRules) -> str | None:
    """What is wrong with an answer, without a word of what is expected; None: it is right."""
    if "limit" in found:
        return str(found["limit"])
    if "broken" in found:
        return f"solution.py ended with {_shown(found['broken'])}"
    if "raised" in found:
        right = case.awaits(found["raised"])
        return None if right else f"it raised {_shown(found['raised'])}"
    if case.raises is not None:
        return "it raised nothing"
    return None if await rules.right(found["returned"], case) else "wrong answer"


class _Code:
    """The code's process, as the judge talks to it."""

    def __init__(self, confined: SandboxedProcess, cell: Sandbox) -> None:
        self._confined = confined
        self._cell = cell
        self._read = bytearray()

    async def begin(self) -> None:
        """Wait for worker.py, which then imports the code. Raises SetupError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START):
                if await self._line(len(READY)) == READY:
                    return
        self._confined.kill()
        told = (await self._confined.stderr.read()).decode(errors="replace").strip()
        raise SetupError(f"Python did not start in the sandbox: {told[-500:]}")

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """What came of a question: {"returned" | "raised" | "broken" | "limit"}. Raises Suspect."""
        if self._read:
            raise Suspect("it wrote before it was asked")
        mark = secrets.token_hex(8)
        asked = json.dumps({"id": mark, **question}).encode() + b"\n"
        line: bytes | None = None
        if self._cell.cpu_seconds is not None:
            self._confined.allow(self._cell.cpu_seconds)
        try:
            async with asyncio.timeout(self._cell.seconds):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._confined.stdin.write(asked)
                    await self._confined.stdin.drain()
                line = await self._line(plain_answers.SIZE)
        except TimeoutError:
            self._confined.kill("seconds")
        if line is None and self._confined.limit is not None:
            return {"limit": TOO_MUCH[self._confined.limit]}
        if line is None:
            raise Suspect("it ended without an answer")
        try:
            found = plain_answers.read(line)
        except plain_answers.Malformed as error:
            raise Suspect("it wrote what is no answer") from error
        if not isinstance(found, plain_answers.AnswerLine) or found.words.pop("id", None) != mark:
            raise Suspect("it wrote an answer that it was not asked for")
        ((kind, of),) = found.words.items() if len(found.words) == 1 else [("", None)]
        if kind != "returned" and not (kind in ("raised", "broken") and isinstance(of, str)):
            raise Suspect("it wrote what is no answer")
        return found.words

    async def _line(self, most: int) -> bytes | None:
        """The next line; None if there is none, or it is too long. What follows it is kept."""
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > most:
                self._confined.kill("output")
                return None
            block = await self._confined.stdout.read(BLOCK)
            if not block:
                return None
            self._read += block
        line = bytes(self._read[: end + 1])
        del self._read[: end + 1]
        return line


def _shown(name: str) -> str:
    """The name of an exception, as far as the code chose one."""
    return name if name.isidentifier() and name.isascii() else "an exception"
