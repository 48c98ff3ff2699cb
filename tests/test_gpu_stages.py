"""`make gpu`: its stages in tiny sizes on the CPU, and what it says where they cannot run."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu import swap
from tests.gpu.bench import ONE_CORE, Bench, Failed
from tests.gpu.report import Report

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.megatron
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("forked_jobs")
def test_every_stage_runs_in_tiny_sizes(tmp_path: Path) -> None:
    """Of train-1B, train-3B and train-4B only one, for they are the same in these sizes."""
    out = tmp_path / "report"
    names = [name for name in gpu.STAGES if name not in ("swap", "train-3B", "train-4B")]
    command = [sys.executable, "-m", "tests.gpu", "--cpu-tiny", "--peak", "0.1", "--out", str(out)]
    command += ["--minutes", "60", *(option for name in names for option in ("--only", name))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((out / "gpu.json").read_bytes())["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == dict.fromkeys(
        ["imports", *names], "done"
    )
    rows = {name: stage["rows"] for name, stage in stages.items()}
    assert not any("problem" in row for stage in rows.values() for row in stage)
    assert rows["imports"] == [{"layers": "cpu", "cuda_initialized_by_imports": False}]
    dense, mixture = rows["golden"][:2], rows["golden"][2:]
    for name, (float32, bfloat16) in (("small", dense), ("small-moe", mixture)):
        assert float32["model"] == bfloat16["model"] == name
        assert float32["loss_apart"] == float32["gradient_apart"] == 0  # it is the golden run again
        assert 0 < bfloat16["gradient_apart"] < bfloat16["gradient_bound"]
    for name in ("train-1B", "train-moe", "lora-8B"):
        assert [row["sequences"] for row in rows[name]] == ["equal", "equal", "chats"]
        assert all(row["mfu"] > 0 and row["planned_gib"] > 0 for row in rows[name])
    for row in rows["transformers"]:  # the same weights and data: the same loss, but for rounding
        ours, theirs = row["trainer_first_loss"], row["transformers_first_loss"]
        assert ours == pytest.approx(theirs, rel=1e-3)
    for name in ("session", "session-small-rate", "session-lora"):
        assert [row["starts"] for row in rows[name]] == ["the session", "from memory"]
        assert all(row["latency"] > 0 and row["changed_share"] > 0 for row in rows[name])
    far, near = (rows[name][1] for name in ("session", "session-small-rate"))
    assert 0 < near["changed_since_first"] < far["changed_since_first"]
    assert [row["layout"] for row in rows["parallel"]] == [
        "tensor=2", "pipeline=2", "data=2, expert=2",
    ]  # fmt: skip
    assert [row["layouts"] for row in rows["resume"]] == [
        "tensor=2 then pipeline=2", "data=2 then tensor=2", "data=2, expert=2 then data=2",
    ]  # fmt: skip
    assert rows["train-all"][0]["ranks"] == 2 and rows["train-all"][0]["mfu"] > 0
    assert rows["hang"][0]["recorded"]
    assert {row["against"] for row in rows["logprobs"]} == {"float32", "chosen by torch"}
    assert any("export" in row["what"] for row in rows["export"])
    whole, sharded = rows["sharding"]
    assert (whole["sharding"], sharded["sharding"]) == ("optimizer", "full")
    assert sharded["loss_last"] == pytest.approx(whole["loss_last"], rel=2e-2)
    table = (out / "gpu.md").read_text()
    assert "tiny, on the CPU" in table and table.count("| model |") == len(names)


@pytest.mark.vllm
@pytest.mark.usefixtures("forked_servers")
def test_a_replica_changes_its_weights(tmp_path: Path) -> None:
    deadline = time.monotonic() + 3600
    bench = Bench(Report(tmp_path / "report"), tmp_path, ONE_CORE, on_cpu=True, deadline=deadline)
    bench.report.begin({})
    swap.main(bench, "swap")
    (row,) = bench.report.read()["stages"]["swap"]["rows"]
    assert 0 < row["logprobs_apart"] < 1e-3


def test_a_stage_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> None:
        bench.report.add("broken", seen=1.5)
        raise RuntimeError("out of luck")

    def refused(bench: Bench) -> None:
        raise Failed("out of bounds")

    def endless(bench: Bench) -> None:
        signal.raise_signal(signal.SIGALRM)  # as when its time is over

    def good(bench: Bench) -> None:
        bench.report.add("good", seconds=bench.deadline - time.monotonic())

    works = {"broken": broken, "refused": refused, "good": good, "endless": endless}
    stages = {name: gpu.Stage(work, 60) for name, work in works.items()}
    monkeypatch.setattr(gpu, "STAGES", stages)
    monkeypatch.setattr(gpu, "imports", lambda bench: bench.report.begin({}))
    for later, failed, states in (
        (3600.0, ["broken", "refused", "endless"], ["failed", "failed", "done", "failed"]),
        (-1.0, [], ["skipped"] * 4),
    ):
        report = Report(tmp_path / str(later))
        deadline = time.monotonic() + later
        bench = Bench(report, tmp_path, ONE_CORE, on_cpu=True, deadline=deadline)
        assert gpu.run(bench, list(stages), share=2.0) == failed
        found: dict[str, Any] = report.read()["stages"]
        assert [found[name]["state"] for name in stages] == states
        if failed:
            assert found["broken"]["rows"] == [{"seen": 1.5}]
            assert "out of luck" in found["broken"]["problem"]
            assert "its time is over" in found["endless"]["problem"]
            assert 60 < found["good"]["rows"][0]["seconds"] < 120  # its share of an hour


def test_a_machine_without_a_gpu_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--out", str(tmp_path / "none")]) == gpu.NO_GPU == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
