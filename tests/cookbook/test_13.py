"""13_sabotage: each failure is caught. CRAY_TEST_SABOTAGE=all: all twelve, and a control."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "cookbook" / "13_sabotage" / "sabotage.py"
ALL = os.environ.get("CRAY_TEST_SABOTAGE") == "all"
SHORT = ("adapter", "tokenizer", "parser", "rate", "leak", "doubled", "reference")


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(1800)
def test_no_failure_goes_through(tmp_path: Path) -> None:
    chosen = [] if ALL else ["--only", *SHORT]
    done = subprocess.run(
        [sys.executable, FILE, *chosen], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    count = len(SHORT) if chosen else 12
    assert done.stdout.endswith(f"{count} of {count} caught\n"), done.stdout + done.stderr[-3000:]
    assert done.returncode == 0


@pytest.mark.skipif(not ALL, reason="starts another platform; `make soak` does")
@pytest.mark.vllm
@pytest.mark.megatron
def test_what_is_not_broken_is_not_caught(tmp_path: Path) -> None:
    """The control: without its broken function a failure "goes through"."""
    recipe = tmp_path / "13_sabotage"
    recipe.mkdir()
    (recipe / "sabotage.py").write_bytes(FILE.read_bytes())
    (recipe / "sitecustomize.py").write_text('"""Breaks nothing."""\n')
    done = subprocess.run(
        [sys.executable, recipe / "sabotage.py", "--only", "adapter"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("0 of 1 caught\n"), done.stdout + done.stderr[-3000:]
    assert done.returncode == 1
