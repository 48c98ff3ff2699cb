"""04_fine_tuning.py, run as its docstring says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import dataset_runs, list_datasets
from cray_agents.runtime.registry.registry import Registry

FILE = Path(__file__).parents[2] / "cookbook" / "04_fine_tuning.py"
ROW = re.compile(r"^(\w+) +(loss|margin) +([\d.]+) +([\d.]+)  (\S+)$", re.MULTILINE)


def run(folder: Path) -> tuple[str, str]:
    argv = [sys.executable, str(FILE), str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.mark.slurm
@pytest.mark.megatron
def test_every_fine_tune_learns(tmp_path: Path) -> None:
    out, progress = run(tmp_path)
    table = {job: (what, float(a), float(b), Path(to)) for job, what, a, b, to in ROW.findall(out)}
    assert list(table) == ["sft", "lora", "dpo", "kto"]
    for job, (what, first, last, weights) in table.items():
        assert last < 0.8 * first if what == "loss" else last > 0.1 > first == 0
        assert (weights / "model.safetensors").is_file() == (job != "lora")
    assert table["sft"][2] < 0.5  # of 6.2 for a model that knows nothing
    assert (table["lora"][3] / "adapter" / "adapter_model.safetensors").is_file()
    assert len(re.findall(r"step 32/32 ", progress)) == 4
    home = Home(tmp_path / "root")
    of = {made["id"]: made for made in list_datasets(home).rows}
    assert [made["rejected"] for made in of.values() if made["rejected"]] == [{"contaminated": 1}]
    (left_out,) = [row for made in of for row in dataset_runs(home, made) if not row["accepted"]]
    assert "benchmark.txt:1" in left_out["detail"]
    lines = (tmp_path / "chats.trl.jsonl").read_text().splitlines()
    assert len(lines) == 40 and json.loads(lines[0])["messages"][0]["role"] == "user"
    assert (tmp_path / "huggingface" / "README.md").exists()
    [bot] = Registry(home).versions("bot")
    assert home.checkpoint(bot.checkpoint) == table["sft"][3]
    specs = [json.loads(path.read_text()) for path in home.jobs.glob("*/spec.json")]
    assert sorted(spec["method"] for spec in specs) == ["dpo", "kto", "sft", "sft"]
