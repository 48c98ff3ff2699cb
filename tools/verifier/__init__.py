"""Verifier: reward an agent's code by hidden tests, judged outside of the code's sandbox.

    loop = Loop(agent, tasks, rewards=[verifier()])

with tasks such as {"input": "Write add(a, b).", "metadata": {"tests": ["add(2, 3) == 5"]}}.

The reward is a number from 0 to 1. If the code could not be run at all, it is a RewardError, never
0. Once the code runs, no act of it is an error. Acts that honest code never does earn 0.0, and give
the run the tag `suspect`. `checker` is the second kind of reward: your own program runs beside the
code, with weaker guarantees. Called by agent authors. Read next: cases.py; judge.py;
sandbox/__init__.py.
"""

import functools
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cray_agents.agent import user_code
from cray_agents.errors import BadInput, RewardError
from cray_agents.records import Run
from cray_agents.rewards.reward import TIMEOUT, Verdict, reward
from cray_agents.tools.sandbox import Outcome, Sandbox
from cray_agents.tools.sandbox.process import TOO_MUCH
from cray_agents.tools.verifier.cases import Case, Tests, cases_of
from cray_agents.tools.verifier.judge import (
    Files,
    ProgramFinder,
    Suspect,
    guard_verdict,
    judge,
    with_processor_limit,
)

__all__ = ["Case", "checker", "code_of", "verifier"]

FilesOfRun = Callable[[Run], Files | Awaitable[Files]]

PYTHON = (sys.executable, "solution.py")

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
# Run verify.py to its end, and at once report that with a word that no other program knows.
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
    tests: Tests | Callable[[Run], Tests | Awaitable[Tests]] | None = None,
    *,
    files: FilesOfRun | None = None,
    command: Sequence[str] = PYTHON,
    partial: bool = False,
    tolerance: float = 1e-9,
    sandbox: Sandbox | None = None,
    weight: float = 1.0,
    name: str = "verifier",
) -> Callable[[Run], Awaitable[float]]:
    """Make a reward that runs the agent's code in a sandbox, and compares its answers itself.

    The code gets calls, or a program's input, and returns plain data. The tests, the expected
    values and the comparison stay in this process, out of the code's reach. One process of the code
    answers all calls of a run, in order. A program is run anew for each input.

    Two weaknesses remain. Code can guess, for example by always returning True: give several tests
    with different answers. Code can answer the tested inputs alone: give enough tests.

    Args:
        tests: texts such as "add(2, 3) == 5", dicts or Cases (see Case), or Python source such as
            `assert add(2, 3) == 5`; or a function that returns a run's tests; default: the
            metadata["tests"] of its task.
        files: function of the run that returns the files of the code's folder, solution.py among
            them; default: solution.py, the last fenced block of the output. The code can read them.
        command: command of a program, for tests with `stdin`.
        partial: True to earn the share of the passed tests; default: 1.0 for all of them, else 0.0.
        tolerance: allowed error of numbers with a point, relative to the larger, or absolute.
        sandbox: limits and readable files, none of which may reveal the tests. Each call, or run of
            a program, gets `cpu_seconds` of processor time and `seconds` by the clock. Without
            `cpu_seconds`, its `seconds` are processor time, and 20 times as many by the clock, so
            that a busy machine does not cut slow code short. Default: Sandbox().
        weight, name: of the reward.

    Code that meets a limit, cannot be imported, or gives no answer earns 0.0. If a sandbox or
    Python cannot be started, or the tests are invalid, the function raises RewardError. If `files`
    raises, the code earns 0.0 and the tag `suspect`, as its output may be the cause. Both functions
    may be sync or async.
    """
    if not 0 <= tolerance < float("inf"):
        raise BadInput(f"tolerance={tolerance!r}: must be a number from 0", param="tolerance")
    if isinstance(command, str) or not command:
        raise BadInput(f"command={command!r}: give the program and its arguments", param="command")
    fixed_cases = None if tests is None or callable(tests) else cases_of(tests)
    box = with_processor_limit(sandbox)
    find_program = ProgramFinder(box)

    async def verify(run: Run) -> float:
        cases = fixed_cases or await _cases_of_run(run, tests if callable(tests) else None)

        async def ask_all() -> Verdict:
            given = await _files(run, files or _solution)
            if cases[0].stdin is not None:
                await find_program(command[0])
            return await judge(box, command, given, cases, partial=partial, tolerance=tolerance)

        return await guard_verdict(name, ask_all)

    return reward(weight=weight, name=name, timeout=None)(verify)


