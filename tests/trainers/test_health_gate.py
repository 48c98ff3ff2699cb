"""The health gate: a bad node is named before a job begins on it, and the job goes elsewhere."""

import json
import os
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cray_agents.errors import SetupError
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.excluded_nodes import excluded_nodes
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.job.failures import health_gate
from cray_agents.trainers.job.failures.health_gate import (
    check_node,
    check_root,
    gpu_problem,
    refuse_ranks,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.planning.cluster_resources import Resources


def test_a_root_that_cannot_be_written_is_told_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    check_root(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    clock = SimpleNamespace(monotonic=count(0, 60).__next__)  # its time is over at once
    monkeypatch.setattr(health_gate, "time", clock)
    with pytest.raises(SetupError, match=r"^health gate: node n3: .* cannot be written"):
        check_root(tmp_path / "file" / "root")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("0, 0, No\n1, 0, No\n", ""),
        ("0, [N/A], [N/A]\n", ""),
        ("0, 0, No\n1, 2, No\n", "GPU 1 has 2 uncorrectable ECC errors"),
        ("0, 0, Yes\n", "GPU 0 could not remap"),
        ("", ""),
    ],
)
def test_memory_errors_of_gpus_are_read_from_nvidia_smi(rows: str, problem: str) -> None:
    assert gpu_problem(rows).startswith(problem) and bool(gpu_problem(rows)) == bool(problem)


def test_a_gpu_that_is_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, "echo Unable to determine the device handle for GPU0; exit 15")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SetupError, match="Unable to determine the device handle"):
        check_node(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_node(tmp_path)  # a job on CPU cores


def test_clocks_and_sums_are_compared_over_the_nodes() -> None:
    now = time.time()
    refuse_ranks([["n1", now, 0], ["n2", now + 4, 0], ["n3", now - 3, 0]])
    with pytest.raises(SetupError, match=r"node n2: its clock is \+60\.0 s"):
        refuse_ranks([["n1", now, 0], ["n2", now + 60, 0], ["n3", now, 0]])
    with pytest.raises(SetupError, match="node n3: a sum over all ranks came out wrong"):
        refuse_ranks([["n1", now, 0], ["n3", now, 7]])


def write_nvidia_smi(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.megatron
@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs()), reason=f"lacks {missing_programs()}")
def test_a_job_on_a_node_that_fails_its_gate_starts_on_another(lab: Any, tmp_path: Path) -> None:
    """Its node says that its GPU is lost. The other one has no GPU that torch could use."""
    fails = '[ "$SLURMD_NODENAME" = 127.0.0.1 ] && { echo GPU is lost; exit 15; }; echo 0, 0, No'
    write_nvidia_smi(tmp_path / "bin", fails)

    class WithGpus(Slurm):
        def submit(self, command: Command) -> str:
            path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
            variables = {**command.environment, "PATH": path, "CUDA_VISIBLE_DEVICES": "0"}
            return super().submit(command.model_copy(update={"environment": variables}))

    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 2})
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2, cpus=1)
    cluster.start()
    with WithGpus(tmp_path / "slurm", cluster) as scheduler:
        trainer = MegatronTrainer(lab.home, scheduler, Resources())
        trainer.submit(spec)
        journal, deadline = JobJournal(lab.home, spec.id), time.monotonic() + 400
        while (status := trainer.status(spec.id)).state in ("queued", "running"):
            assert time.monotonic() < deadline, journal.log_tail()
            time.sleep(0.2)
    assert (status.state, status.attempts) == ("succeeded", 2), journal.log_tail()
    (verdict,) = [event for event in journal.events() if event["event"] == "verdict"]
    assert (verdict["cause"], verdict["node"]) == ("node", "127.0.0.1")
    assert "health gate" in verdict["message"] and "GPU is lost" in verdict["message"]
    assert [node.node for node in excluded_nodes(lab.home.excluded_nodes)] == ["127.0.0.1"]
    hosts = [json.loads((journal.folder / "attempts" / n).read_bytes()) for n in ("1", "2")]
    assert len(hosts) == 2
