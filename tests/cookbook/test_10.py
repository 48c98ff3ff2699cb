"""10_cluster.py: its dry run, and every command that its text tells to type."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cray_agents.cli import app
from cray_agents.cli.user_files import load
from cray_agents.config import load_config
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Layout

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "cookbook" / "10_cluster.py"
TEXT = str(load(FILE).__doc__)
COMMANDS = [line.strip() for line in TEXT.splitlines() if line.startswith("    cray-agents ")]


def test_dry_run(tmp_path: Path) -> None:
    argv = [sys.executable, str(FILE), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    config = load_config(directory=tmp_path)
    assert (config.scheduler, config.train_gpu, config.train_nodes) == ("slurm", "H100", 2)
    assert config.slurm_options == ["--partition=gpu", "--account=me"]
    assert "LoRA of rank 32" in done.stdout and "all weights of a qwen3 model" in done.stdout
    assert "trainer: 16 ranks on 2 nodes of 8 x H100 (79 GiB)" in done.stderr
    [folder] = config.root.jobs.iterdir()
    spec = JobJournal(config.root, folder.name).spec()
    assert spec.hyperparameters.lora is not None and spec.hyperparameters.dtype == "bfloat16"
    assert spec.layout == Layout(data=8, tensor=2, sequence_parallel=True)
    script = done.stdout.partition("#!/bin/bash")[2]
    for option in ("nodes=2", "ntasks=16", "ntasks-per-node=8", "gpus-per-node=8", "time=240"):
        assert f"#SBATCH --{option}\n" in script
    assert f"cray_agents.trainers.job.job {folder}/spec.json" in script
    assert "layout data=8 tensor=2" in script


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_told_to_type_is_understood(command: str) -> None:
    group = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context(command, words)  # raises UsageError for what it does not know


def test_its_text_tells_to_type_something() -> None:
    assert len(COMMANDS) >= 8
