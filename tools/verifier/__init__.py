"""The agent's code as a reward: tests that it never sees, judged outside of its sandbox.

    loop = Loop(agent, tasks, rewards=[verifier()])

with tasks such as {"input": "Write add(a, b).", "metadata": {"tests": ["add(2, 3) == 5"]}}.

What the code earns is a number from 0 to 1. That it could not be run at all is a RewardError, never
a 0; once it runs, nothing that it does is an error: what no honest code does earns 0.0, and the
run the tag `suspect`. `checker` is the second kind: a program of yours beside the code, and what
that cannot hold. Called by agent authors. Read next: cases.py; judge.py; sandbox/__init__.py.
"""

import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cray_agents.errors import BadInput, RewardError, SetupError
from cray_agents.records import Run
from cray_agents.rewards.reward import Verdict, reward
from cray_agents.tools.sandbox import Outcome, Sandbox
from cray_agents.tools.sandbox.process import TOO_MUCH
from cray_agents.tools.verifier.cases import Case, Tests, cases_of
from cray_agents.tools.verifier.judge import (
    Accepts,
    Files,
    JudgeRules,
    Suspect,
    check_program,
    fair,
    judge_calls,
    judge_programs,
    judged,
)

__all__ = ["Case", "checker", "code_of", "verifier"]

PYTHON = (sys.executable, "solution.py")

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
# Runs verify.py to its end and says so with a word that only it was told, before anything else can.
_TO_THE_END = """\
import json, os, sys
word = sys.stdin.readline().strip()
names = {"__name__": "__main__", "__file__": "verify.py"}
with open("verify.py") as file:
    program = compile(file.read(), "verify.py", "exec")
exec(program, names)
sys.stdout.flush()
os.write(1, f"\\n{word} {json.dumps(names.get('reward', True))}\\n".encode())
os._exit(0)
"""


def verifier(
    tests: Tests | Callable[[Run], Tests] | None = None,
    *,
    files: Callable[[Run], Files] | None = None,
    command: Sequence[str] = PYTHON,
    partial: bool = False,
    tolerance: float = 1e-9,
    accepts: Accepts | None = None,
    sandbox: Sandbox | None = None,
    weight: float = 1.0,
    name: str = "verifier",
) -> Callable[[Run], Awaitable[float]]:
    """A reward function that asks the agent's code, in a sandbox, and compares the answers itself.

    The code gets calls, or a program's input, and gives plain data back. The tests, the expected
    values and the comparison stay in this process, where the code reaches nothing. One process of
    it answers all calls of a run, in order; a program is run anew for each input.

    What it cannot hold off: code that guesses, such as one that always returns True. Give several
    tests, with different answers. And code that answers only what is asked: ask enough.

    Args:
        tests: texts such as "add(2, 3) == 5", dicts or Cases (see Case), or Python source of
            `assert add(2, 3) == 5` and the like; or a function that gives a run's; default: what
            its task has as metadata["tests"].
        files: what lies in the code's folder, made of the run, with solution.py among it; default:
            solution.py, the last fenced block of the output. The code can read all of it.
        command: how a program is run, for tests with `stdin`.
        partial: earn the share of the tests that pass; default: 1.0 for all of them, or 0.0.
        tolerance: how far numbers with a point may be off, relative to the larger, or absolute.
        accepts: instead of comparing: whether an answer, as plain data or a program's output, is
            right for its case. Called with both here, outside of the sandbox.
        sandbox: limits, and what may be read: nothing that tells the tests. Each call, or run of a
            program, gets `cpu_seconds` of processor time and `seconds` by the clock. Without
            `cpu_seconds`, its `seconds` are processor time, and 20 times as many by the clock:
            slow code is not cut short because the machine is busy. Default: Sandbox().
        weight, name: of the reward.

    It earns 0.0 where it meets a limit, does not import, or gives no answer. Where a sandbox or
    Python cannot be started, or the tests are none, the function raises RewardError. `files` or
    `accepts` that raises earns 0.0 and the tag `suspect`: the output may well be what makes it.
    """
    if not 0 <= tolerance < float("inf"):
        raise BadInput(f"tolerance={tolerance!r}: must be a number from 0", param="tolerance")
    if isinstance(command, str) or not command:
        raise BadInput(f"command={command!r}: give the program and its arguments", param="command")
    rules = JudgeRules(partial, tolerance, accepts)
    known = None if tests is None or callable(tests) else cases_of(tests)
    cell = fair(sandbox)
    found: set[str] = set()  # programs that are in the sandbox

    async def verify(run: Run) -> float:
        cases = known or _cases(run, tests if callable(tests) else None)

        async def asking() -> Verdict:
            given = _files(run, files or _solution)
            try:
                if cases[0].stdin is None:
                    return await judge_calls(cell, given, cases, rules)
                if command[0] not in found:
                    await check_program(cell, command[0])
                    found.add(command[0])
                return await judge_programs(cell, command, given, cases, rules)
            except BadInput as error:  # names of files that the run gave
                raise Suspect(str(error)) from error

        try:
            return await judged(asking)
        except SetupError as error:
            raise RewardError(f"{name} could not be run: {error}") from error

    return reward(weight=weight, name=name, timeout=None)(verify)