def checker(
    program: str | Sequence[str],
    *,
    files: FilesOfRun | None = None,
    sandbox: Sandbox | None = None,
    weight: float = 1.0,
    name: str = "checker",
) -> Callable[[Run], Awaitable[float]]:
    r"""Make a reward that runs a program of yours beside the output, in a sandbox.

    It is for programs that read the output: a proof checker, a compiler, a comparison of texts. If
    the program runs the agent's code, as unit tests do that import it, IT DOES NOT HOLD against
    code that is written to deceive, and a model that is so rewarded learns to deceive. The code
    shares the program's process, or at least its user and folder. It can read the tests, and the
    task's target and metadata. It can return objects that equal everything, and replace functions
    that compare, report and exit. `os._exit(0)` passes many frameworks' tests. Use `verifier`
    wherever its tests can be written.

    A str is Python source. It earns 1.0 by running to its end, or the value of its global variable
    `reward`. An exception, and an exit of any kind before the end, earn 0.0.

    A sequence is a command, such as `["bash", "check.sh"]`. Exit status 0 earns 1.0, or the value
    in the last line of output if that is JSON such as `{"reward": 0.5}`. Any other status earns
    0.0.

    Two guarantees remain. The reward is a number from 0 to 1; any other value, such as NaN or
    1e308, earns 0.0 and the tag `suspect`. Once the program runs, no ending is an error.

    Args:
        program: Python source, or a command.
        files: function of the run that returns the files of the folder, beside `run.json`, the run
            itself, and `output.txt`, its output as text.
        sandbox: limits and readable files; see `verifier`.
        weight, name: of the reward.

    The function raises RewardError if the sandbox, or the program, is missing.
    """
    if not program:
        raise BadInput("checker: the program is empty", param="program")
    box = with_processor_limit(sandbox)
    find_program = ProgramFinder(box)

    async def check(run: Run) -> float:
        word = secrets.token_hex(16)

        async def run_program() -> Verdict:
            given = {**_records(run), **(await _files(run, files) if files else {})}
            if isinstance(program, str):
                argv: Sequence[str] = [sys.executable, "-c", _TO_THE_END]
                given["verify.py"] = program
                stdin: str | bytes = f"{word}\n"
            else:
                argv, stdin = program, given["run.json"]
            await find_program(argv[0])
            outcome = await box.run(argv, files=given, stdin=stdin)
            if isinstance(program, str):
                return _read_python_verdict(outcome, word)
            return _read_command_verdict(outcome)

        return await guard_verdict(name, run_program)

    return reward(weight=weight, name=name, timeout=None)(check)


def code_of(text: str | None) -> str:
    """Return the last fenced block of a text, or the whole text without one.

    None, the output of a run without an answer, gives "".
    """
    blocks: list[str] = _FENCED.findall(text or "")
    return blocks[-1] if blocks else text or ""


async def _cases_of_run(run: Run, tests: Callable[[Run], Any] | None) -> list[Case]:
    """Return the cases of a run. Raises RewardError."""
    given = (run.task.metadata if run.task else {}).get("tests")
    if tests is not None:
        given = await user_code.call(functools.partial(tests, run), TIMEOUT)
    task = f"task {run.task.id}" if run.task else f"run {run.id}, which is of no task,"
    if given is None:
        raise RewardError(f"{task} has no tests: give them as its metadata['tests']")
    try:
        return cases_of(given)
    except BadInput as error:
        raise RewardError(f"the tests of {task}: {error}") from error


def _solution(run: Run) -> Files:
    return {"solution.py": code_of(None if run.output is None else _text(run.output))}


async def _files(run: Run, files: FilesOfRun) -> dict[str, str | bytes]:
    """Return the files that the author's function makes of a run. Raises Suspect."""
    try:
        given = dict(await user_code.call(functools.partial(files, run), TIMEOUT))
    except Exception as error:
        raise Suspect(f"`files` failed: {type(error).__name__}: {error}"[:300]) from error
    for each, content in given.items():
        if not isinstance(each, str) or not isinstance(content, str | bytes):
            raise Suspect(f"`files` gave {each!r:.100} of {type(content).__name__}")
    return given


def _records(run: Run) -> dict[str, str | bytes]:
    """Return the run as files. Raises Suspect."""
    try:
        return {"run.json": run.model_dump_json(), "output.txt": _text(run.output)}
    except (ValueError, RecursionError) as error:  # such as half of a surrogate pair
        raise Suspect(f"the run cannot be written as JSON: {error}"[:300]) from error


def _read_command_verdict(outcome: Outcome) -> Verdict:
    if outcome.returncode in (126, 127):  # check_program has found the program itself
        raise Suspect(f"exit status {outcome.returncode}, as of a program that is missing")
    if outcome.returncode != 0:
        return Verdict(0.0, _describe_end(outcome))
    lines = outcome.stdout.strip().splitlines() or [""]
    try:
        report = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return Verdict(1.0)
    return (
        _checked_reward(report["reward"])
        if isinstance(report, dict) and "reward" in report
        else Verdict(1.0)
    )


def _read_python_verdict(outcome: Outcome, word: str) -> Verdict:
    if outcome.returncode != 0:
        return Verdict(0.0, _describe_end(outcome))
    last = (outcome.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith(f"{word} "):
        raise Suspect("it ended before the tests' end")
    try:
        return _checked_reward(json.loads(last.removeprefix(f"{word} ")))
    except (ValueError, RecursionError) as error:
        raise Suspect("it ended with what is no reward") from error


def _checked_reward(value: Any) -> Verdict:
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:  # NaN is not
        raise Suspect(f"reward={value!r:.100} is no number from 0 to 1")
    return Verdict(value)


def _describe_end(outcome: Outcome) -> str:
    return TOO_MUCH[outcome.limit] if outcome.limit else f"exit status {outcome.returncode}"


def _text(output: object) -> str:
    return output if isinstance(output, str) else json.dumps(output, default=str)
