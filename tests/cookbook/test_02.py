"""02_calculator_loop.py: its tasks. tests/test_demo.py runs the whole of it, small.

CRAY_TEST_METHODS=rft,grpo also runs the file itself, as its docstring says (`make soak`).
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cray_agents.cli.user_files import load
from cray_agents.loop.methods import GRPO

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "cookbook" / "02_calculator_loop.py"
METHODS = [name for name in os.environ.get("CRAY_TEST_METHODS", "").split(",") if name]
book = load(FILE)


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_never_share_a_question_nor_training_a_reserved_operand(seed: int) -> None:
    tasks = book.make_loop(seed).tasks
    questions = [task.input for task in tasks]
    assert len(set(questions)) == len(questions)
    for task in tasks:
        left, _, right = task.metadata["expression"].split()
        held = book.reserved(int(left)) or book.reserved(int(right))
        assert held == (task.split != "train")
    for split in ("holdout", "test"):
        kinds = Counter(task.metadata["kind"] for task in tasks.split(split))
        assert set(kinds.values()) == {17}
        assert len(kinds) == 12


def test_methods_share_tasks_and_demonstrations() -> None:
    """Side by side: how is learned from runs differs, and how much was shown before."""
    rft, grpo = book.make_loop(1), book.make_loop(1, method="grpo")
    assert list(rft.tasks) == list(grpo.tasks)
    shown, more = rft.data.demonstrations, grpo.data.demonstrations
    assert shown == more[: len(shown)]
    assert rft.name == "calculator-1" != grpo.name  # the demo's name stays what it was
    rates = [one.method.training.learning_rate for one in rft.settings.schedule]
    for one in grpo.settings.schedule:
        assert isinstance(one.method, GRPO) and one.method.group_size >= 4
        rates.append(one.method.training.learning_rate)
    assert rates == sorted(rates, reverse=True)


def test_demonstrations_are_of_training_questions() -> None:
    loop = book.make_loop(3)
    held = {task.input for task in loop.tasks if task.split != "train"}
    shown = {messages[1]["content"] for messages, _ in loop.data.demonstrations}
    assert len(shown) == len(loop.data.demonstrations) == book.FULL.demonstrations
    assert not shown & held


if METHODS:

    @pytest.mark.vllm
    @pytest.mark.megatron
    @pytest.mark.parametrize("method", METHODS)
    def test_quick(tmp_path: Path, method: str) -> None:
        shuffled = ["--control", "shuffled-rewards"] if method == "grpo" else []
        argv = [sys.executable, str(FILE), "--quick", "--method", method, *shuffled]
        done = subprocess.run(
            argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line.split() for line in done.stdout.splitlines()]
        assert [line[0] for line in lines] == ["0", "1", "2"]
        assert all(line[1].startswith("calc@") for line in lines)
