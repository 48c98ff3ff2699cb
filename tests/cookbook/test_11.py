"""11_own_loss.py: its loss by hand; and the whole of it, small."""

import re
from pathlib import Path

import pytest
import torch

from cray_agents.cli.user_files import load
from cray_agents.training import Datum
from tests.support.quick_recipe import quick_lines

FILE = Path(__file__).parents[2] / "cookbook" / "11_own_loss.py"
book = load(FILE)


def test_the_loss() -> None:
    data = [Datum(token_ids=[1, 2], advantages=[value] * 2) for value in (1.0, 0.0, 0.5)]
    logprobs = [torch.tensor([0.0, -value], requires_grad=True) for value in (1.0, 2.0, 3.0)]
    book.loss(logprobs, data).backward()
    gradients = [round(float(row.grad[1]), 6) for row in logprobs if row.grad is not None]
    assert gradients == [-0.25, 0.25, 0.0]  # a third of 0.75, -0.75 and 0 above the others


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.vllm
@pytest.mark.megatron
def test_quick(tmp_path: Path) -> None:
    lines = quick_lines(FILE, tmp_path)
    assert [bool(re.match(r"own@[12]: reward [01]\.\d{3}, such as ", line)) for line in lines] == [
        True,
        True,
    ]
