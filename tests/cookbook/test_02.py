"""02_calculator_loop.py: its tasks and demonstrations; and the whole of it, small."""

from pathlib import Path

import pytest

from cray_agents.cli.user_files import load
from cray_agents.testing import ScriptedEngine
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "02_calculator_loop.py"
book = load(FILE)


def test_a_perfect_run_says_what_is_demonstrated() -> None:
    loop = book.make_loop(quick=True)
    task = next(task for task in loop.tasks if task.split == "train")
    shown, _ = loop.data.demonstrations[0]
    says = ScriptedEngine([shown[2]["tool_calls"][0]["function"], task.target])
    done = book.agent.override(engine=says).run_sync(task)
    assert done.error is None and book.exact(done) == 1
    assert [(m["role"], m.get("content") or "") for m in done.trajectory.messages] == [
        (m["role"], m.get("content") or "") for m in shown
    ]


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    """By grpo: `tests/test_demo.py` runs the like by rft."""
    lines = [line.split() for line in quick_lines(FILE, tmp_path, "--method", "grpo")]
    assert len(lines) == 2 and all(line[0].startswith("calc@") for line in lines)
