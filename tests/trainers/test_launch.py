"""The launcher: CUDA before the ranks, and ranks that are new Pythons if an import opened it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import find_placement, load_for_ranks
from cray_agents.trainers.session.session_journal import SessionJournal, SessionSpec
from cray_agents.training_jobs import Layout

# Megatron imports the package if it is there, as Transformer Engine does
OPENS_CUDA = """
import os
from pathlib import Path
import torch
torch.cuda._initialized = True
with Path(os.environ["IMPORTED_BY"]).open("a") as file:
    print(os.getpid(), file=file)
raise ImportError("this build of flash_attn has no kernel for this GPU")
"""


@pytest.mark.megatron
def test_an_import_that_opens_cuda_makes_ranks_spawn_and_changes_no_bit(
    lab: Any, tmp_path: Path
) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2})
    forked = lab.run(spec)
    assert [e["spawned"] for e in forked.journal.events() if e["event"] == "started"] == [False]

    package = tmp_path / "packages" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(OPENS_CUDA)
    home = Home(tmp_path / "other")
    home.dataset("ds").parent.mkdir(parents=True)
    home.dataset("ds").symlink_to(lab.home.dataset("ds"))
    journal = JobJournal(home, spec.id)
    journal.write_spec(spec)
    path = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cray_agents.trainers.job.job",
            str(journal.folder / "spec.json"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "IMPORTED_BY": str(tmp_path / "pids"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks are spawned" in done.stdout
    assert len(set((tmp_path / "pids").read_text().split())) == 3  # the launcher and both ranks
    events = journal.events()
    assert [e["spawned"] for e in events if e["event"] == "started"] == [True]
    assert [e["loss"] for e in events if e["event"] == "step"] == forked.losses
    ours, theirs = home.checkpoint(spec.id), lab.home.checkpoint(spec.id)
    assert weights_sha256(ours) == weights_sha256(theirs)


@pytest.mark.megatron
@pytest.mark.parametrize(("tensor", "connections"), [(1, None), (2, "1")])
def test_cuda_keeps_the_order_that_tensor_parallel_layers_need(
    monkeypatch: pytest.MonkeyPatch, tensor: int, connections: str | None
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # restored afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    load_for_ranks(find_placement(tensor, "job"), Layout(tensor=tensor))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_a_sessions_rank_in_a_new_python_runs_what_a_forked_one_does(tmp_path: Path) -> None:
    from cray_agents.trainers.session import resident, session_process

    session = SessionJournal(Home(tmp_path), "s")
    session.write_spec(SessionSpec(name="s"))
    made: Any = session_process.rank_main(True, str(session.home.root), "s", 3)
    assert made.func is resident.run and made.args[0].spec() == session.spec()
    assert made.args[1:] == (3, True)
