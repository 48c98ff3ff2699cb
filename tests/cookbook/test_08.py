"""08_feedback.py: its questions; and the whole of it, small, as its docstring says."""

import re
from pathlib import Path

import pytest

from cray_agents.cli.user_files import load
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "08_feedback.py"
book = load(FILE)


def test_nothing_held_out_is_shown_or_trained_on() -> None:
    for quick in (False, True):
        loop = book.make_loop(quick=quick)
        held = {task.input for task in loop.tasks.split("holdout")}
        shown = {conversation[0]["content"] for conversation, _ in loop.data.demonstrations}
        assert len(loop.tasks) == len(held)
        assert not held & shown
        assert held | shown == set(book.QUESTIONS)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    start, thumbs, update = quick_lines(FILE, tmp_path)
    assert start.startswith("0 hotel@2 ")
    assert update.startswith("1 hotel@3 ")
    assert re.fullmatch(rf"\d of {book.QUICK.thumbs} thumbs were up", thumbs)
