"""`jobs submit-script`: a person's script on a real Slurm, and as a local process."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.errors import BadInput, JobError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.choose import missing_programs
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.script_jobs import ScriptJob, prepare

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --comment="a site's"   # one task a node
#SBATCH --ntasks-per-node=1

echo "script $1 in $(basename "$PWD") with $SITE on $SLURM_NNODES"
#SBATCH --job-name=late
srun --quiet bash -c 'echo "task $SLURM_PROCID"'
exit 3
"""
SLEEPS = "trap 'echo asked; exit 9' TERM; echo up; while :; do sleep 0.05; done\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where one works, with a configuration."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    (folder / "cray-agents.toml").write_text("[job.environment]\nSITE = 'modules'\n")
    return folder


def jobs(*words: str) -> str:
    """The output of a command of the group `jobs`. Raises what it raises."""
    done = CliRunner().invoke(app, ["jobs", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def row(job_id: str) -> dict[str, Any]:
    (found,) = [each for each in json.loads(jobs("list", "--json")) if each["id"] == job_id]
    return found


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slurm
def test_a_script_on_a_real_slurm(work: Path) -> None:
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed: {missing}")
    cluster = PrivateCluster(work / ".cray-agents" / "slurm", nodes=2, cpus=1)
    cluster.start()  # as the platform of this root does
    try:
        (work / "train.sh").write_text(SCRIPT)
        with pytest.raises(JobError, match="script-1 failed: exit code 3"):
            jobs("submit-script", "train.sh", "--", "one")
        log = jobs("logs", "script-1").splitlines()
        assert log[0] == "script one in work with modules on 2"
        assert {"task 0", "task 1"} <= set(log)
        first = row("script-1")
        assert (first["state"], first["exit_code"], first["scheduler"]) == ("failed", 3, "slurm")
        script = jobs("script", "script-1")
        assert "#SBATCH --nodes=2\n" in script and "job-name=late" not in script
        assert "\nsrun" not in script and "--signal=B:TERM@60\n" in script

        limited = f"#SBATCH --time=1\n#SBATCH --ntasks=1\n{SLEEPS}"
        (work / "limited.sh").write_text(limited)
        jobs("submit-script", "--detach", "limited.sh")
        assert "--signal=B:TERM@30\n" in jobs("script", "script-2")
        until(lambda: "up" in jobs("logs", "script-2"))
        early = ["scancel", "--batch", "--signal=TERM", str(row("script-2")["scheduler_job_id"])]
        subprocess.run(early, env=cluster.environment, check=True)  # as before the limit
        until(lambda: row("script-2")["state"] == "failed")
        assert row("script-2")["exit_code"] == 9
        assert row("script-2")["reason"].startswith("TIMEOUT: ")

        (work / "sleep.sh").write_text(SLEEPS)
        jobs("submit-script", "--detach", "--slurm-option=--ntasks=1", "sleep.sh")
        until(lambda: row("script-3")["state"] == "running" and "up" in jobs("logs", "script-3"))
        assert jobs("cancel", "script-3") == "script-3 is cancelled\n"
        assert "asked" in jobs("logs", "script-3")
        assert [row(f"script-{n}")["state"] for n in (1, 3)] == ["failed", "cancelled"]
    finally:
        cluster.close()
    assert json.loads(jobs("show", "script-3", "--json"))[0]["state"] == "cancelled"  # recorded


def test_a_script_without_slurm_is_a_process_of_the_command(work: Path) -> None:
    (work / "train.sh").write_text(SCRIPT.replace("srun --quiet ", "").replace("exit 3", ""))
    local = ("--home", str(work / "root"))
    (work / "cray-agents.toml").write_text(
        "scheduler = 'local'\n[job]\nprolog = ['export SITE=prolog']\n"
    )
    made = json.loads(jobs("submit-script", *local, "--json", "train.sh", "two"))
    assert (made["id"], made["state"], made["exit_code"]) == ("script-1", "succeeded", 0)
    assert jobs("logs", *local, "script-1").startswith("script two in work with prolog on \n")
    with pytest.raises(BadInput, match="where no Slurm answers, the script ends"):
        jobs("submit-script", *local, "--detach", "train.sh")
    with pytest.raises(BadInput, match="--nodes=2: no Slurm answers here"):
        jobs("submit-script", *local, "--slurm-option=--nodes=2", "train.sh")
    (work / "sleep.py").write_text(f"#!/usr/bin/env -S bash\n{SLEEPS}")
    argv = [sys.executable, "-m", "cray_agents", "jobs", "submit-script", *local, "sleep.py"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout and command.stdout.readline() == "up\n"
        assert jobs("cancel", *local, "script-2") == "script-2 is cancelled\n"
        assert command.wait(300) == 1
    with pytest.raises(NotFound, match=r"no script 'script-7'; there is script-1, script-2"):
        jobs("logs", *local, "script-7")


def test_a_script_whose_process_was_killed_has_failed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "a.sh").write_text("sleep 60\n")
    job = prepare(home, tmp_path / "a.sh", [], [], None, slurm=False)
    assert job.status().state == "unknown"
    code = f"""
import os, sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.script_jobs import ScriptJob
job = ScriptJob(Home(Path({str(tmp_path)!r})), {job.id!r})
job.submit(LocalProcesses(job.folder / "processes"), here=True)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    status = ScriptJob(home, job.id).status()
    assert status.state == "failed"
    assert status.reason == "the process that ran it was killed"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#SBATCH --job-name=a\n", "a.sh: '--job-name=a' cannot be given"),
        ("#SBATCH -N 2\n", "a.sh: '-N' is no option"),
        ("#SBATCH --array=1-9\n", "Not for a script: --array"),
    ],
)
def test_lines_that_the_platform_needs_for_itself_are_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "a.sh").write_text(text)
    with pytest.raises(BadInput, match=said):
        prepare(Home(tmp_path / "root"), tmp_path / "a.sh", [], [], None, slurm=True)
    assert not (tmp_path / "root").exists()
