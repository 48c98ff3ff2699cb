"""06_code_writer.py: what its tests say of good, bad and sly code; its loop; its --quick."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import RFT, PromotionTest, Run, Sampling, Task, Training
from cray_agents.cli.user_files import load
from cray_agents.testing import ScriptedEngine
from tests.support.quick_recipe import quick_lines
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "cookbook" / "06_code_writer.py"
book = load(FILE)
SQUARE = next(task for task in book.tasks if task.input.startswith("square"))
PREFIX = "def square(x):\n    return "


def answered(code: str, task: Task = SQUARE) -> Run:
    engine = ScriptedEngine([f"Here it is:\n```python\n{code}\n```"])
    run: Run = book.agent.override(engine=engine).run_sync(task)
    return run


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (PREFIX + "x * x", 1.0),
        (PREFIX + "x * abs(x)", 0.5),
        ("import json\ntests = json.load(open('tests.json'))\n" + PREFIX + "tests[0][1]", 0.0),
    ],
)
def test_reward(code: str, reward: float) -> None:
    assert asyncio.run(book.passes(answered(code))) == reward


def test_our_own_solutions_pass() -> None:
    runs = [answered(task.metadata["solution"], task) for task in book.tasks]

    async def values() -> list[float]:
        return [await book.passes(run) for run in runs]

    assert asyncio.run(values()) == [1.0] * len(book.tasks)


def test_a_better_writer_is_promoted(tmp_path: Path) -> None:
    solutions = {task.input: task.metadata["solution"] for task in book.tasks}

    def say(request: dict[str, Any], version: str) -> str:
        """From the second version on it can; before, it can when its question is short."""
        question = request["messages"][1]["content"]
        able = version != "coder@1" or len(question) % 2
        return f"```python\n{solutions[question]}\n```" if able else "I cannot."

    with platform(tmp_path, ScriptedEngine(say), name="coder") as where:
        loop = replace(
            book.loop,
            platform=where,
            method=RFT(tasks_per_iteration=8, training=Training(steps=1)),
            sampling=Sampling(),
            promotion=PromotionTest(alpha=0.2),
        )
        first, second = loop.run_sync(1)
    assert first.holdout_success < 1 and second.holdout_success == 1
    assert second.promoted and second.version == "coder@2"
    assert 0 < second.accepted_runs < second.runs == 8


def test_quick(tmp_path: Path) -> None:
    lines = quick_lines(FILE, tmp_path)
    assert lines[0] == "python: 5" and lines[-1] == "passes: 1.0"
