"""04_datasets.py, run as its docstring says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.datasets import dataset_runs, list_datasets

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "cookbook" / "04_datasets.py"


def test_conversations_become_a_training_set_and_other_formats(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FILE, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    home = Home(tmp_path / "root")
    (made,) = list_datasets(home).rows
    assert (made["samples"], made["rejected"]) == (9, {"contaminated": 1})
    (left_out,) = [row for row in dataset_runs(home, made["id"]) if not row["accepted"]]
    assert "benchmark.txt:1" in left_out["detail"]
    lines = (tmp_path / "chats.trl.jsonl").read_text().splitlines()
    assert len(lines) == 10 and json.loads(lines[0])["messages"][1]["role"] == "user"
    assert (tmp_path / "huggingface" / "README.md").exists()
