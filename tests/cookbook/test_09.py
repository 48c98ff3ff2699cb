"""09_feedback.py: its questions; and the whole of it, small, as its docstring says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.cli.agents import load

FILE = Path(__file__).parents[2] / "cookbook" / "09_feedback.py"
book = load(FILE)


def test_nothing_held_out_is_shown_or_trained_on() -> None:
    for quick in (False, True):
        loop = book.make_loop(quick)
        held = {task.input for task in loop.tasks.split("holdout")}
        shown = {conversation[0]["content"] for conversation, _ in loop.demonstrations}
        assert len(loop.tasks) == len(held)
        assert not held & shown
        assert held | shown == set(book.QUESTIONS)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FILE, "--quick"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    start, update, thumbs = done.stdout.splitlines()
    assert start.startswith("0 hotel@")
    number, version, runs, _ = update.split(maxsplit=3)
    assert (number, version, runs) == ("1", "hotel@3", str(book.QUICK.thumbs))
    assert re.fullmatch(rf"\d of {book.QUICK.thumbs} thumbs were up", thumbs)
