"""A program as a reward: unit tests on the agent's code, a checker in any language, in a sandbox.

    def answer(run):
        return {"solution.py": code_of(run.output)}

    tests = "from solution import add\\nassert add(2, 3) == 5"
    loop = Loop(agent, tasks, rewards=[verifier(tests, files=answer)])

What the program finds is a reward; that it could not be run is a RewardError, never a 0. Called by
agent authors. Read next: cray_agents/rewards.py, sandbox/__init__.py.
"""

import json
import math
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from cray_agents.errors import BadInput, RewardError, SetupError
from cray_agents.records import Run
from cray_agents.rewards import reward
from cray_agents.tools.sandbox import Outcome, Sandbox

Files = Mapping[str, str | bytes]

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
    program: str | Sequence[str],
    *,
    files: Callable[[Run], Files] | None = None,
    sandbox: Sandbox | None = None,
    weight: float = 1.0,
    name: str = "verifier",
) -> Callable[[Run], Awaitable[float]]:
    r"""A reward function that runs a program in a sandbox, in a new folder for each run.

    A str is Python source. It earns 1.0 by running to its end, or the value of its global variable
    `reward`; an exception, and an exit of any kind before the end, earn 0.0. That is the one to use
    when the agent's code runs inside: `sys.exit(0)` in the code does not pass the tests.

    A sequence is a command, such as `["bash", "check.sh"]`. Exit status 0 earns 1.0, or what its
    last line of output says if that is JSON such as `{"reward": 0.5}`; any other status earns 0.0.

    A program that meets a limit (seconds, memory, disk, output) earns 0.0: what it tests may well
    be what is slow. Code under test shares the program's process and may look around in it, so that
    none of this holds against code that is written to deceive: let the program run it as a child
    if that matters.

    Args:
        program: Python source, or a command.
        files: what lies in the folder, made of the run; beside `run.json`, the run itself, and
            `output.txt`, its output as text, which are always there.
        sandbox: limits, and what may be read; default: Sandbox().
        weight, name: of the reward.

    The function raises RewardError if the sandbox is missing or failed, and for a reward that is no
    finite number.
    """
    if not program:
        raise BadInput("verifier: the program is empty", param="program")
    cell = sandbox or Sandbox()

    async def verify(run: Run) -> float:
        given = dict(files(run)) if files else {}
        given = {"run.json": run.model_dump_json(), "output.txt": _text(run.output), **given}
        word = secrets.token_hex(16)
        try:
            if not isinstance(program, str):
                return _status(await cell.run(program, files=given, stdin=given["run.json"]), name)
            argv = [sys.executable, "-c", _TO_THE_END]
            given["verify.py"] = program
            return _word(await cell.run(argv, files=given, stdin=f"{word}\n"), word, name)
        except SetupError as error:
            raise RewardError(f"{name} could not be run: {error}") from error

    return reward(weight=weight, name=name, timeout=None)(verify)


def code_of(text: str | None) -> str:
    """The last fenced block of a text, as models write code; all of it if there is none.

    Of None, the output of a run that came to no answer, it is "".
    """
    blocks: list[str] = _FENCED.findall(text or "")
    return blocks[-1] if blocks else text or ""


def _status(outcome: Outcome, name: str) -> float:
    if outcome.returncode in (126, 127):  # what shells and prlimit say of a program that is missing
        raise RewardError(f"{name} could not be run: {outcome.stderr.strip()[-300:]}")
    if outcome.returncode != 0:
        return 0.0
    lines = outcome.stdout.strip().splitlines() or [""]
    try:
        said = json.loads(lines[-1])
    except ValueError:
        return 1.0
    return _number(said["reward"], name) if isinstance(said, dict) and "reward" in said else 1.0


def _word(outcome: Outcome, word: str, name: str) -> float:
    last = (outcome.stdout.strip().splitlines() or [""])[-1]
    if outcome.returncode != 0 or not last.startswith(f"{word} "):
        return 0.0
    return _number(json.loads(last.removeprefix(f"{word} ")), name)


def _number(value: object, name: str) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise RewardError(f"{name} said reward={value!r}: give a finite number")
    return float(value)


def _text(output: object) -> str:
    return output if isinstance(output, str) else json.dumps(output, default=str)
