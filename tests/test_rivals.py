"""Counts of the benchmarks beside rivals: samples of killed jobs, processes and their memory."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bench.rivals.process_tree import kill_tree, memory_of, tree_of
from bench.rivals.resume_kills import Notes, Outcome, token_rows
from cray_agents.processes import alive

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
CHILD = "import time; kept = b'x' * (64 << 20); print('ready', flush=True); time.sleep(600)"


def weights(path: Path, values: list[float]) -> Path:
    save_file({"w": np.array(values, np.float32)}, path)
    return path


def test_samples_of_a_killed_job_are_counted_against_the_calm_one(tmp_path: Path) -> None:
    calm, killed = Notes(tmp_path / "calm"), Notes(tmp_path / "killed")
    for step, samples in enumerate(([1, 2], [3, 4], [5, 6])):
        calm.add(step, samples)
    assert killed.step == 0
    for step, samples in ((0, [2, 1]), (1, [9, 9]), (1, [4, 3]), (2, [5, 5])):
        killed.add(step, samples)
    assert killed.step == 2
    outcome = Outcome(kills=1)
    ends = weights(tmp_path / "one", [1, 2]), weights(tmp_path / "two", [1, 2.5])
    outcome.compare(*ends, killed, calm)
    assert (outcome.other_samples, outcome.lost, outcome.doubled) == (1, 1, 1)
    assert (outcome.redone, outcome.difference) == (1, 0.5)


def test_a_step_that_was_cut_off_in_the_file_is_none(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    notes.add(0, [1, 2])
    with (tmp_path / "notes").open("a") as file:
        file.write("[1, [3,")
    assert notes.samples() == {0: [1, 2]}


def test_samples_are_told_apart_by_their_tokens() -> None:
    rows = token_rows()
    assert len({tuple(row) for row in rows}) == len(rows)
    assert max(max(row) for row in rows) < 300 and min(map(min, rows)) >= 4


def test_a_tree_is_measured_and_killed_with_its_children() -> None:
    argv = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with memory_of(process.pid) as peak:
            peak.look(process.pid)
        assert peak.own > 64 and peak.engine == 0
        first, child = tree_of(process.pid)
        assert first == process.pid
        kill_tree(process.pid)
        process.wait()
        assert process.stdout.read() == ""  # ends with the child, which holds it too
        while alive(child):
            time.sleep(0.01)
