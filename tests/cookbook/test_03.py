"""03_loop_by_hand.py: its questions; and the whole of it, small."""

import random
import re
from pathlib import Path

import pytest

from cray_agents import Run
from cray_agents.cli.user_files import load
from cray_agents.testing import ScriptedEngine
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "03_loop_by_hand.py"
book = load(FILE)


def test_no_held_out_question_is_trained_on() -> None:
    draw = random.Random(0)
    train = {book.question(draw, "train").input for _ in range(500)}
    held_out = [book.question(draw, "holdout") for _ in range(500)]
    assert not train & {task.input for task in held_out}
    assert {task.split for task in held_out} == {"holdout"}


def test_demonstrations_are_what_a_perfect_run_says() -> None:
    task = book.question(random.Random(0), "train")
    shown = book.demonstration(task)
    says = ScriptedEngine([shown[2]["tool_calls"][0]["function"], task.target])
    done: Run = book.agent.override(engine=says).run_sync(task)
    assert done.error is None and book.right(done) == 1
    assert [(m["role"], m.get("content") or "") for m in done.trajectory.messages] == [
        (m["role"], m.get("content") or "") for m in shown
    ]


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    warmed, sampled, decided = quick_lines(FILE, tmp_path)
    assert re.fullmatch(r"calc@2: held out [01]\.\d{3}", warmed)
    assert re.fullmatch(r"calc@3: \d+ of 16 runs were right", sampled)
    assert re.fullmatch(r"  held out [01]\.\d{3}: (promote|reject), .+", decided)
