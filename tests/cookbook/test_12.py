"""12_distillation.py: its loop; and the whole of it, small."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cray_agents import Distill
from cray_agents.cli.user_files import load
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "12_distillation.py"
book = load(FILE)


def test_the_student_has_a_teacher_and_no_demonstrations() -> None:
    loop = book.make_loop(3, quick=True, teacher=SimpleNamespace(id="teacher@1"))
    assert isinstance(loop.method, Distill) and loop.method.teacher == "teacher@1"
    assert not loop.data.demonstrations
    assert loop.tasks.split("holdout")


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    teacher, start, distilled = quick_lines(FILE, tmp_path)
    assert re.fullmatch(r"teacher@1: held out [01]\.\d{3}", teacher)
    assert re.fullmatch(r"calc@\d+: held out [01]\.\d{3}", start)
    assert re.fullmatch(
        r"calc@\d+: held out [01]\.\d{3}, -?\d\.\d{4} nats a token before", distilled
    )
