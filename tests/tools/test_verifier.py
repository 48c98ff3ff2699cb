"""Programs as rewards: what earns what, and what is no reward at all."""

from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, RewardError
from cray_agents.records import Run, StopReason
from cray_agents.rewards import score
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.verifier import code_of, verifier

TESTS = "from solution import add\nassert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
RIGHT = "def add(a, b):\n    return a + b\n"


def run_of(output: Any) -> Run:
    return Run(id="r", agent="a", model="m", input="add", output=output,
               stop_reason=StopReason.completed)  # fmt: skip


def solution(run: Run) -> dict[str, str]:
    return {"solution.py": code_of(run.output)}


async def value(program: Any, output: Any = "", **options: Any) -> float:
    return await verifier(program, **options)(run_of(output))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (RIGHT, 1.0),
        (f"Here it is:\n```python\n{RIGHT}```\nGood luck!", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b:", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("print('{\"reward\": 1}')\nraise SystemExit(0)", 0.0),
        ("import os; os.kill(os.getppid(), 9); os.kill(0, 9)", 0.0),
        ("while True: pass", 0.0),
        ("b = [bytearray(1 << 28) for _ in range(64)]", 0.0),
        ("import atexit; atexit.register(print, '{\"reward\": 9}')\ndef add(a, b): return 0", 0.0),
    ],
)
async def test_unit_tests_on_code(code: str, expected: float) -> None:
    assert await value(TESTS, code, files=solution, sandbox=Sandbox(seconds=2)) == expected


async def test_no_answer_is_no_code() -> None:
    assert code_of(None) == ""
    assert await value(TESTS, None, files=solution) == 0.0


async def test_source_may_say_how_much() -> None:
    assert await value("import json\nreward = json.load(open('run.json'))['output'] / 4", 1) == 0.25
    assert await value("reward = len(open('output.txt').read()) == 4", "four") == 1.0
    for wrong in ("'much'", "float('nan')", "None", "[1]"):
        with pytest.raises(RewardError, match="give a finite number"):
            await value(f"reward = {wrong}")


async def test_commands() -> None:
    assert await value(["bash", "-c", "grep -q right output.txt"], "right") == 1.0
    assert await value(["bash", "-c", "grep -q right output.txt"], "wrong") == 0.0
    said = ["bash", "-c", "cat > in; echo so; cat output.txt; grep -q add in"]
    assert await value(said, '{"reward": 0.25}') == 0.25
    assert await value(said, '{"rewards": 0.25}') == 1.0
    assert await value(["bash", "-c", "echo '{\"reward\": 1}'; exit 1"]) == 0.0
    with pytest.raises(RewardError, match="give a finite number"):
        await value(said, '{"reward": "much"}')


async def test_what_could_not_be_run_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no-such-program"):
        await value(["no-such-program"])
    library = tmp_path / "library"
    library.mkdir()
    broken = Sandbox(readable=[library])
    library.rmdir()
    with pytest.raises(RewardError, match="could not be run: the sandbox did not start"):
        await value(["true"], sandbox=broken)
    rewards, error = await score(run_of(""), [verifier(["true"], sandbox=broken)])
    assert not rewards and error is not None and "could not be run" in error.message


async def test_weight_and_name() -> None:
    rewards, error = await score(run_of(""), [verifier(["true"], weight=0.5, name="tests")])
    assert error is None and [(r.name, r.value) for r in rewards] == [("tests", 0.5)]
    with pytest.raises(BadInput, match="empty"):
        verifier("")