def checker(
    program: str | Sequence[str],
    *,
    files: Callable[[Run], Files] | None = None,
    sandbox: Sandbox | None = None,
    weight: float = 1.0,
    name: str = "checker",
) -> Callable[[Run], Awaitable[float]]:
    r"""A reward function that runs a program of yours beside the output, in a sandbox.

    It is for what reads the output: a proof checker, a compiler, a comparison of texts. Where the
    program runs the agent's code, as unit tests do that import it, IT DOES NOT HOLD against code
    that is written to deceive, and a model that is rewarded so learns to. The code shares the
    program's process or at least its user and folder: it reads the tests, the task's target and
    metadata; returns objects that equal everything; replaces what compares, reports and exits;
    `os._exit(0)` passes many frameworks' tests. Use `verifier` wherever its tests can be written.

    A str is Python source. It earns 1.0 by running to its end, or the value of its global variable
    `reward`; an exception, and an exit of any kind before the end, earn 0.0.

    A sequence is a command, such as `["bash", "check.sh"]`. Exit status 0 earns 1.0, or what its
    last line of output says if that is JSON such as `{"reward": 0.5}`; any other status earns 0.0.

    Only this holds: the reward is a number from 0 to 1, and whatever else is said, such as NaN or
    1e308, earns 0.0 and the tag `suspect`; once the program runs, no ending is an error.

    Args:
        program: Python source, or a command.
        files: what lies in the folder, made of the run; beside `run.json`, the run itself, and
            `output.txt`, its output as text, which are always there.
        sandbox: limits, and what may be read; see `verifier`.
        weight, name: of the reward.

    The function raises RewardError if the sandbox, or the program, is missing.
    """
    if not program:
        raise BadInput("checker: the program is empty", param="program")
    cell = fair(sandbox)
    found: set[str] = set()  # programs that are in the sandbox

    async def check(run: Run) -> float:
        word = secrets.token_hex(16)

        async def asking() -> Verdict:
            given = {**_records(run), **(_files(run, files) if files else {})}
            try:
                if isinstance(program, str):
                    argv: Sequence[str] = [sys.executable, "-c", _TO_THE_END]
                    given["verify.py"] = program
                    stdin: str | bytes = f"{word}\n"
                else:
                    argv, stdin = program, given["run.json"]
                if argv[0] not in found:
                    await check_program(cell, argv[0])
                    found.add(argv[0])
                outcome = await cell.run(argv, files=given, stdin=stdin)
            except BadInput as error:
                raise Suspect(str(error)) from error
            return _word(outcome, word) if isinstance(program, str) else _status(outcome)

        try:
            return await judged(asking)
        except SetupError as error:
            raise RewardError(f"{name} could not be run: {error}") from error

    return reward(weight=weight, name=name, timeout=None)(check)


def code_of(text: str | None) -> str:
    """The last fenced block of a text, as models write code; all of it if there is none.

    Of None, the output of a run that came to no answer, it is "".
    """
    blocks: list[str] = _FENCED.findall(text or "")
    return blocks[-1] if blocks else text or ""


def _cases(run: Run, tests: Callable[[Run], Tests] | None) -> list[Case]:
    """The cases of a run. Raises RewardError."""
    given = tests(run) if tests else (run.task.metadata if run.task else {}).get("tests")
    task = f"task {run.task.id}" if run.task else f"run {run.id}, which is of no task,"
    if given is None:
        raise RewardError(f"{task} has no tests: give them as its metadata['tests']")
    try:
        return cases_of(given)
    except BadInput as error:
        raise RewardError(f"the tests of {task}: {error}") from error


def _solution(run: Run) -> Files:
    return {"solution.py": code_of(None if run.output is None else _text(run.output))}


def _files(run: Run, files: Callable[[Run], Files]) -> dict[str, str | bytes]:
    """What the author's function makes of a run. Raises Suspect."""
    try:
        given = dict(files(run))
    except Exception as error:
        raise Suspect(f"`files` failed: {type(error).__name__}: {error}"[:300]) from error
    for each, content in given.items():
        if not isinstance(each, str) or not isinstance(content, str | bytes):
            raise Suspect(f"`files` gave {each!r:.100} of {type(content).__name__}")
    return given


def _records(run: Run) -> dict[str, str | bytes]:
    """The run as files. Raises Suspect."""
    try:
        return {"run.json": run.model_dump_json(), "output.txt": _text(run.output)}
    except (ValueError, RecursionError) as error:  # such as half of a surrogate pair
        raise Suspect(f"the run cannot be written as JSON: {error}"[:300]) from error


def _status(outcome: Outcome) -> Verdict:
    if outcome.returncode in (126, 127):  # the program itself was there
        raise Suspect(f"exit status {outcome.returncode}, as of a program that is missing")
    if outcome.returncode != 0:
        return Verdict(0.0, _ending(outcome))
    lines = outcome.stdout.strip().splitlines() or [""]
    try:
        said = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return Verdict(1.0)
    return _number(said["reward"]) if isinstance(said, dict) and "reward" in said else Verdict(1.0)


def _word(outcome: Outcome, word: str) -> Verdict:
    if outcome.returncode != 0:
        return Verdict(0.0, _ending(outcome))
    last = (outcome.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith(f"{word} "):
        raise Suspect("it ended before the tests' end")
    try:
        return _number(json.loads(last.removeprefix(f"{word} ")))
    except (ValueError, RecursionError) as error:
        raise Suspect("it ended with what is no reward") from error


def _number(value: Any) -> Verdict:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:  # NaN is not
        raise Suspect(f"reward={value!r:.100} is no number from 0 to 1")
    return Verdict(value)


def _ending(outcome: Outcome) -> str:
    return TOO_MUCH[outcome.limit] if outcome.limit else f"exit status {outcome.returncode}"


def _text(output: object) -> str:
    return output if isinstance(output, str) else json.dumps(output, default=str)
